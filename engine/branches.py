"""Forward and backward of an accumulation window, as it was dealt. Every dealing gives the same gradient.

By the chain rule dL/dθ = (dL/da_c)(da_c/dθ) + (dL/da_r)(da_r/dθ): once both scores of a pair are known, the two
backward passes have nothing more to do with each other. So a branch can be anywhere, and only scores cross.
No rank ever holds the graph of more than one branch (or of one pair that shares its prefix).

Shapes: N pairs of one window; R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.collectives import gather, swap
from engine.deal import Deal, Placed
from engine.group import Group
from engine.losses import PairLoss
from schemas.errors import StageError

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")


class PairWork(Protocol):
    """What a window needs to know of its pairs, each named by its place in the window."""

    def score(self, place: int, side: Side, /) -> Tensor:
        """Mean log-probability of one branch, a scalar with its graph; the same number whenever it is called."""
        ...

    def score_shared(self, place: int, /) -> list[Tensor]:
        """Those of both branches, with one graph."""
        ...

    def loss(self, place: int, chosen_1: Tensor, rejected_1: Tensor, /) -> PairLoss:
        """Loss and slopes of one pair by its two scores."""
        ...

    def name(self, place: int, /) -> str: ...

    def share(self, place: int, /) -> float:
        """What the pair's loss is multiplied by: its weight over the pairs of the window."""
        ...

    def is_longer(self, place: int, side: Side, /) -> bool: ...


class Outcome(NamedTuple):
    """Scores and losses of the window's pairs, the same on every rank (float64, CPU), and how the time went."""

    loss_N: Tensor
    chosen_N: Tensor
    rejected_N: Tensor
    idle_share: float
    extras_K: Tensor
    """The numbers every rank gave along, summed over the ranks."""


class _Rank:
    """This rank's part of a window: what it scored, and how long it waited for others."""

    def __init__(self, group: Group, work: PairWork, n_pairs: int) -> None:
        self.group, self.work, self.waited_s = group, work, 0.0
        self.scores_2N = torch.zeros(2, n_pairs, dtype=torch.float64)
        self.losses_N = torch.zeros(n_pairs, dtype=torch.float64)

    def _loss(self, placed: Placed, chosen: float, rejected: float) -> dict[Side, float]:
        """The slope of each side's score, with the pair's share in it; checks all and records the loss."""
        scores = (torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected))
        result = self.work.loss(placed.place, *scores)
        loss = float(result.loss_N)
        slopes = float(result.d_chosen_N), float(result.d_rejected_N)
        if not torch.isfinite(torch.tensor([chosen, rejected, loss, *slopes])).all():
            raise StageError(
                f"pair {self.work.name(placed.place)} is not finite: chosen {chosen:.6g}, rejected {rejected:.6g}, "
                f"loss {loss:.6g}, slopes {slopes[0]:.6g} and {slopes[1]:.6g}; training stopped before this step"
            )
        if self.group.rank == placed.chosen_rank:
            self.losses_N[placed.place] = loss
        share = self.work.share(placed.place)
        return {"chosen": slopes[0] * share, "rejected": slopes[1] * share}

    def split(self, placed: Placed) -> None:
        own: Side = "chosen" if self.group.rank == placed.chosen_rank else "rejected"
        peer = placed.rejected_rank if own == "chosen" else placed.chosen_rank
        scored = self.work.score(placed.place, own)
        value = float(scored.detach())
        started = time.perf_counter()
        other = swap(self.group, peer, value)
        self.waited_s += time.perf_counter() - started
        slopes = self._loss(placed, *((value, other) if own == "chosen" else (other, value)))
        self.scores_2N[SIDES.index(own), placed.place] = value
        scored.backward(scored.new_tensor(slopes[own]))

    def whole(self, placed: Placed) -> None:
        longer: Side = "chosen" if self.work.is_longer(placed.place, "chosen") else "rejected"
        shorter: Side = "rejected" if longer == "chosen" else "chosen"
        with torch.no_grad():
            values = {shorter: float(self.work.score(placed.place, shorter))}
        scored = self.work.score(placed.place, longer)
        values[longer] = float(scored.detach())
        slopes = self._loss(placed, values["chosen"], values["rejected"])
        scored.backward(scored.new_tensor(slopes[longer]))
        del scored
        again = self.work.score(placed.place, shorter)
        again.backward(again.new_tensor(slopes[shorter]))
        for row, side in enumerate(SIDES):
            self.scores_2N[row, placed.place] = values[side]

    def shared(self, placed: Placed) -> None:
        scored = self.work.score_shared(placed.place)
        values = [float(score.detach()) for score in scored]
        slopes = self._loss(placed, *values)
        torch.autograd.backward(
            scored, [score.new_tensor(slopes[side]) for score, side in zip(scored, SIDES, strict=True)]
        )
        self.scores_2N[:, placed.place] = torch.tensor(values, dtype=torch.float64)


def run_window(group: Group, dealt: Deal, work: PairWork, extras: Callable[[], list[float]]) -> Outcome:
    """Adds this rank's part of the window's gradient to the parameters' `.grad`.

    Args:
        extras: called when this rank's part is done; its numbers are summed over the ranks.

    Raises:
        StageError: a score, a loss or a slope is not finite; names the pair.
        PeerLostError: another rank died.
    """
    n_pairs = len(dealt.placed)
    rank = _Rank(group, work, n_pairs)
    started = time.perf_counter()
    for placed in dealt.placed:
        if group.rank in (placed.chosen_rank, placed.rejected_rank):
            getattr(rank, placed.mode)(placed)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    elapsed_s = time.perf_counter() - started
    times = torch.tensor([elapsed_s - rank.waited_s, elapsed_s], dtype=torch.float64)
    own_K = torch.tensor(extras(), dtype=torch.float64)
    all_RK = gather(group, torch.cat([rank.scores_2N.flatten(), rank.losses_N, times, own_K]))
    # an entry of the scores and losses is one rank's, zero elsewhere: the sum over the ranks is the whole table
    scores_2N, losses_N = all_RK[:, : 2 * n_pairs].sum(0).view(2, n_pairs), all_RK[:, 2 * n_pairs : 3 * n_pairs].sum(0)
    busy_s, elapsed_s = all_RK[:, 3 * n_pairs].sum(), all_RK[:, 3 * n_pairs + 1].max()
    idle_share = float(1 - busy_s / (group.world_size * elapsed_s))
    return Outcome(losses_N, scores_2N[0], scores_2N[1], idle_share, all_RK[:, 3 * n_pairs + 2 :].sum(0))
