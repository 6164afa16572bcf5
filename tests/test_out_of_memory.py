"""Out of memory on either side: recognised, reported with the ledger beside what was allocated, and with advice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training_inputs import VOCABULARY, make_model, simpo_spec

from engine import preference, sft
from engine.budget import Budget, StagePlan, Stand, advice, training_plan
from engine.data import BranchTable
from engine.group import Group
from engine.host_memory import HostMemoryError
from engine.loading import load_base, new_adapter
from engine.memory import GIB, Setup, trained_parameters
from engine.out_of_memory import Allocated, comparison, components_of, memory_advice, side_of
from engine.scorers import open_engine
from engine.session import Stop
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import StageError
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SftConfig, SimpoConfig
from tasks.plan import SHAPES

QWEN3_8B = SHAPES["qwen3-8b"]
SETUP = Setup(n_scored=4096)


def planned(n_tokens: int = 131_072, device_gib: float = 23.5, host_gib: float = 110) -> StagePlan:
    budget = Budget(int(device_gib * GIB), int(host_gib * GIB))
    _, ledger = training_plan(QWEN3_8B, n_tokens, SETUP, budget)
    return StagePlan("long_context", n_tokens, ledger, QWEN3_8B, SETUP, budget)


@pytest.mark.parametrize(
    ("error", "side"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (MemoryError(), "host"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (HostMemoryError("the host refused to pin 110.0 GiB"), "host"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "host"),
        (RuntimeError("shapes cannot be multiplied"), None),
        (OSError(28, "No space left on device"), None),
        (StageError("the loss is nan"), None),
    ],
)
def test_which_memory_ran_out(error: Exception, side: str | None) -> None:
    assert side_of(error) == side


# --- advice


def test_a_device_shared_with_others_is_told_from_a_ledger_that_missed() -> None:
    plan = planned()
    assert plan.budget is not None
    taken = advice(Stand("device", int(18 * GIB), int(17 * GIB)), plan)
    assert "free the 5.5 GiB of the device that others have taken" in taken[0]
    assert "set model.gpu_gib = 18.0" in taken[1]
    assert plan.ledger is not None
    peak_bytes = plan.ledger.peak_device_bytes + 2 * GIB  # two more than predicted: plan with two less
    missed = advice(Stand("device", plan.budget.device_bytes, peak_bytes), plan)
    assert len(missed) == 1
    assert "set model.gpu_gib = 21.5" in missed[0]
    hardly = advice(Stand("device", plan.budget.device_bytes, plan.ledger.peak_device_bytes), plan)
    assert "set model.gpu_gib = 22.3" in hardly[0]


def test_pieces_of_the_allocator_are_told() -> None:
    said = advice(Stand("device", int(23.5 * GIB), int(23 * GIB), idle_bytes=3 * GIB), planned())
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said[0]
    assert "3.0 GiB lay idle" in said[0]


def test_a_branch_that_fits_no_policy_gets_the_longest_that_does() -> None:
    """A quarter of the device is gone: 131,072 tokens do not fit any more."""
    plan = planned(131_072, device_gib=12.5)
    said = advice(Stand("device", int(9.5 * GIB), int(9.4 * GIB)), plan)
    longest = int(said[-1].split("render.max_tokens = ")[1].split(",")[0])
    assert 81_920 <= longest < 131_072
    assert plan.budget is not None
    training_plan(QWEN3_8B, longest, SETUP, plan.budget._replace(device_bytes=int(9.5 * GIB)))


def test_the_host_side_names_memory_policy_plan_and_length() -> None:
    said = advice(Stand("host", 60 * GIB, world_size=2), planned())
    assert "more memory" in said[0]
    assert 'simpo.plan = "sequential"' in said[1]
    assert "set model.host_gib = 54.0" in said[2]  # 90 % of 60, both processes
    alone = advice(Stand("host", GIB), planned())
    assert not any("sequential" in text for text in alone)
    assert "render.max_tokens = " in alone[-1]


def test_the_plain_engine_is_told_what_the_other_one_would_hold() -> None:
    plan = StagePlan("plain", 32_768, None, QWEN3_8B, SETUP, Budget(int(23.5 * GIB), 110 * GIB))
    first, *others = advice(Stand("device", 23 * GIB), plan)
    longest = int(first.split("up to ")[1].split(" ")[0].replace(",", ""))
    assert longest > 262_144
    assert others == ["lower tokens_per_micro_batch", "lower render.max_tokens"]


# --- stages


@pytest.fixture
def spec(tmp_path: Path) -> TrainSpec:
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_share=0.0)
    return simpo_spec(tmp_path / "inputs", SimpoConfig(optimizer=optimizer, plan="sequential"), n_pairs=2, n_heldout=0)


def out_of_memory(error: Exception) -> Any:
    def scorer(*_: Any) -> torch.Tensor:
        raise error

    return scorer


ERRORS = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nProcess 1 has 2 GiB"),
    "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
}


@pytest.mark.parametrize("side", ERRORS)
@pytest.mark.parametrize("stage", ["sft", "simpo"])
def test_a_stage_ends_with_report_and_advice(spec: TrainSpec, tmp_path: Path, stage: str, side: str) -> None:
    scorer, arguments = out_of_memory(ERRORS[side]), (Group(), tmp_path / "out", Stop())
    run = spec.model_copy(update={"stage": "sft", "lora": LoraConfig(r=4)})
    assert spec.simpo is not None
    train = partial(preference.train, spec, spec.simpo) if stage == "simpo" else partial(sft.train, run, SftConfig())
    with pytest.raises(StageError) as raised:
        train(*arguments, scorer)
    first, *table = str(raised.value).splitlines()
    assert first.startswith(f"out of memory on the {side} with branches of up to ")
    assert str(ERRORS[side]).splitlines()[0].rstrip(".") in first
    assert 'To go on: set model.engine = "long_context"; or lower tokens_per_micro_batch' in first
    rows = {line[:48].strip(): line[48:].split() for line in table}
    assert rows["decoder weights"] == ["-", "0.1"]
    assert {"adapters", "embedding and head"} <= rows.keys()
    assert not (tmp_path / "out" / "adapter").exists()


def test_components_are_counted_by_their_owner(tmp_path: Path) -> None:
    """A 2-layer model in float64 with LoRA r4 on seven linears, after a step."""
    model = make_model(tmp_path / "model")
    base = load_base(model, ModelConfig(name="tiny", dtype="float64"), torch.device("cpu"), 64)
    policy = new_adapter(base, LoraConfig(r=4), 0)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    n_trained = trained_parameters(base.config.to_dict(), Setup(lora_rank=4))
    linears = 3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16
    norms = 2 * 32 + 2 * 8
    found = components_of(policy, optimizer)
    assert found == {
        "decoder weights": 8 * (2 * (linears + norms) + 32),
        "embedding and head": 8 * VOCABULARY * 32,
        "adapters": 8 * n_trained,
        "gradients": 8 * n_trained,
        "optimiser": 2 * 8 * n_trained + 4 * len(trained),  # two moments, and a step count each
    }


def test_other_errors_pass_as_they_are(spec: TrainSpec) -> None:
    engine = open_engine(
        spec, BranchTable(spec.branches), ["good-1"], Group(), optimizer=OptimizerConfig(), accumulating=False
    )
    for error in (ValueError("x"), RuntimeError("shapes differ"), OSError(28, "No space left on device")):
        with pytest.raises(type(error)) as raised, memory_advice(engine, Group()):
            raise error
        assert raised.value is error


def test_the_report_has_prediction_and_allocation_side_by_side() -> None:
    plan = planned()
    assert plan.ledger is not None
    components = {"decoder weights": 5 * GIB, "adapters": 200 << 20, "a part that no ledger has": 1 << 20}
    used = Allocated(components, 20 * GIB, 23 * GIB, 21 * GIB, 23 * GIB, GIB // 2, 24 * GIB)
    text = comparison(plan.ledger, used)
    rows = {line[:48].strip(): line[48:].split() for line in text.splitlines()}
    assert rows["component"] == ["predicted", "MiB", "allocated", "MiB"]
    assert rows["adapters"] == ["166.5", "200.0"]
    assert rows["a part that no ledger has"] == ["-", "1.0"]
    assert rows["activations, buffers and libraries"] == [f"{(15 * 1024 - 201):,.1f}"]
    predicted = f"{plan.ledger.peak_device_bytes / 2**20:,.1f}"
    assert rows["all (predicted: peak; allocated: at failure)"] == [predicted, "20,480.0"]
    assert "20.00 GiB allocated and 23.00 reserved at failure, so 3.00 held in pieces that did not fit" in text
    moment = plan.ledger.peak_moment
    shown = {row.component for row in plan.ledger.rows if row.moment == moment and row.device_bytes}
    assert all(f"{moment}: {name}" in rows for name in shown)
    assert "GiB predicted to be pinned" in text
