"""Who computes which branch of an accumulation window, decided from predicted costs before the window starts.

A pair is worked on in one of three ways, all with the same gradient (`engine.branches` runs them):

split   its branches on two ranks: each runs its forward, two scores cross, each runs its backward. No work is done
        twice, but the rank with the shorter branch waits for the other's score.
whole   both branches on one rank: the shorter is scored without a graph, then the longer forward and backward, then
        the shorter forward and backward. Nobody waits; the shorter branch's forward is run twice.
shared  both tails behind their common prefix in one pass on one rank: the prefix is computed once.

Every split comes first, in one order that all its ranks follow, so an exchange never waits for a rank that waits for
another; then the rest, longest first to the rank that is free first (Graham's LPT rule).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.cost import BranchCost

Mode = Literal["split", "whole", "shared"]
Plan = Literal["auto", "parallel", "sequential", "shared_prefix"]


class PairCost(NamedTuple):
    """Predicted operations of a pair; `shared` is None where one pass over both tails is not possible."""

    chosen: BranchCost
    rejected: BranchCost
    shared: BranchCost | None = None

    @property
    def whole(self) -> float:
        return self.chosen.total + self.rejected.total + min(self.chosen.forward, self.rejected.forward)

    @property
    def alone(self) -> tuple[float, Mode]:
        """The cheaper way on one rank."""
        if self.shared is not None and self.shared.total < self.whole:
            return self.shared.total, "shared"
        return self.whole, "whole"

    def useful(self, mode: Mode) -> float:
        """What has to be computed once for the gradient, worked on in this way."""
        if mode == "shared" and self.shared is not None:
            return self.shared.useful
        return self.chosen.useful + self.rejected.useful

    @property
    def unevenness(self) -> float:
        low, high = sorted((self.chosen.total, self.rejected.total))
        return high / low


class Placed(NamedTuple):
    """One pair of the window (by its place there), how it is worked on, and the ranks that do so."""

    place: int
    mode: Mode
    chosen_rank: int
    rejected_rank: int


class Deal(NamedTuple):
    """The work of a window in the order in which each rank does its part, and the time it is predicted to take."""

    placed: tuple[Placed, ...]
    busy_R: tuple[float, ...]
    end: float

    @property
    def idle_share(self) -> float:
        """Predicted share of the ranks' time that is spent waiting, in [0, 1)."""
        return 1 - sum(self.busy_R) / (len(self.busy_R) * self.end) if self.end else 0.0

    @property
    def modes(self) -> Counter[Mode]:
        return Counter(placed.mode for placed in self.placed)


class _Schedule:
    """Pairs placed so far, and when each rank is free."""

    def __init__(self, n_ranks: int) -> None:
        self.free, self.busy = [0.0] * n_ranks, [0.0] * n_ranks
        self.placed: list[Placed] = []

    def by_load(self) -> list[int]:
        return sorted(range(len(self.free)), key=lambda rank: (self.free[rank], rank))

    def split(self, place: int, cost: PairCost, chosen_rank: int, rejected_rank: int) -> None:
        sides = ((chosen_rank, cost.chosen), (rejected_rank, cost.rejected))
        crossing = max(self.free[rank] + side.forward for rank, side in sides)
        for rank, side in sides:
            self.free[rank] = crossing + side.backward
            self.busy[rank] += side.total
        self.placed.append(Placed(place, "split", chosen_rank, rejected_rank))

    def alone(self, place: int, work: float, mode: Mode, rank: int) -> None:
        self.free[rank] += work
        self.busy[rank] += work
        self.placed.append(Placed(place, mode, rank, rank))

    def deal(self) -> Deal:
        return Deal(tuple(self.placed), tuple(self.busy), max(self.free))


def _balanced(costs: Sequence[PairCost], split: Sequence[int], plan: Plan, n_ranks: int) -> Deal:
    """The pairs at the places `split` over two ranks each, the others on one, every one where it ends first."""
    schedule, on_two = _Schedule(n_ranks), set(split)
    for place in sorted(split, key=lambda p: (-costs[p].chosen.total - costs[p].rejected.total, p)):
        first, second = schedule.by_load()[:2]
        chosen_is_longer = costs[place].chosen.total >= costs[place].rejected.total
        schedule.split(place, costs[place], *((first, second) if chosen_is_longer else (second, first)))
    alone = [(place, *_alone(cost, plan)) for place, cost in enumerate(costs) if place not in on_two]
    for place, work, mode in sorted(alone, key=lambda entry: (-entry[1], entry[0])):
        schedule.alone(place, work, mode, schedule.by_load()[0])
    return schedule.deal()


def _alone(cost: PairCost, plan: Plan) -> tuple[float, Mode]:
    if plan == "auto":
        return cost.alone
    if plan == "shared_prefix" and cost.shared is not None:
        return cost.shared.total, "shared"
    return cost.whole, "whole"


def deal_naively(costs: Sequence[PairCost], plan: Plan, n_ranks: int) -> Deal:
    """In the window's order, whatever the lengths: pair i to replica i, chosen on its even rank."""
    schedule = _Schedule(n_ranks)
    for place, cost in enumerate(costs):
        if plan == "parallel":
            chosen_rank = 2 * (place % (n_ranks // 2))
            schedule.split(place, cost, chosen_rank, chosen_rank + 1)
        else:
            schedule.alone(place, *_alone(cost, plan), place % n_ranks)
    return schedule.deal()


def deal(costs: Sequence[PairCost], plan: Plan, n_ranks: int, *, balanced: bool = True) -> Deal:
    """The dealing of a window of pairs: the same on every rank, as it depends on its arguments only.

    `auto` tries every number of split pairs, the evenest first, and takes the dealing that is predicted to end first
    (of equals the one with less work). The other plans work on every pair in one way.

    Raises:
        ValueError: plan `parallel` on fewer than two ranks, or unbalanced on an odd number.
    """
    if plan == "parallel" and (n_ranks < 2 or (n_ranks % 2 and not balanced)):
        raise ValueError(f"plan parallel needs two ranks a pair, got {n_ranks}")
    if not balanced:
        return deal_naively(costs, plan, n_ranks)
    if plan == "parallel":
        return _balanced(costs, range(len(costs)), plan, n_ranks)
    if plan != "auto" or n_ranks == 1:
        return _balanced(costs, (), plan, n_ranks)
    evenest = sorted(range(len(costs)), key=lambda place: (costs[place].unevenness, place))
    tried = [_balanced(costs, evenest[:count], plan, n_ranks) for count in range(len(costs) + 1)]
    return min(tried, key=lambda found: (found.end, sum(found.busy_R)))


def lpt(work_N: Sequence[float], n_ranks: int) -> list[int]:
    """rank_N of independent pieces of work: longest first, each to the rank that has least."""
    load = [0.0] * n_ranks
    rank_N = [0] * len(work_N)
    for index in sorted(range(len(work_N)), key=lambda i: (-work_N[i], i)):
        rank = min(range(n_ranks), key=lambda r: (load[r], r))
        rank_N[index] = rank
        load[rank] += work_N[index]
    return rank_N


def idle_share(deals: Sequence[Deal]) -> float:
    """Predicted share of the ranks' time spent waiting over several windows."""
    available = sum(len(dealt.busy_R) * dealt.end for dealt in deals)
    return 1 - sum(sum(dealt.busy_R) for dealt in deals) / available if available else 0.0


def describe(deals: Sequence[Deal]) -> str:
    """How many pairs are worked on in which way, over all steps, and the predicted idle share."""
    words: dict[Mode, str] = {
        "split": "split over two ranks",
        "whole": "whole on one rank",
        "shared": "behind their shared prefix",
    }
    counts = [(sum(dealt.modes[mode] for dealt in deals), word) for mode, word in words.items()]
    parts = [f"{count} {word}" for count, word in counts if count]
    return f"{', '.join(parts)}; predicted idle share {idle_share(deals):.1%}"
