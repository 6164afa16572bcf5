"""Made-up branches and pairs of given lengths, as the Arrow tables that the training stages read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.store import payload_digest
from artifacts.tables import write_table
from schemas.refs import Kind, Ref
from schemas.tables import BRANCHES, PAIRS, SPAN_KINDS

N_SPANS = 16
MOST_SCORED_TOKENS = 4096
SCORED_SHARE = 1 / 8
"""Of a branch's tokens, up to `MOST_SCORED_TOKENS`."""

Lengths = Sequence[tuple[int, int]]
"""Tokens of the chosen and of the rejected branch of each pair."""


def ref_of(path: Path, kind: Kind) -> Ref:
    sha256, n_bytes = payload_digest(path)
    return Ref(kind=kind, path=str(path), sha256=sha256, n_bytes=n_bytes)


def log_uniform(n_pairs: int, shortest: int, longest: int, seed: int = 0) -> Lengths:
    """Lengths drawn log-uniformly between the two, each branch on its own."""
    drawn = np.exp(np.random.default_rng(seed).uniform(np.log(shortest), np.log(longest), (n_pairs, 2)))
    return [(int(chosen), int(rejected)) for chosen, rejected in drawn]


def scored_spans(n_tokens: int, first: int = 1) -> list[tuple[int, int]]:
    """Spans [start, end) of equal length, spread from `first` to the branch's end; fewer where there is no room."""
    room = n_tokens - first
    n_spans = min(N_SPANS, room)
    length = max(1, min(int(min(MOST_SCORED_TOKENS, n_tokens * SCORED_SHARE)) // N_SPANS, room // n_spans))
    ends = [first + length + (room - length) * index // max(1, n_spans - 1) for index in range(n_spans)]
    return [(end - length, end) for end in ends]


def _branch(name: str, task: str, split: str, token_ids: np.ndarray, spans: list[tuple[int, int]]) -> dict[str, Any]:
    action = SPAN_KINDS.index("action")
    return {
        "branch_id": name,
        "trajectory_id": name,
        "task_id": task,
        "split": split,
        "outcome": "resolved",
        "score": 1.0,
        "token_ids": token_ids.tolist(),
        "spans": [
            {"start": start, "end": end, "kind": action, "message": index, "weight": 1.0}
            for index, (start, end) in enumerate(spans)
        ],
        "n_tokens": len(token_ids),
        "n_scored": len({position for start, end in spans for position in range(start, end)}),
        "has_reasoning": False,
        "opening_sha256": "0" * 64,
    }


def _pair(index: int, split: str, sides: Iterable[dict[str, Any]], n_shared: int) -> dict[str, Any]:
    counts = {
        f"{side}_{name}": row[name]
        for side, row in zip(("chosen", "rejected"), sides, strict=True)
        for name in ("branch_id", "n_tokens", "n_scored")
    }
    names = {"pair_id": f"pair-{index}", "rule": "outcome", "task_id": f"task-{index}", "split": split}
    return names | counts | {"n_shared_prefix": n_shared, "weight": 1.0}


def write_pairs(
    folder: Path, lengths: Lengths, vocab_size: int, *, split: str = "train", n_shared: int = 0, seed: int = 0
) -> tuple[Ref, Ref]:
    """The branch table and the pair table: random tokens, other ones in every branch.

    Args:
        n_shared: tokens of the prefix that both branches of a pair have in common; only what follows is scored then.
    """
    draw, branches, pairs = np.random.default_rng(seed), list[dict[str, Any]](), list[dict[str, Any]]()
    for index, of_sides in enumerate(lengths):
        prefix = draw.integers(0, vocab_size, n_shared)
        sides = [
            _branch(
                f"{side}-{index}",
                f"task-{index}",
                split,
                np.concatenate([prefix, draw.integers(0, vocab_size, n_tokens - n_shared)]),
                scored_spans(n_tokens, max(1, n_shared)),
            )
            for side, n_tokens in zip(("chosen", "rejected"), of_sides, strict=True)
        ]
        branches += sides
        pairs.append(_pair(index, split, sides, n_shared))
    write_table(folder / "branches.arrow", BRANCHES, branches)
    write_table(folder / "pairs.arrow", PAIRS, pairs)
    return ref_of(folder / "branches.arrow", "branches"), ref_of(folder / "pairs.arrow", "pairs")
