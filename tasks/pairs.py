"""Stage `pairs`: which branch is better than which, `pairs.arrow`.

Rules propose, guards refuse, caps choose. Every refusal is counted by its reason.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from artifacts.store import Store
from artifacts.tables import open_table, write_table
from schemas.config import PairsConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Paired, PairReport
from schemas.tables import BRANCH_SCHEMA_VERSION, BRANCHES, PAIR_SCHEMA_VERSION, PAIRS
from tasks.branch_table import BranchTable, Runs
from tasks.derived import repair, scored_alike, step
from tasks.pair_rules import Branch, Candidate, efficiency, in_order, n_shared_prefix, outcome
from tasks.render import quantiles
from tasks.repairs import find_repairs

STAGE_VERSION: Final = 3

Progress = Callable[[int, int], None]
"""Called with tasks done and tasks in all."""

NEAR_DUPLICATE: Final = 0.9
"""Two pairs of a task are near duplicates when on both sides this share of the scored 8-grams is common."""

_NGRAM: Final = 8
PREFIX_EDGES: Final = (256, 1024, 4096, 16_384, 65_536)


@dataclass
class _Tally:
    refused: Counter[str] = field(default_factory=Counter)
    pairs: list[dict[str, Any]] = field(default_factory=list)


def build_pairs(
    branches: Ref, trajectories: Ref, config: PairsConfig, store: Store, *, progress: Progress | None = None
) -> Paired:
    """Pairs within each task, by every rule of the config.

    Raises:
        UserError: the branches are not whole runs, or no pair is found for training; with counts by reason.
    """
    table = BranchTable(open_table(branches))
    if len({branch.trajectory_id for branch in table.branches}) < len(table.branches):
        raise UserError(
            "pairs are made of whole runs, and these branches are single turns",
            where="render.mode",
            fix='set render.mode = "trajectory"',
        )
    by_task: dict[str, list[Branch]] = defaultdict(list)
    for branch in sorted(table.branches, key=lambda branch: branch.branch_id):
        by_task[branch.task_id].append(branch)
    runs, tally = Runs(open_table(trajectories)), _Tally()

    def derived_rows() -> Iterator[dict[str, Any]]:
        weights = table.kind_weights()
        for n_done, task_id in enumerate(sorted(by_task), 1):
            for rule in config.rules:
                kept = _kept(
                    list(_proposed(rule, by_task[task_id], table, runs, weights, config)), table, config, tally
                )
                used = {side.row for pair in kept for side in (pair.chosen, pair.rejected)}
                yield from (row for index, row in table.added.items() if index in used)
                table.forget()
            if progress is not None:
                progress(n_done, len(by_task))

    with store.staging() as staging:
        derived_path, path = staging / "derived_branches.arrow", staging / "pairs.arrow"
        n_derived = write_table(derived_path, BRANCHES, derived_rows())
        if not any(pair["split"] == "train" for pair in tally.pairs):
            raise _no_pair(by_task, tally, config)
        derived = None
        if n_derived:
            derived = store.add(derived_path, "branches", n_rows=n_derived, schema_version=BRANCH_SCHEMA_VERSION)
        write_table(path, PAIRS, tally.pairs)
        ref = store.add(path, "pairs", n_rows=len(tally.pairs), schema_version=PAIR_SCHEMA_VERSION)
    return Paired(pairs=ref, derived_branches=derived, report=_report(tally))


def _proposed(
    rule: str,
    branches: Sequence[Branch],
    table: BranchTable,
    runs: Runs,
    weights: dict[int, float],
    config: PairsConfig,
) -> Iterator[Candidate]:
    """What a rule says of one task's branches, before any guard."""
    match rule:
        case "outcome":
            yield from (_scored_alike(pair, table) for pair in outcome(branches, config))
        case "efficiency":
            yield from (_scored_alike(pair, table) for pair in efficiency(branches, config))
        case "step":
            for _, better, worse in outcome(branches, config):
                shared = n_shared_prefix(table.token_ids(better), table.token_ids(worse))
                sides = step(table.whole(better), table.whole(worse), shared, weights, config.step_min_shared_turns)
                if sides is not None:
                    yield Candidate("step", *map(table.add, sides))
        case "repair":
            for branch in branches:
                for failed, fix in find_repairs(runs.messages(branch.trajectory_id)):
                    sides = repair(table.whole(branch), failed, fix, weights)
                    if sides is not None:
                        yield Candidate("repair", *map(table.add, sides))


def _scored_alike(pair: Candidate, table: BranchTable) -> Candidate:
    """The pair itself or, where one side scores a history that is only copied on the other, derived branches."""
    shared = n_shared_prefix(table.token_ids(pair.chosen), table.token_ids(pair.rejected))
    sides = scored_alike(table.whole(pair.chosen), table.whole(pair.rejected), shared)
    return pair if sides is None else Candidate(pair.rule, *map(table.add, sides))


def _kept(proposed: Sequence[Candidate], table: BranchTable, config: PairsConfig, tally: _Tally) -> list[Candidate]:
    """The pairs of one task and rule that pass the guards and fit under the cap; they are counted and written down."""
    shared: dict[Candidate, int] = {}
    for candidate in proposed:
        if reason := _refusal(candidate, table, config):
            tally.refused[reason] += 1
        else:
            shared[candidate] = n_shared_prefix(table.token_ids(candidate.chosen), table.token_ids(candidate.rejected))
    kept: list[Candidate] = []
    for number, candidate in enumerate(in_order(list(shared), config, shared.__getitem__)):
        if len(kept) == config.max_pairs_per_task:
            tally.refused["over_cap"] += len(shared) - number
            break
        if any(_near(candidate, other, table) for other in kept):
            tally.refused["near_duplicate"] += 1
        else:
            kept.append(candidate)
            tally.pairs.append(pair_row(candidate, shared[candidate]))
    return kept


def _refusal(pair: Candidate, table: BranchTable, config: PairsConfig) -> str | None:
    """The guard that a proposed pair does not pass."""
    chosen, rejected = pair.chosen, pair.rejected
    if chosen.opening_sha256 != rejected.opening_sha256:
        return "different_opening"
    if chosen.split != rejected.split:
        return "different_split"
    if chosen.has_reasoning != rejected.has_reasoning:
        return "reasoning_on_one_side"
    if chosen.n_scored == 0 or rejected.n_scored == 0:
        return "no_scored_token"
    if np.array_equal(table.scored_ids(chosen), table.scored_ids(rejected)):
        return "equal_sides"
    lengths = sorted((chosen.n_tokens, rejected.n_tokens))
    if config.max_length_ratio is not None and lengths[1] > config.max_length_ratio * lengths[0]:
        return "length_ratio"
    return None


def _near(a: Candidate, b: Candidate, table: BranchTable) -> bool:
    return all(
        x.row == y.row or _common_share(table.scored_ids(x), table.scored_ids(y)) >= NEAR_DUPLICATE
        for x, y in ((a.chosen, b.chosen), (a.rejected, b.rejected))
    )


def _common_share(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard index of the token 8-grams; of the whole sequences when one is shorter than that."""
    if min(len(a), len(b)) < _NGRAM:
        return float(np.array_equal(a, b))
    grams_a, grams_b = (
        {window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(ids, _NGRAM)} for ids in (a, b)
    )
    return len(grams_a & grams_b) / len(grams_a | grams_b)


def pair_row(pair: Candidate, shared: int) -> dict[str, Any]:
    """A row of `pairs`."""
    chosen, rejected = pair.chosen, pair.rejected
    key = f"{pair.rule}\0{chosen.branch_id}\0{rejected.branch_id}"
    return {
        "pair_id": hashlib.sha256(key.encode()).hexdigest()[:32],
        "rule": pair.rule,
        "task_id": chosen.task_id,
        "split": chosen.split,
        "chosen_branch_id": chosen.branch_id,
        "rejected_branch_id": rejected.branch_id,
        "n_shared_prefix": shared,
        "chosen_n_tokens": chosen.n_tokens,
        "rejected_n_tokens": rejected.n_tokens,
        "chosen_n_scored": chosen.n_scored,
        "rejected_n_scored": rejected.n_scored,
        "weight": 1.0,
    }


def _no_pair(by_task: dict[str, list[Branch]], tally: _Tally, config: PairsConfig) -> UserError:
    outcomes = [{branch.outcome for branch in branches} for branches in by_task.values()]
    counts = {
        "tasks": len(by_task),
        "tasks with a single run": sum(len(branches) == 1 for branches in by_task.values()),
        "tasks with both outcomes": sum({"resolved", "failed"} <= found for found in outcomes),
        "runs of unknown outcome": sum(b.outcome == "unknown" for branches in by_task.values() for b in branches),
        "pairs in heldout": len(tally.pairs),
        **dict(tally.refused),
    }
    return UserError(
        "no pair found to train on: " + ", ".join(f"{name} {count}" for name, count in counts.items()),
        where=f"pairs.rules = {', '.join(config.rules)}",
        fix="more runs per task with both outcomes, or another split.salt when all pairs are held out",
    )


def _histogram(lengths: Sequence[int]) -> dict[str, int]:
    edges = [0, *PREFIX_EDGES]
    names = [f"{a}-{b - 1}" for a, b in pairwise(edges)] + [f"{edges[-1]}+"]
    counts, _ = np.histogram(lengths, [*edges, np.inf])
    return dict(zip(names, map(int, counts), strict=True))


def _report(tally: _Tally) -> PairReport:
    pairs = tally.pairs
    gaps = [pair["chosen_n_tokens"] - pair["rejected_n_tokens"] for pair in pairs]
    shared = [pair["n_shared_prefix"] for pair in pairs]
    return PairReport(
        n_pairs=len(pairs),
        by_rule=dict(Counter(pair["rule"] for pair in pairs)),
        by_split={"train": 0, "heldout": 0} | dict(Counter(pair["split"] for pair in pairs)),
        n_tasks_with_pairs=len({pair["task_id"] for pair in pairs}),
        rejected_by_reason=dict(tally.refused),
        shared_prefix_tokens=quantiles(shared),
        shared_prefix_histogram=_histogram(shared),
        length_gap_tokens={"mean": float(np.mean(gaps)), "mean_absolute": float(np.mean(np.abs(gaps)))},
    )
