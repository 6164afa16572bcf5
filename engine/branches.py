"""Branch plans: who computes which branch of a pair, and in which order. All give the same gradient.

By the chain rule dL/dθ = (dL/da_c)(da_c/dθ) + (dL/da_r)(da_r/dθ): once both scores are known, the two backward
passes have nothing more to do with each other.

parallel    one branch a rank. Each rank runs its forward, two scalars cross, each rank runs its backward.
            2R ranks are R replicas: ranks 2k and 2k+1 hold the chosen and the rejected branch of replica k's pair.
sequential  both branches on one rank: score both without a graph, then forward and backward one after the other,
            so memory holds one branch. R ranks are R replicas.

Shapes: R replicas; N pairs of one micro-batch, one per replica (fewer at the end of an epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.collectives import Group, gather
from engine.losses import PairLoss
from schemas.errors import StageError

Side = Literal["chosen", "rejected"]
Plan = Literal["parallel", "sequential"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")
Score = Callable[[int, Side], Tensor]
"""(pair index, side) -> scalar score with its graph; the same number whenever it is called within a step."""


class Outcome(NamedTuple):
    """Loss and scores of the N pairs of a micro-batch, the same on every rank; float64 on the CPU."""

    loss_N: Tensor
    chosen_N: Tensor
    rejected_N: Tensor


def n_replicas(plan: Plan, world_size: int) -> int:
    """How many pairs are worked on at once.

    Raises:
        StageError: the plan cannot use that many ranks.
    """
    if plan == "sequential":
        return world_size
    if world_size % 2:
        raise StageError(f"plan parallel needs an even number of ranks, got {world_size}")
    return world_size // 2


def _own_work(plan: Plan, group: Group, pairs: Sequence[int]) -> list[tuple[int, Side]]:
    """(place in the micro-batch, side) of each branch that this rank computes."""
    if plan == "sequential":
        return [(group.rank, side) for side in SIDES] if group.rank < len(pairs) else []
    place, side = divmod(group.rank, 2)
    return [(place, SIDES[side])] if place < len(pairs) else []


def step(
    plan: Plan,
    group: Group,
    pairs: Sequence[int],
    shares_N: Tensor,
    score: Score,
    loss: Callable[[Tensor, Tensor], PairLoss],
    name_of: Callable[[int], str],
) -> Outcome:
    """Forward and backward of one micro-batch; adds this rank's part of the gradient to the parameters' `.grad`.

    Args:
        pairs: indices of the N pairs, one per replica.
        shares_N: what each pair's loss is multiplied by (its weight over the pairs of the accumulation window).

    Raises:
        StageError: a score or a loss is not finite; names the pair. Nothing has been added to the gradient then.
        PeerLostError: another rank died.
    """
    work = _own_work(plan, group, pairs)
    with_graph = plan == "parallel"
    scores_2N = torch.zeros(2, len(pairs), dtype=torch.float64)
    held: list[Tensor] = []
    for place, side in work:
        with torch.set_grad_enabled(with_graph):
            own = score(pairs[place], side)
        held.append(own)
        scores_2N[SIDES.index(side), place] = own.detach().to("cpu", torch.float64)
    # every entry is one rank's, zero elsewhere: the sum over ranks is the table of all scores
    chosen_N, rejected_N = gather(group, scores_2N.flatten()).sum(0).view_as(scores_2N)
    result = loss(chosen_N, rejected_N)
    for place, index in enumerate(pairs):
        values = torch.stack([chosen_N[place], rejected_N[place], result.loss_N[place]])
        if not torch.isfinite(values).all():
            raise StageError(
                f"pair {name_of(index)} is not finite: chosen {values[0]:.6g}, rejected {values[1]:.6g}, "
                f"loss {values[2]:.6g}; training stopped before this step"
            )
    for (place, side), own in zip(work, held, strict=True):
        scored = own if with_graph else score(pairs[place], side)
        slopes_N = result.d_chosen_N if side == "chosen" else result.d_rejected_N
        scored.backward((slopes_N[place] * shares_N[place]).to(scored))
    return Outcome(result.loss_N, chosen_N, rejected_N)


@torch.no_grad()
def score_all(plan: Plan, group: Group, n_pairs: int, score: Score) -> tuple[Tensor, Tensor]:
    """Scores of all pairs without a graph, dealt to the ranks as in training: (chosen, rejected), each [n_pairs]."""
    scores_2N = torch.zeros(2, n_pairs, dtype=torch.float64)
    replicas = n_replicas(plan, group.world_size)
    for first in range(0, n_pairs, replicas):
        pairs = range(first, min(first + replicas, n_pairs))
        for place, side in _own_work(plan, group, pairs):
            scores_2N[SIDES.index(side), pairs[place]] = score(pairs[place], side).to("cpu", torch.float64)
    chosen_N, rejected_N = gather(group, scores_2N.flatten()).sum(0).view_as(scores_2N)
    return chosen_N, rejected_N
