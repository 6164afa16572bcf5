"""Stage `render`: conversations -> token ids with labelled, weighted spans, `branches.arrow`.

A conversation is rendered once and tokenised once. Nothing is cut: what is too long is dropped and listed.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from artifacts.store import Store
from artifacts.tables import write_tables
from schemas.config import RenderConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Dropped, Leak, Rendered, RenderReport
from schemas.tables import BRANCH_SCHEMA_VERSION, BRANCHES, SPAN_KINDS
from tasks.leaks import COLUMNS, HeldOut
from tasks.model import load_tokenizer
from tasks.positions import folder_positions
from tasks.render_engines import render_all
from tasks.render_rows import RenderJob
from tasks.templates import choose_source

STAGE_VERSION: Final = 2

Progress = Callable[[int, int], None]
"""Called with runs done and runs in all."""

LENGTH_LIMITS: Final = {f"{k}K": k * 1024 for k in (16, 32, 48, 64, 80, 128, 256)}

LISTED_LEAKS: Final = 100


@dataclass
class _Tally:
    """What the report counts, gathered while rows stream past."""

    n_branches: int = 0
    n_tokens: int = 0
    n_scored: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_split: Counter[str] = field(default_factory=Counter)
    positions: int | None = None
    """That the model was trained on."""
    n_beyond: int = 0
    lengths: "array[int]" = field(default_factory=lambda: array("q"))
    dropped: list[Dropped] = field(default_factory=list)
    n_leaks: Counter[str] = field(default_factory=Counter)
    leaks: list[Leak] = field(default_factory=list)

    def count(self, rows: pa.RecordBatch) -> None:
        """Takes in rows that are kept."""
        self.n_branches += rows.num_rows
        lengths = rows["n_tokens"].to_numpy()
        self.n_tokens += int(lengths.sum())
        self.n_beyond += 0 if self.positions is None else int((lengths > self.positions).sum())
        self.n_scored += int(rows["n_scored"].to_numpy().sum())
        self.by_split.update(rows["split"].to_pylist())
        spans = rows["spans"].flatten()
        starts, ends, kinds = (spans.field(name).to_numpy() for name in ("start", "end", "kind"))
        counts = np.bincount(kinds, weights=ends - starts, minlength=len(SPAN_KINDS))
        self.by_kind.update({kind: int(count) for kind, count in zip(SPAN_KINDS, counts, strict=True)})

    def found(self, leak: Leak) -> None:
        self.n_leaks[f"{leak.kind} {leak.text} text"] += 1
        if len(self.leaks) < LISTED_LEAKS:
            self.leaks.append(leak)


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """min, p50, p90 and max; empty for no lengths."""
    if not len(lengths):
        return {}
    values = np.percentile(lengths, [0, 50, 90, 100], method="higher")
    return dict(zip(("min", "p50", "p90", "max"), map(int, values), strict=True))


def _heldout(batches: Iterable[pa.RecordBatch]) -> HeldOut:
    rows = (row for batch in batches for row in batch.select(["name", "reason", "split", *COLUMNS]).to_pylist())
    return HeldOut(row for row in rows if row["reason"] is None and row["split"] == "heldout")


def _kept(batches: Iterable[pa.RecordBatch], heldout: HeldOut, split: SplitConfig, tally: _Tally) -> Iterator[pa.Table]:
    """The rows that stay, counted; the others are listed."""
    run_of_id: dict[str, int] = {}
    leak_of_run: tuple[int, Leak | None] = (-1, None)
    for batch in batches:
        facts = batch.select(["run", "name", "reason", "trajectory_id", "split", "n_tokens", *COLUMNS]).to_pylist()
        stays = []
        for row in facts:
            reason = row["reason"]
            if run_of_id.setdefault(row["trajectory_id"], row["run"]) != row["run"]:
                reason = "a run with this trajectory_id came before"
            elif row["n_tokens"] is not None:
                tally.lengths.append(row["n_tokens"])
            if reason is None and row["split"] == "train":
                if leak_of_run[0] != row["run"]:  # once a run, however many rows it has
                    leak_of_run = row["run"], heldout.leak(row)
                    if leak_of_run[1] is not None:
                        tally.found(leak_of_run[1])
                if leak_of_run[1] is not None and split.on_leak == "drop":
                    leak = leak_of_run[1]
                    like = "the same" if leak.kind == "equal" else f"nearly the same ({leak.similarity:.2f})"
                    reason = f"leak: {like} {leak.text} text as held-out {leak.heldout}"
            if reason is not None:
                tally.dropped.append(Dropped(what=row["name"], reason=reason))
            stays.append(reason is None)
        rows = batch.filter(pa.array(stays, pa.bool_()))
        if rows.num_rows:
            tally.count(rows)
            yield pa.Table.from_batches([rows.select(BRANCHES.names)])


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
    """Renders a table of trajectories into a table of branches, on all cores when it is large.

    Raises:
        UserError: the template cannot be trained with on this corpus, or no run is left.
    """
    job = RenderJob(model, *choose_source(load_tokenizer(model), chat_template), config, split)
    template = job.renderer().template
    if "reasoning" in config.loss_on and not template.has_reasoning:
        raise UserError(
            "loss_on asks for reasoning, and the chat template prints none",
            where=template.name,
            fix="take reasoning out of render.loss_on",
        )
    n_runs, tally = trajectories.n_rows or 0, _Tally(positions=folder_positions(Path(model.path)))
    on_done = None if progress is None else lambda n_done: progress(n_done, n_runs)
    with store.staging() as staging:
        waiting, path = staging / "rendered", staging / "branches.arrow"
        waiting.mkdir()
        rendered = render_all(trajectories, job, waiting, on_done)
        n_rows = write_tables(path, BRANCHES, _kept(rendered(), _heldout(rendered()), split, tally))
        if not n_rows:
            raise _nothing_left(n_runs, tally)
        branches = store.add(path, "branches", n_rows=n_rows, schema_version=BRANCH_SCHEMA_VERSION)
    return Rendered(branches=branches, report=_report(tally, template.name))


def _nothing_left(n_runs: int, tally: _Tally) -> UserError:
    reasons = Counter(dropped.reason for dropped in tally.dropped).most_common(3)
    return UserError(
        f"none of {n_runs} runs can be trained on: " + "; ".join(f"{reason} ({count})" for reason, count in reasons),
        where="render",
    )


def _report(tally: _Tally, template: str) -> RenderReport:
    return RenderReport(
        n_branches=tally.n_branches,
        n_tokens=tally.n_tokens,
        n_scored=tally.n_scored,
        tokens_by_kind={kind: tally.by_kind[kind] for kind in SPAN_KINDS},
        by_split={name: tally.by_split[name] for name in ("train", "heldout")},
        length_tokens=quantiles(tally.lengths),
        kept_at_limit={name: sum(length <= limit for length in tally.lengths) for name, limit in LENGTH_LIMITS.items()},
        template=template,
        trained_positions=tally.positions,
        n_beyond_positions=tally.n_beyond,
        dropped=tuple(tally.dropped),
        n_leaks=dict(tally.n_leaks),
        leaks=tuple(tally.leaks),
    )
