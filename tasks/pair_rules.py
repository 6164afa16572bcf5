"""The rules that say which branch is better than which, one function a rule.

A rule looks at the branches of one task and proposes `(better, worse)`; what is wrong with a proposal is the guards'
business (`pairs.py`).
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from schemas.config import PairsConfig


class Branch(NamedTuple):
    """A row of `branches` without its tokens and spans, which are read by index when they are needed."""

    row: int  # in the table
    branch_id: str
    trajectory_id: str
    task_id: str
    split: str
    outcome: str
    score: float | None
    n_tokens: int
    n_scored: int
    has_reasoning: bool
    opening_sha256: str


class Candidate(NamedTuple):
    rule: str
    chosen: Branch
    rejected: Branch


def outcome(branches: Sequence[Branch], config: PairsConfig) -> Iterator[Candidate]:
    """Resolved over failed; with `rank_by = "score"`, the higher score over the lower by at least `min_score_gap`.

    A run whose outcome nobody knows is on no side.
    """
    for better, worse in permutations(branches, 2):
        if config.rank_by == "outcome":
            wins = better.outcome == "resolved" and worse.outcome == "failed"
        else:
            known = better.score is not None and worse.score is not None
            wins = known and (better.score or 0.0) - (worse.score or 0.0) >= config.min_score_gap
        if wins:
            yield Candidate("outcome", better, worse)


def efficiency(branches: Sequence[Branch], config: PairsConfig) -> Iterator[Candidate]:
    """Of two resolved runs the one that is shorter by at least `efficiency_margin` of the longer one's tokens."""
    resolved = [branch for branch in branches if branch.outcome == "resolved"]
    for better, worse in permutations(resolved, 2):
        if better.n_tokens <= (1 - config.efficiency_margin) * worse.n_tokens:
            yield Candidate("efficiency", better, worse)


def n_shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def in_order(
    candidates: Sequence[Candidate], config: PairsConfig, shared: Callable[[Candidate], int]
) -> Iterator[Candidate]:
    """The order in which a task's candidates are taken until the cap is reached; the same for the same seed.

    balanced: the candidate whose sides were used least so far comes next, so that no run is in every pair.
    hardest_first: the sides that share the longest history first, and of those the ones nearest in length.
    """

    def drawn(candidate: Candidate) -> bytes:
        key = f"{config.seed}\0{candidate.rule}\0{candidate.chosen.branch_id}\0{candidate.rejected.branch_id}"
        return hashlib.sha256(key.encode()).digest()

    if config.order == "hardest_first":
        yield from sorted(
            candidates,
            key=lambda pair: (-shared(pair), abs(pair.chosen.n_tokens - pair.rejected.n_tokens), drawn(pair)),
        )
    else:
        yield from _balanced(sorted(candidates, key=drawn))


def _balanced(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Least used first, and of those as they came.

    Uses only grow, so a candidate on the heap is never better than its entry says: one whose entry is out of date goes
    back with the uses of now. The first n of m candidates cost about m + n log m, all of them about m ** 1.5.
    """
    used: Counter[int] = Counter()
    heap = [(0, index) for index in range(len(candidates))]
    while heap:
        entry, index = heap[0]
        pair = candidates[index]
        uses = used[pair.chosen.row] + used[pair.rejected.row]
        if uses > entry:
            heapq.heapreplace(heap, (uses, index))
            continue
        heapq.heappop(heap)
        used.update((pair.chosen.row, pair.rejected.row))
        yield pair
