"""Stage `render`: conversations -> token ids with labelled, weighted spans, `branches.arrow`.

A conversation is rendered once and tokenised once. Nothing is cut: what is too long is dropped and listed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from artifacts.store import Store
from artifacts.tables import iter_rows, open_table, write_table
from schemas.config import RenderConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Dropped, Rendered, RenderReport
from schemas.tables import BRANCH_SCHEMA_VERSION, BRANCHES, SPAN_KINDS
from schemas.trajectory import Message, Trajectory
from tasks.model import load_tokenizer
from tasks.scoring import span_weights
from tasks.skeleton import RenderError, Rendering, render_conversation
from tasks.spans import ACTION, REASONING, THOUGHT, TURN_END, Span, SpanTokenizer, label
from tasks.splits import side
from tasks.templates import Template, check_prefix, load_template

STAGE_VERSION: Final = 1

Progress = Callable[[int, int], None]
"""Called with runs done and runs in all."""

LENGTH_LIMITS: Final = {f"{k}K": k * 1024 for k in (16, 32, 48, 64, 80, 128, 256)}


@dataclass(frozen=True)
class Renderer:
    """A model's template and tokenizer, ready for use."""

    template: Template
    tokens: SpanTokenizer


@dataclass(frozen=True)
class LabelledRun:
    """One rendered conversation: its text, and spans over characters and tokens with a weight for each."""

    rendering: Rendering
    char_spans: tuple[Span, ...]
    token_ids: np.ndarray  # [n_tokens] int32
    spans: tuple[Span, ...]  # in tokens
    weights: tuple[float, ...]  # one a token span; 0: not scored

    @property
    def n_scored(self) -> int:
        return sum(span.end - span.start for span, weight in zip(self.spans, self.weights, strict=True) if weight > 0)


def make_renderer(model: Ref | Path, chat_template: str = "auto") -> Renderer:
    """Loads the tokenizer and the template of a model.

    Args:
        chat_template: auto, stock, or a .jinja file, as `model.chat_template` of the config.

    Raises:
        UserError: the tokenizer does not load, or the template cannot be trained with.
    """
    tokenizer = load_tokenizer(model)
    template = load_template(tokenizer, chat_template)
    return Renderer(template, SpanTokenizer(tokenizer, template.special))


def render_run(trajectory: Trajectory, renderer: Renderer, config: RenderConfig) -> LabelledRun:
    """Renders, labels and weights one run.

    Raises:
        RenderError: the run cannot be rendered as it was written; the text is the reason in the report.
        UserError: the template cannot be used for this corpus at all.
    """
    template, messages = renderer.template, trajectory.messages
    if not messages:
        raise RenderError("the run holds no message")
    if template.call_open is None and any(message.tool_calls for message in messages):
        raise UserError(
            "the chat template leaves out tool calls, and the runs have some",
            where=template.name,
            fix="set model.chat_template to one that prints them",
        )
    rendering = render_conversation(
        template.jinja,
        messages,
        _tools(trajectory),
        with_reasoning=template.has_reasoning,
        special=template.special,
        check_prefix=lambda chat, tools: check_prefix(
            template.jinja, renderer.tokens.whole, chat, tools, f"{trajectory.source_path} ({trajectory.trajectory_id})"
        ),
    )
    char_spans = label(rendering, messages, template)
    tokens = renderer.tokens.encode(rendering, char_spans)
    weights = span_weights(tokens.spans, messages, config)
    return LabelledRun(rendering, tuple(char_spans), tokens.ids, tokens.spans, tuple(weights))


def _tools(trajectory: Trajectory) -> list[dict[str, Any]] | None:
    if not trajectory.tools_json:
        return None
    try:
        tools = json.loads(trajectory.tools_json)
    except ValueError as error:
        raise RenderError(f"the tool schemas are no JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RenderError("the tool schemas are no JSON array of objects")
    return tools or None


def opening_sha256(messages: Sequence[Message]) -> str:
    """Of the system message and the first task message, the latter only where no simulated user wrote it."""
    opening = list(messages[:1]) if messages and messages[0].role == "system" else []
    task = next((message for message in messages[len(opening) :] if message.role == "user"), None)
    if task is not None and task.author != "simulated_user":
        opening.append(task)
    return hashlib.sha256(json.dumps([[message.role, message.content] for message in opening]).encode()).hexdigest()


def branch_rows(
    trajectory: Trajectory, run: LabelledRun, config: RenderConfig, split: SplitConfig
) -> Iterator[dict[str, Any]]:
    """Rows of `branches`: one for the run, or in turn mode one for every scored turn with its history.

    Over all rows of a run, turn mode scores the same tokens once that trajectory mode scores.
    """
    policy_kinds = {REASONING, THOUGHT, ACTION, TURN_END}
    common = {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "split": side(trajectory.task_id, trajectory.repo, split),
        "outcome": trajectory.outcome.status,
        "score": trajectory.outcome.score,
        "has_reasoning": any(span.kind == REASONING for span in run.spans),
        "opening_sha256": opening_sha256(trajectory.messages),
    }

    def row(branch_id: str, spans: Sequence[Span], weights: Sequence[float]) -> dict[str, Any]:
        pairs = list(zip(spans, weights, strict=True))
        return common | {
            "branch_id": branch_id,
            "token_ids": run.token_ids[: spans[-1].end],
            "spans": _merged(pairs),
            "n_tokens": spans[-1].end,
            "n_scored": sum(span.end - span.start for span, weight in pairs if weight > 0),
        }

    if config.mode == "trajectory":
        yield row(trajectory.trajectory_id, run.spans, run.weights)
        return
    scored = sorted({span.message for span, weight in zip(run.spans, run.weights, strict=True) if weight > 0})
    for message in scored:
        last = max(i for i, span in enumerate(run.spans) if span.message == message and span.kind in policy_kinds)
        weights = [
            weight if span.message == message else 0.0 for span, weight in zip(run.spans, run.weights, strict=True)
        ]
        yield row(f"{trajectory.trajectory_id}-m{message}", run.spans[: last + 1], weights[: last + 1])


def _merged(pairs: Iterable[tuple[Span, float]]) -> list[dict[str, Any]]:
    """Rows of the table's span column; neighbours that differ in nothing but their call become one."""
    merged: list[dict[str, Any]] = []
    for span, weight in pairs:
        row = {"start": span.start, "end": span.end, "kind": span.kind, "message": span.message, "weight": weight}
        if merged and all(merged[-1][key] == row[key] for key in ("kind", "message", "weight")):
            merged[-1]["end"] = span.end
        else:
            merged.append(row)
    return merged


def refusal(row: dict[str, Any], config: RenderConfig) -> str | None:
    """Why a row may not be trained on; None when it may."""
    if not any(span["kind"] in (ACTION, TURN_END) for span in row["spans"]):
        return "no turn of the policy model"
    if row["n_scored"] == 0:
        return f"no scored token (loss_on = {', '.join(config.loss_on)})"
    if row["n_scored"] > config.max_scored_share * row["n_tokens"]:
        return (
            f"scored share {row['n_scored'] / row['n_tokens']:.2f} is above max_scored_share {config.max_scored_share}"
        )
    if "turn_end" in config.loss_on and config.kind_weights.get("turn_end", 1) > 0:
        scored = {span["message"] for span in row["spans"] if span["weight"] > 0}
        ended = {span["message"] for span in row["spans"] if span["weight"] > 0 and span["kind"] == TURN_END}
        if scored != ended:
            return f"the stop token of message {min(scored - ended)} is not trained"
    if row["n_tokens"] > config.max_tokens:
        return f"{row['n_tokens']} tokens, more than max_tokens = {config.max_tokens}"
    return None


@dataclass
class _Tally:
    """What the report counts, gathered while rows stream past."""

    n_branches: int = 0
    n_tokens: int = 0
    n_scored: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_split: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    def count(self, row: dict[str, Any]) -> None:
        self.n_branches += 1
        self.n_tokens += row["n_tokens"]
        self.n_scored += row["n_scored"]
        self.by_split[row["split"]] += 1
        for span in row["spans"]:
            self.by_kind[SPAN_KINDS[span["kind"]]] += span["end"] - span["start"]


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """min, p50, p90 and max; empty for no lengths."""
    if not lengths:
        return {}
    values = np.percentile(lengths, [0, 50, 90, 100], method="higher")
    return dict(zip(("min", "p50", "p90", "max"), map(int, values), strict=True))


def _rows(
    trajectories: Iterable[dict[str, Any]],
    renderer: Renderer,
    config: RenderConfig,
    split: SplitConfig,
    tally: _Tally,
    on_done: Callable[[int], None],
) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for n_done, values in enumerate(trajectories, 1):
        trajectory = Trajectory.model_validate(values)
        name = f"{trajectory.source_path} ({trajectory.trajectory_id})"
        try:
            if trajectory.trajectory_id in seen:
                raise RenderError("a run with this trajectory_id came before")
            seen.add(trajectory.trajectory_id)
            run = render_run(trajectory, renderer, config)
        except RenderError as error:
            tally.dropped.append(Dropped(what=name, reason=str(error)))
            on_done(n_done)
            continue
        for row in branch_rows(trajectory, run, config, split):
            tally.lengths.append(row["n_tokens"])
            if reason := refusal(row, config):
                tally.dropped.append(Dropped(what=f"{name} {row['branch_id']}", reason=reason))
            else:
                tally.count(row)
                yield row
        on_done(n_done)


def render(
    trajectories: Ref,
    model: Ref,
    config: RenderConfig,
    split: SplitConfig,
    store: Store,
    *,
    chat_template: str = "auto",
    progress: Progress | None = None,
) -> Rendered:
    """Renders a table of trajectories into a table of branches.

    Raises:
        UserError: the template cannot be trained with on this corpus, or no run is left.
    """
    renderer = make_renderer(model, chat_template)
    if "reasoning" in config.loss_on and not renderer.template.has_reasoning:
        raise UserError(
            "loss_on asks for reasoning, and the chat template prints none",
            where=renderer.template.name,
            fix="take reasoning out of render.loss_on",
        )
    table, tally = open_table(trajectories), _Tally()

    def on_done(n_done: int) -> None:
        if progress is not None:
            progress(n_done, table.num_rows)

    with store.staging() as staging:
        path = staging / "branches.arrow"
        n_rows = write_table(path, BRANCHES, _rows(iter_rows(table), renderer, config, split, tally, on_done))
        if not n_rows:
            reasons = Counter(dropped.reason for dropped in tally.dropped).most_common(3)
            raise UserError(
                f"none of {table.num_rows} runs can be trained on: "
                + "; ".join(f"{reason} ({count})" for reason, count in reasons),
                where="render",
            )
        branches = store.add(path, "branches", n_rows=n_rows, schema_version=BRANCH_SCHEMA_VERSION)
    return Rendered(
        branches=branches,
        report=RenderReport(
            n_branches=tally.n_branches,
            n_tokens=tally.n_tokens,
            n_scored=tally.n_scored,
            tokens_by_kind={kind: tally.by_kind[kind] for kind in SPAN_KINDS},
            by_split={name: tally.by_split[name] for name in ("train", "heldout")},
            length_tokens=quantiles(tally.lengths),
            kept_at_limit={
                name: sum(length <= limit for length in tally.lengths) for name, limit in LENGTH_LIMITS.items()
            },
            template=renderer.template.name,
            dropped=tuple(tally.dropped),
        ),
    )
