"""Log-probabilities of training branches under the policy of the moment: margins before and after, KL to the start.

Those before step 1 are kept in a file, so that a resumed run still knows the policy it started from.

Shapes: P scored positions of one branch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from artifacts.store import write_atomically
from engine.collectives import gather_objects
from engine.cost import CostModel
from engine.data import BranchTable, Pair, collate, length_bucketed, to_device
from engine.deal import lpt
from engine.group import Group
from engine.health import check_scores
from engine.scores import Scorer
from schemas.training import SimpoConfig

TOKENS_PER_BATCH = 8192
"""Padded tokens that are scored at once where branches are short; nothing is kept for a backward pass."""


def branch_names(pairs: Sequence[Pair]) -> list[str]:
    """The branches of these pairs, each once, in order of their names."""
    return sorted({name for pair in pairs for name in (pair.chosen, pair.rejected)})


def pairs_to_score(
    pairs: Sequence[Pair], windows: Sequence[Sequence[int]], config: SimpoConfig
) -> tuple[list[Pair], list[Pair]]:
    """Pairs whose margin is told before and after training, and pairs that are scored before step 1.

    The second hold the first. With `early_stop.max_kl` they hold one pair of every step too, its first, where the step
    has none yet: without a start score it would have no KL to compare with the limit.
    """
    compared = set(range(0, len(pairs), math.ceil(len(pairs) / config.margin_pairs)))
    scored = set(compared)
    if config.early_stop.max_kl is not None:
        for window in windows:
            if scored.isdisjoint(window):
                scored.add(window[0])
    return [pairs[index] for index in sorted(compared)], [pairs[index] for index in sorted(scored)]


@torch.no_grad()
def branch_logprobs(
    model: torch.nn.Module, branches: BranchTable, names: Sequence[str], group: Group, scorer: Scorer, cost: CostModel
) -> dict[str, np.ndarray]:
    """branch_id -> logp_P (nats, float64) without dropout, the branches dealt to the ranks by predicted cost.

    Raises:
        StageError: one is not finite; names the branch. On every rank.
        PeerLostError: another rank died.
    """
    model.eval()
    members = [branches[name] for name in names]
    ranks = lpt([cost.branch(m.n_tokens, len(m.positions_P)).forward for m in members], group.world_size)
    own = [member for member, rank in zip(members, ranks, strict=True) if rank == group.rank]
    found: dict[str, np.ndarray] = {}
    for rows in length_bucketed([member.n_tokens for member in own], TOKENS_PER_BATCH):
        batch = to_device(collate([own[row] for row in rows]), group.device)
        logp_P = scorer(model, *batch[:4]).double().cpu()
        rows_P = batch.rows_P.cpu()
        for place, row in enumerate(rows):
            found[own[row].branch_id] = logp_P[rows_P == place].numpy()
    logps = {name: logp_P for part in gather_objects(group, found) for name, logp_P in part.items()}
    check_scores({name: float(logp_P.sum()) for name, logp_P in logps.items()}, "the policy")
    return logps


def mean_margin(logps: Mapping[str, np.ndarray], branches: BranchTable, pairs: Sequence[Pair]) -> float:
    """Mean of ā_c - ā_r (nats per scored token) over the pairs."""
    means = {name: float(np.average(logp_P, weights=branches[name].weights_P)) for name, logp_P in logps.items()}
    return float(np.mean([means[pair.chosen] - means[pair.rejected] for pair in pairs]))


def save_logprobs(path: Path, logps: Mapping[str, np.ndarray]) -> None:
    """Beside their own digest, so that what is altered does not pass for what was measured."""
    scores = json.dumps({name: logp_P.tolist() for name, logp_P in logps.items()})
    write_atomically(path, f"{hashlib.sha256(scores.encode()).hexdigest()}\n{scores}")


def load_logprobs(path: Path, n_scored: Mapping[str, int]) -> dict[str, np.ndarray] | None:
    """What was kept there of these branches; None where that is nothing, damaged, or of others.

    Args:
        n_scored: branch_id -> scored positions.
    """
    try:
        digest, _, scores = path.read_text().partition("\n")
    except (OSError, ValueError):
        return None
    if digest != hashlib.sha256(scores.encode()).hexdigest():
        return None
    kept = {name: np.array(values, dtype=np.float64) for name, values in json.loads(scores).items()}
    return kept if {name: len(logp_P) for name, logp_P in kept.items()} == n_scored else None


def start_logprobs(
    path: Path,
    resumes: bool,
    pairs: Sequence[Pair],
    branches: BranchTable,
    group: Group,
    score: Callable[[Sequence[str]], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """branch_id -> logp_P of the pairs' branches before step 1: measured, or those in `path` for a run that resumes.

    All go by what rank 0 has read, as only it writes: nodes may have folders of their own.
    """
    names = branch_names(pairs)
    if resumes:
        n_scored = {name: len(branches[name].positions_P) for name in names}
        kept = gather_objects(group, load_logprobs(path, n_scored) if group.rank == 0 else None)[0]
        if kept is not None:
            return kept
    logps = score(names)  # of the adapter that training starts from: a checkpoint is loaded later
    if group.rank == 0:
        save_logprobs(path, logps)
    return logps
