"""Rows of the branches table: one for a run, or one for each scored turn; and the gates that a row must pass."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from schemas.config import RenderConfig, SplitConfig
from schemas.trajectory import Message, Outcome, Trajectory
from tasks.renderer import LabelledRun
from tasks.spans import ACTION, REASONING, THOUGHT, TURN_END, Span
from tasks.splits import side


def task_message(messages: Sequence[Message]) -> Message | None:
    """The first user message, unless a simulated user wrote it."""
    task = next((message for message in messages if message.role == "user"), None)
    return None if task is None or task.author == "simulated_user" else task


def opening_sha256(trajectory: Trajectory) -> str:
    """Of the system message and the task message; of all that stands before the first turn of its own where the run
    goes on from a condensed history: the summary is part of what was asked.
    """
    messages = trajectory.messages
    task = task_message(messages)
    opening = [*messages[: messages[:1] != () and messages[0].role == "system"], *([task] if task else [])]
    if trajectory.parent_link == "continuation":
        first = next((index for index, message in enumerate(messages) if message.trainable), len(messages))
        opening = list(messages[:first])
    return hashlib.sha256(json.dumps([[message.role, message.content] for message in opening]).encode()).hexdigest()


def branch_rows(
    trajectory: Trajectory, run: LabelledRun, config: RenderConfig, split: SplitConfig
) -> Iterator[dict[str, Any]]:
    """Rows of `branches`: one for the run, or in turn mode one for every scored turn with its history.

    Over all rows of a run, turn mode scores the same tokens once that trajectory mode scores.
    """
    policy_kinds = {REASONING, THOUGHT, ACTION, TURN_END}
    claimed = trajectory.outcome.source == "agent" and not config.trust_agent_claims
    outcome = Outcome() if claimed else trajectory.outcome
    common = {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "split": side(trajectory.task_id, trajectory.repo, split),
        "outcome": outcome.status,
        "score": outcome.score,
        "has_reasoning": any(span.kind == REASONING for span in run.spans),
        "opening_sha256": opening_sha256(trajectory),
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
