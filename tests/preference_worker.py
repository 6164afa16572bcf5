"""One rank of a preference run, forked by preference_runs.py.

Leaves the summed gradient of one window, and the parameters after training, as this rank holds them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from training_inputs import float64_norm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine import checkpoints, preference
from engine.branches import SIDES, Side, run_window
from engine.collectives import sum_gradients
from engine.cost import cost_model
from engine.data import Branch, BranchTable, collate, read_pairs
from engine.deal import deal
from engine.group import Group, group_of, join, leave, take_launch
from engine.loading import load_adapter, load_base, trainable_parameters
from engine.losses import LOSSES
from engine.preference_trainer import Pairs
from engine.scores import branch_scores, token_logprobs
from engine.session import Stop
from engine.shared_prefix import shared_prefix_logprobs
from schemas.spec import TrainSpec


class Work:
    """The first four training pairs as one window."""

    def __init__(self, spec: TrainSpec) -> None:
        assert spec.simpo is not None
        assert spec.pairs is not None
        branches = BranchTable(spec.branches)
        rows = read_pairs(spec.pairs, "train", branches)[:4]
        self.pairs = Pairs(rows, branches, preference.loss_of(spec.simpo), LOSSES["simpo"], {})
        base = load_base(spec.model, spec.base, torch.device("cpu"), 4096)
        self.costs = [
            self.pairs.cost(place, cost_model(base.config.to_dict(), recomputes=False), 4096) for place in range(4)
        ]
        self.model = load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
        self.loss, self.name = self.pairs.loss, self.pairs.name

    def _mean(self, branch: Branch, logp_P: torch.Tensor) -> torch.Tensor:
        return branch_scores(logp_P, torch.from_numpy(branch.weights_P))[1]

    def score(self, place: int, side: Side) -> torch.Tensor:
        branch = self.pairs.branch(place, side)
        return self._mean(branch, token_logprobs(self.model, *collate([branch])[:4]))

    def score_shared(self, place: int) -> list[torch.Tensor]:
        chosen, rejected = (self.pairs.branch(place, side) for side in SIDES)
        logps = shared_prefix_logprobs(self.model, chosen, rejected, torch.device("cpu"))
        return [self._mean(branch, logp_P) for branch, logp_P in zip((chosen, rejected), logps, strict=True)]

    def share(self, place: int) -> float:
        return self.pairs.pairs[place].weight / 4

    def is_longer(self, place: int, side: Side) -> bool:
        return side == "chosen"


def window_gradient(spec: TrainSpec, group: Group) -> dict[str, torch.Tensor]:
    """Gradient of the mean loss of the first four training pairs, summed over the ranks."""
    assert spec.simpo is not None
    work = Work(spec)
    dealt = deal(work.costs, spec.simpo.plan, group.world_size, balanced=spec.simpo.balanced)
    run_window(group, dealt, work, list)
    parameters = trainable_parameters(work.model)
    sum_gradients(group, list(parameters.values()))
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


class Odd(NamedTuple):
    """What is not as it should be."""

    disturbed: str = ""
    """Name of a parameter that rank 1 changes a little at every score."""
    narrow_tokens: int = 0
    """Most tokens of a pair that rank 1 could walk whole; 0: as many as the others."""
    other_base: bool = False
    """Rank 1 has another base model."""
    own_folder: Path | None = None
    """Where rank 1 works, instead of in the folder of the others."""
    save_s: float = 0.0
    """How much longer each save takes; every score then takes SLOW_SCORE_S, so that a step is more than noise."""


SLOW_SCORE_S = 0.05


def load_other_base(*arguments: Any) -> Any:
    base = load_base(*arguments)
    with torch.no_grad():
        next(base.parameters()).mul_(1.5)
    return base


def rank(launch: dict[str, Any], folder: Path, odd: Odd) -> None:
    """Trains by `folder/spec.json` into `folder/out`; prints to rank<r>.log, leaves rank<r>.pt.

    Args:
        launch: what `torch.distributed.run` would set.
    """
    os.environ |= {name: str(value) for name, value in launch.items()}
    log = os.open(folder / f"rank{launch['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    setattr(Qwen3RMSNorm, "forward", float64_norm)  # noqa: B010
    group = group_of(take_launch(), torch.device("cpu"))
    join(group)
    if odd.narrow_tokens and group.rank == 1:
        setattr(preference, "_max_packed_tokens", lambda *_: odd.narrow_tokens)  # noqa: B010
    if odd.other_base and group.rank == 1:
        preference.load_base = load_other_base
    write = checkpoints.write_atomically

    def write_slowly(*arguments: Any) -> None:
        time.sleep(odd.save_s)
        write(*arguments)

    checkpoints.write_atomically = write_slowly
    spec = TrainSpec.model_validate_json((folder / "spec.json").read_text())
    assert spec.simpo is not None
    gradient = window_gradient(spec, group)
    models: list[Any] = []

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        models[:] = [model]
        if odd.save_s:
            time.sleep(SLOW_SCORE_S)
        if odd.disturbed and group.rank == 1 and model.training:
            with torch.no_grad():
                trainable_parameters(model)[odd.disturbed].view(-1)[0] += 1e-12
        return token_logprobs(model, *arguments)

    out = odd.own_folder if odd.own_folder and group.rank == 1 else folder / "out"
    report = preference.train(spec, spec.simpo, group, out, Stop(), scorer)
    parameters = {name: p.detach().clone() for name, p in trainable_parameters(models[0]).items()}
    result = {"gradient": gradient, "parameters": parameters, "report": report.model_dump_json()}
    torch.save(result, folder / f"rank{group.rank}.pt")
    leave(group)
