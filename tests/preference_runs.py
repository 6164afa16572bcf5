"""Preference runs of tests: in this process, and on real gloo processes."""

from __future__ import annotations

import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import preference_worker
import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine import preference
from engine.group import Group
from engine.session import Stop
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SimpoConfig

BETA, GAMMA = 2.0, 0.6
CONFIG = SimpoConfig(
    optimizer=OptimizerConfig(
        learning_rate=5e-3, lr_scheduler="linear", warmup_share=0.0, max_grad_norm=0.15, weight_decay=0.01
    ),
    beta=BETA,
    gamma=GAMMA,
    epochs=10,
    accumulation=4,
    seed=3,
)
"""8 pairs in windows of 4: 20 steps; the gradient norm is 0.2 to 1.7, so clipping at 0.15 acts at every step."""


def with_plan(spec: TrainSpec, plan: str, **options: Any) -> TrainSpec:
    assert spec.simpo is not None
    return spec.model_copy(update={"simpo": spec.simpo.model_copy(update={"plan": plan} | options)})


def run_ranks(spec: TrainSpec, world_size: int, folder: Path, **odd: Any) -> list[dict[str, Any]]:
    """Trains on `world_size` real processes; returns what each rank holds afterwards."""
    outputs, codes = start_ranks(spec, world_size, folder, **odd)
    assert codes == [0] * world_size, "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def start_ranks(
    spec: TrainSpec, world_size: int, folder: Path, *, timeout_s: float = 240, **odd: Any
) -> tuple[list[str], list[int | None]]:
    """What each of the processes printed, and its exit status.

    Args:
        odd: see `preference_worker.Odd`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    # held here, as `torch.distributed.run` does: a port that is free now may be somebody's when rank 0 is up
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # ranks are forked off a server that has imported torch once, which takes longer than their training
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preference_worker"])
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        for rank in range(world_size):
            launch = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": store.host, "MASTER_PORT": store.port}
            launch |= {"TORCHELASTIC_USE_AGENT_STORE": True}
            arguments = (launch, folder, preference_worker.Odd(**odd))
            ranks.append(context.Process(target=preference_worker.rank, args=arguments))
            ranks[-1].start()
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.1, deadline - time.monotonic()))
        rank.kill()
    outputs = [(folder / f"rank{rank}.log").read_text() for rank in range(world_size)]
    return outputs, [rank.exitcode for rank in ranks]


def train_here(spec: TrainSpec, out: Path, **options: Any) -> tuple[dict[str, torch.Tensor], TrainReport]:
    assert spec.simpo is not None
    report = preference.train(spec, spec.simpo, Group(), out, options.pop("stop", Stop()), **options)
    return load_file(out / "adapter" / "adapter_model.safetensors"), report


def adapter_of(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameter names as they are in a stored adapter."""
    return {name.replace(".default.", "."): tensor for name, tensor in parameters.items()}


def largest_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """||got - want|| / ||want|| over all tensors together."""
    assert got.keys() == want.keys()
    difference = sum(float((got[name] - want[name]).norm() ** 2) for name in want)
    return math.sqrt(difference / sum(float(want[name].norm() ** 2) for name in want))
