"""How much memory a rank plans with, and what sums in a fixed order take of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention_memory import attention_workspace_bytes
from engine.budget import Budget, memory_setup, training_plan
from engine.group import Group
from engine.memory import GIB, Setup
from engine.scorers import measured_budget
from schemas.config import ModelConfig
from schemas.errors import UserError
from tasks.plan import SHAPES

QWEN3_8B = SHAPES["qwen3-8b"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A rank with 20 GiB free on its GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 24 * GIB))
    return Group(device=torch.device("cuda"))


def test_a_budget_leaves_room_for_the_libraries(gpu: Group) -> None:
    """Also of what the config allows: as much as the card has would otherwise be planned to the last byte."""
    for gpu_gib, expected in ((None, 19 * GIB), (10, 10 * GIB), (24, 19 * GIB)):
        budget = measured_budget(ModelConfig(gpu_gib=gpu_gib, host_gib=1), gpu)
        assert budget == Budget(expected, GIB)


@pytest.mark.parametrize("options", [{}, {"gpu_gib": 10}, {"host_gib": 1}, {"gpu_gib": 19.5, "host_gib": 1}])
def test_deterministic_runs_name_their_memory(gpu: Group, options: dict[str, Any]) -> None:
    """What happens to be free decides on the sizes of tiles, and these on the order of sums."""
    with pytest.raises(UserError, match=r"model.deterministic: .* 19.0 GiB of this GPU are free .*set model.gpu_gib"):
        measured_budget(ModelConfig(deterministic=True, **options), gpu)
    assert measured_budget(ModelConfig(deterministic=True, gpu_gib=19, host_gib=1), gpu) == Budget(19 * GIB, GIB)


def test_the_workspace_of_sums_in_a_fixed_order_is_planned_for() -> None:
    """Flash's backward then has a sum of dq for each multiprocessor of a head: 132 for 32 heads, 5 in place of 1."""
    one, many = (memory_setup(
        ModelConfig(deterministic=deterministic), lora_rank=16, lora_targets=("q_proj",), optimizer=None, n_scored=8,
        accumulating=False, n_multiprocessors=132,
    ) for deterministic in (False, True))  # fmt: skip
    assert (one.ordered_on, many.ordered_on) == (0, 132)
    any_order = attention_workspace_bytes(81_920, 32, 8, 128)
    assert attention_workspace_bytes(81_920, 32, 8, 128, ordered_on=132) - any_order == 4 * 81_920 * 32 * 128 * 4
    assert attention_workspace_bytes(81_920, 4, 1, 128, ordered_on=132) > 32 * 81_920 * 4 * 128 * 4
    plans = [training_plan(QWEN3_8B, 81_920, Setup(ordered_on=n), Budget(int(23.5 * GIB), 110 * GIB)) for n in (0, 132)]
    assert plans[0][0] != plans[1][0]
    assert max(ledger.peak_device_bytes for _, ledger in plans) < 23.5 * GIB
