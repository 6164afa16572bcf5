"""One rank of a preference run, started by test_preference.py: python preference_worker.py spec.json out result.pt

Leaves the summed gradient of one window, and the parameters after training, as this rank holds them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import losses, preference
from engine.branches import n_replicas, step
from engine.collectives import Group, close_group, open_group, sum_gradients, take_launch
from engine.data import BranchTable, collate, read_pairs
from engine.loading import load_adapter, load_base, trainable_parameters
from engine.scores import branch_scores, token_logprobs
from engine.session import Stop
from schemas.spec import TrainSpec


def window_gradient(spec: TrainSpec, group: Group) -> dict[str, torch.Tensor]:
    """Gradient of the mean loss of the first four training pairs, summed over the ranks."""
    assert spec.simpo is not None
    assert spec.pairs is not None
    branches, pairs = BranchTable(spec.branches), read_pairs(spec.pairs, "train")[:4]
    model = load_adapter(
        load_base(spec.model, spec.base, group.device, 4096), spec.adapters["start"], spec.model, trainable=True
    )

    def score(index: int, side: str) -> torch.Tensor:
        batch = collate([branches[pairs[index].chosen if side == "chosen" else pairs[index].rejected]])
        return branch_scores(token_logprobs(model, *batch[:4]), batch.weights_P)[1]

    loss = partial(losses.simpo, beta=spec.simpo.beta, gamma=spec.simpo.resolved_gamma)
    replicas = n_replicas(spec.simpo.plan, group.world_size)
    for first in range(0, len(pairs), replicas):
        micro_batch = list(range(len(pairs)))[first : first + replicas]
        shares = torch.full((len(micro_batch),), 1 / len(pairs), dtype=torch.float64)
        step(spec.simpo.plan, group, micro_batch, shares, score, loss, str)
    parameters = trainable_parameters(model)
    sum_gradients(group, list(parameters.values()), torch.zeros(1))
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def main(spec_path: Path, out: Path, result: Path) -> None:
    group = open_group(take_launch(), torch.device("cpu"), timeout_s=120)
    spec = TrainSpec.model_validate_json(spec_path.read_text())
    assert spec.simpo is not None
    gradient = window_gradient(spec, group)
    models: list[Any] = []

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        models[:] = [model]
        return token_logprobs(model, *arguments)

    report = preference.train(spec, spec.simpo, group, out, Stop(), scorer)
    parameters = {name: p.detach().clone() for name, p in trainable_parameters(models[0]).items()}
    torch.save({"gradient": gradient, "parameters": parameters, "report": report.model_dump_json()}, result)
    close_group(group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
