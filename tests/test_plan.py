"""`traceforge plan`: memory, policy and who works on which branch, from a model's shape alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from engine.memory import GIB
from schemas.config import RunConfig
from schemas.errors import UserError
from schemas.load import load_config
from tasks.plan import SHAPES, PlanReport, plan_memory

TWO_GPUS = REPOSITORY / "configs" / "qwen3-8b-2x24g.toml"


def planned(n_gpus: int = 1, device_gib: float = 23.5, host_gib: float = 110, **options: Any) -> PlanReport:
    settings = [f"simpo.{name}={json.dumps(options.pop(name))}" for name in ("plan", "accumulation") if name in options]
    config: RunConfig = load_config(TWO_GPUS, settings)
    lengths = {"n_tokens": 81_920, "n_scored": 4096, "model": "qwen3-8b"} | options
    return plan_memory(config, device_gib, host_gib, n_gpus, **lengths)  # type: ignore[arg-type]


def test_a_pair_on_two_cards_has_a_branch_on_each() -> None:
    report = planned(2, plan="parallel", accumulation=1)
    assert report.branch_plan.plans == ("parallel",)
    assert [card.work for card in report.branch_plan.cards] == [
        ("the chosen branch of 1 pair(s)",),
        ("the rejected branch of 1 pair(s)",),
    ]
    assert [card.busy_share for card in report.branch_plan.cards] == [1.0, 1.0]
    assert "GPU 1: the rejected branch" in report.text()


def test_processes_share_the_hosts_memory() -> None:
    one, two = planned(1, plan="sequential"), planned(2, plan="parallel")
    assert two.host_limit_bytes * 2 == one.host_limit_bytes == 110 * GIB
    assert two.host_bytes <= 55 * GIB < one.host_bytes
    assert two.longest_tokens < one.longest_tokens


def test_a_long_common_prefix_is_computed_once_on_one_card() -> None:
    report = planned(1, n_shared=77_824, accumulation=1)
    assert report.branch_plan.plans == ("shared_prefix",)
    (card,) = report.branch_plan.cards
    assert card.work == ("both branches, behind their common prefix, of 1 pair(s)",)
    assert card.peak_device_bytes <= 23.5 * GIB


def test_what_does_not_fit_in_one_pass_is_worked_on_one_after_the_other() -> None:
    """11 GiB hold one branch of 81,920 tokens, not two in one pass."""
    report = planned(1, device_gib=11, accumulation=2)
    assert report.branch_plan.plans == ("sequential", "sequential")
    assert report.branch_plan.cards[0].work == ("both branches, one after the other, of 2 pair(s)",)
    with pytest.raises(UserError, match=r"163,840 tokens, do not fit"):
        planned(1, device_gib=11, plan="shared_prefix")


def test_three_cards_split_what_evens_them_out() -> None:
    report = planned(3, device_gib=11, host_gib=330, accumulation=8)
    shares = [card.busy_share for card in report.branch_plan.cards]
    assert max(shares) == 1.0
    assert min(shares) > 0.8
    assert sorted(report.branch_plan.plans) == ["parallel"] * 2 + ["sequential"] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpus": 3, "plan": "parallel"}, "plan parallel needs two GPUs a pair"),
        ({"n_shared": 81_920}, "leaves nothing to compare"),
        ({"n_tokens": 2_000_000}, r"the longest that fits is [\d,]+ tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(**options)


def test_policy_is_told_by_place_and_layers() -> None:
    """The counts in the text are those of the plan's layers."""
    report = planned(1, device_gib=40)
    layers = report.ledger.plan.layers
    on_device = sum(layer.gate_up == "device" for layer in layers)
    assert on_device > 0
    assert f"gate_up on the device in {on_device} of {len(layers)} layers" in report.policy
    assert "input on the host in 36 of 36 layers" in report.policy
    assert "tiles of 8,192 tokens" in report.policy


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    """No weights, no tokenizer: the shape in a folder of its own name."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    by_folder, by_name = (planned(1, plan="sequential", model=model) for model in (str(tmp_path / "mine"), "qwen3-8b"))
    assert by_folder.model == "mine"
    assert by_folder.peak_device_bytes == by_name.peak_device_bytes
    assert PlanReport.model_validate_json(by_folder.model_dump_json()) == by_folder
