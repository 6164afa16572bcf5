"""Branches made for pairs. Two rules compare single turns: a history, then one turn, of which only that turn is scored.

step    two runs share a history to the token and then differ; the turn of the run that was resolved is better
repair  in one run an action failed and a later turn fixed it; the fix, put in the failed turn's place, is better

And the two runs of a fork: the history that they share was decided once, and only one of the two logs scores it.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from tasks.spans import OBSERVATION, PROMPT, REASONING, TURN_END

Row = dict[str, Any]
"""A row of `branches`; `token_ids` is an array [n_tokens] int32."""


def policy_spans(row: Row, message: int) -> list[dict[str, Any]]:
    """Spans of one policy turn: from its first own token to its stop token."""
    return [span for span in row["spans"] if span["message"] == message and span["kind"] not in (PROMPT, OBSERVATION)]


def _with_turn(row: Row, branch_id: str, before: int, turn: Row, message: int, weights: dict[int, float]) -> Row:
    """Tokens [0, before) of `row`, then the policy turn `message` of the row `turn`; only that turn is scored."""
    spans = policy_spans(turn, message)
    start, end = spans[0]["start"], spans[-1]["end"]
    history = [
        span | {"end": min(span["end"], before), "weight": 0.0} for span in row["spans"] if span["start"] < before
    ]
    own = [
        span
        | {
            "start": span["start"] - start + before,
            "end": span["end"] - start + before,
            "weight": weights.get(span["kind"], 0.0),
        }
        for span in spans
    ]
    return row | {
        "branch_id": branch_id,
        "token_ids": np.concatenate([row["token_ids"][:before], turn["token_ids"][start:end]]),
        "spans": history + own,
        "n_tokens": before + end - start,
        "n_scored": sum(span["end"] - span["start"] for span in own if span["weight"] > 0),
        "has_reasoning": any(span["kind"] == REASONING for span in own),
    }


def step(better: Row, worse: Row, n_shared: int, weights: dict[int, float], min_turns: int) -> tuple[Row, Row] | None:
    """Both runs up to the end of the turn in which they first differ.

    Args:
        n_shared: equal leading tokens.
        weights: of each span kind that is scored.
        min_turns: policy turns that the shared history must hold.

    Returns:
        None when they first differ outside a policy turn (another observation), or share too few turns.
    """
    turns = []
    for row in (better, worse):
        at = next((span for span in row["spans"] if span["start"] <= n_shared < span["end"]), None)
        if at is None or at["kind"] in (PROMPT, OBSERVATION):
            return None
        turns.append(at["message"])
    n_turns = [  # of a fork only one side calls them turns of its own
        sum(span["kind"] == TURN_END and span["end"] <= n_shared for span in row["spans"]) for row in (better, worse)
    ]
    if turns[0] != turns[1] or max(n_turns) < min_turns:
        return None
    sides = []
    for row in (better, worse):
        start = policy_spans(row, turns[0])[0]["start"]
        branch_id = f"{row['branch_id']}-step-m{turns[0]}"
        sides.append(_with_turn(row, branch_id, start, row, turns[0], weights))
    return sides[0], sides[1]


def repair(row: Row, failed: int, fix: int, weights: dict[int, float]) -> tuple[Row, Row] | None:
    """(fixed, failed): the history of the failed turn, with the fixing turn in its place, and as it was.

    Returns:
        None when the two turns do not begin alike (one with an empty reasoning block, the other without), so that the
        fix would have other tokens in its new place.
    """
    failed_spans, fix_spans = policy_spans(row, failed), policy_spans(row, fix)
    if not failed_spans or not fix_spans:
        return None
    start, fix_start, ids = failed_spans[0]["start"], fix_spans[0]["start"], row["token_ids"]
    if start == 0 or ids[start - 1] != ids[fix_start - 1]:
        return None
    name = f"{row['branch_id']}-repair-m{failed}"
    return (
        _with_turn(row, f"{name}-fix-m{fix}", start, row, fix, weights),
        _with_turn(row, name, start, row, failed, weights),
    )


def scored_alike(a: Row, b: Row, n_shared: int) -> tuple[Row, Row] | None:
    """Both rows with a shared history that is scored where both score it, and nowhere else.

    Scored on one side alone, turns that are the same on both would make the one side's average differ for no reason.

    Args:
        n_shared: equal leading tokens.

    Returns:
        None when they score the same already.
    """
    weights_a, weights_b = _token_weights(a)[:n_shared], _token_weights(b)[:n_shared]
    if np.array_equal(weights_a, weights_b):
        return None
    common = np.minimum(weights_a, weights_b)
    return _with_weights(a, common, f"beside-{b['branch_id']}"), _with_weights(b, common, f"beside-{a['branch_id']}")


def _token_weights(row: Row) -> np.ndarray:
    """[n_tokens] float32."""
    lengths = [span["end"] - span["start"] for span in row["spans"]]
    return np.repeat(np.array([span["weight"] for span in row["spans"]], np.float32), lengths)


def _with_weights(row: Row, weights: np.ndarray, name: str) -> Row:
    """The row with other weights on its first tokens; spans are cut where the weight changes."""
    new = np.concatenate([weights, _token_weights(row)[len(weights) :]])
    changes = np.flatnonzero(np.diff(new)) + 1
    spans = []
    for span in row["spans"]:
        inside = changes[(changes > span["start"]) & (changes < span["end"])].tolist()
        for start, end in pairwise([span["start"], *inside, span["end"]]):
            spans.append(span | {"start": start, "end": end, "weight": float(new[start])})
    return row | {
        "branch_id": f"{row['branch_id']}-{name}",
        "spans": spans,
        "n_scored": int((new > 0).sum()),
        "has_reasoning": any(span["kind"] == REASONING and span["end"] > len(weights) for span in spans),
    }
