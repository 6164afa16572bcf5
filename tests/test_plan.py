"""`traceforge plan`: memory, policy and who works on which branch, from a model's shape alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import DEMO, ended, invoke, started
from conftest import REPOSITORY
from transformers import AutoConfig, AutoModelForCausalLM

from engine.choose import SEARCHED_TOKENS
from engine.memory import GIB
from engine.tiny import n_parameters, tiny_qwen3_config
from schemas.errors import UserError
from schemas.load import load_config
from tasks.model_shape import SHAPES
from tasks.plan import MAX_DEALT_PAIRS, PlanReport, plan_memory, plan_request
from tasks.tokenizer import VOCAB_SIZE

TWO_GPUS = REPOSITORY / "configs" / "qwen3-8b-2x24g.toml"


def planned(gpus: int = 1, *settings: str, model: str = "qwen3-8b", **options: Any) -> PlanReport:
    """With more host memory than the default; plan and accumulation are keys of the configuration."""
    settings += tuple(
        f"simpo.{key}={json.dumps(options.pop(key))}" for key in ("plan", "accumulation") if key in options
    )
    config = load_config(TWO_GPUS, settings)
    asked = {"tokens": 81_920, "scored": 4096, "gpus": gpus, "host_gib": 110} | options
    return plan_memory(config, plan_request(config, **asked), model)


def test_a_pair_on_two_cards_has_a_branch_on_each() -> None:
    report = planned(2, plan="parallel", accumulation=1)
    assert report.branch_plan.plans == ("parallel",)
    assert [card.work for card in report.branch_plan.cards] == [
        ("the chosen branch of 1 pair(s)",),
        ("the rejected branch of 1 pair(s)",),
    ]
    assert [card.busy_share for card in report.branch_plan.cards] == [1.0, 1.0]
    assert "GPU 1: the rejected branch" in report.text()


def test_a_card_without_work_is_said_to_have_none() -> None:
    assert "\n  GPU 1: nothing of this step" in planned(2, plan="sequential", accumulation=1).text()


def test_processes_share_the_hosts_memory() -> None:
    one, two = planned(1, plan="sequential"), planned(2, plan="parallel")
    assert two.host_limit_bytes * 2 == one.host_limit_bytes == 110 * GIB
    assert two.host_bytes <= 55 * GIB < one.host_bytes
    assert two.longest_tokens < one.longest_tokens


def test_a_long_common_prefix_is_computed_once_on_one_card() -> None:
    report = planned(1, shared=77_824, accumulation=1)
    assert report.branch_plan.plans == ("shared_prefix",)
    (card,) = report.branch_plan.cards
    assert card.work == ("both branches, behind their common prefix, of 1 pair(s)",)
    assert card.peak_device_bytes <= 23.5 * GIB


def test_what_does_not_fit_in_one_pass_is_worked_on_one_after_the_other() -> None:
    """11 GiB hold one branch of 81,920 tokens, not two in one pass."""
    report = planned(1, gpu_gib=11, accumulation=2)
    assert report.branch_plan.plans == ("sequential", "sequential")
    assert report.branch_plan.cards[0].work == ("both branches, one after the other, of 2 pair(s)",)
    with pytest.raises(UserError, match=r"163,840 tokens, do not fit"):
        planned(1, gpu_gib=11, plan="shared_prefix")


def test_three_cards_split_what_evens_them_out() -> None:
    report = planned(3, gpu_gib=11, host_gib=330, accumulation=8)
    shares = [card.busy_share for card in report.branch_plan.cards]
    assert max(shares) == 1.0
    assert min(shares) > 0.8
    assert sorted(report.branch_plan.plans) == ["parallel"] * 2 + ["sequential"] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 3, "plan": "parallel"}, "plan parallel needs two GPUs a pair"),
        ({"shared": 81_920}, "leaves nothing to compare"),
        ({"tokens": 2_000_000}, r"the longest that fits is [\d,]+ tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(**options)


def test_policy_is_told_by_place_and_layers() -> None:
    """The counts in the text are those of the plan's layers."""
    report = planned(1, gpu_gib=40)
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


def test_shapes_are_those_of_the_models_that_are_made() -> None:
    made = tiny_qwen3_config(VOCAB_SIZE, eos_token_id=0, pad_token_id=0).to_dict()
    assert SHAPES["tiny-qwen3"].items() <= made.items()
    with torch.device("meta"):
        smollm2 = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["smollm2-135m"]))
    assert n_parameters(smollm2) == 134_515_008


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration's own model, which a run would make, is planned for by its shape."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = invoke("plan", "--config", DEMO, "--tokens", "2048", "--scored", "100")
    assert code == 0
    assert "tiny-qwen3: a branch of 2,048 tokens" in out
    assert not list(tmp_path.iterdir())


def test_memory_is_the_configurations_unless_it_is_given() -> None:
    config = load_config(TWO_GPUS, ["model.gpu_gib=12", "model.host_gib=48"])
    asked = plan_request(config, tokens=100, scored=10, gpu_gib=None, host_gib=80.0)
    assert (asked.gpu_gib, asked.host_gib) == (12, 80)


def test_more_pairs_than_can_be_dealt_are_said() -> None:
    report = planned(2, tokens=4096, scored=100, accumulation=100_000_000)
    assert len(report.branch_plan.plans) == MAX_DEALT_PAIRS
    assert "a step of 100,000,000 pair(s), the first 128 of them: " in report.text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--gpu-gib inf", "--gpu-gib: input should be a finite number, got inf"),
        ("--gpu-gib nan", "--gpu-gib: input should be a finite number, got nan"),
        ("--gpu-gib 0", "--gpu-gib: input should be greater than 0"),
        ("--host-gib inf", "--host-gib: input should be a finite number"),
        ("--host-gib 1e308", "--host-gib: input should be less than or equal to 65536"),
        ("--set model.gpu_gib=1e308", "model.gpu_gib: input should be less than or equal to 4096"),
        ("--set model.gpu_gib=5", "does not fit 5 GiB on the device"),
        ("--tokens 2147483000 --host-gib 4096", "on the device and 4,096 GiB on the host (the longest that fits is"),
        ("--gpus 100000000", "--gpus': Input should be less than or equal to 64"),
        ("--tokens 4096 --gpu-gib 0.001", "does not fit"),
        ("--tokens 99999999999", "--tokens: whole numbers go up to 2147483647"),
        ("--tokens 1", "'--tokens'"),
        ("--tokens 4096 --scored 4096", "--scored 4,096 of --tokens 4,096: the first token is never scored"),
        ("--shared 81920", "leaves nothing to compare"),
        ("--set lora.dropout=0.1", "lora.dropout: the long-context engine, whose memory alone is predicted, does not"),
        ("--set lora.dropout=0.1 --set model.engine=long_context", "does not cover LoRA dropout (0.1) (set it to 0)"),
        ('--set lora.target_modules=["foo"]', "does not cover LoRA on foo (it takes q_proj, k_proj, v_proj, o_proj,"),
        ('--set lora.target_modules=["qkv_proj"]', "lora.target_modules: the long-context engine"),
        ("--set lora.target_modules=[]", "lora.target_modules: tuple should have at least 1 item"),
        ("--set model.backend=unsloth", "model.backend: the memory of a model loaded by unsloth is not predicted"),
        (
            "--set model.engine=plain",
            'model.engine: the memory of the plain engine is not predicted (set it to "auto")',
        ),
        ("--model /nowhere", "/nowhere/config.json: no readable model config (No such file or directory)"),
        (f"--model {'a' * 5000}", "no readable model config (File name too long)"),
        ("--model ~nobody-of-this-name", "no readable model config"),
        ("--model /dev/null/config.json", "no readable model config (Not a directory)"),
    ],
)
def test_what_training_would_refuse_is_one_line(arguments: str, expected: str) -> None:
    code, out, err = invoke("plan", "--model", "qwen3-8b", *arguments.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert expected in line


@pytest.mark.parametrize(("tokens", "scored"), [(2, 1), (1000, 999), (4096, 4095), (4097, 4096), (81_920, 4096)])
def test_as_many_tokens_are_scored_as_a_branch_has_unless_it_is_given(tokens: int, scored: int) -> None:
    code, out, _ = invoke("plan", "--model", "tiny-qwen3", "--tokens", str(tokens), "--json")
    assert code == 0
    assert json.loads(out)["n_scored"] == scored


def test_the_longest_is_never_below_what_was_planned() -> None:
    """The search goes in steps of 1,024 tokens, and ends at 16,777,216."""
    report = planned(1, model="tiny-qwen3", tokens=5000, scored=1, gpu_gib=0.1)
    assert 5000 < report.longest_tokens < SEARCHED_TOKENS
    assert f"the longest that fits is {report.longest_tokens:,} tokens" in report.text()
    longest = planned(1, model="tiny-qwen3", tokens=report.longest_tokens + 1, scored=1, gpu_gib=0.1)
    assert longest.longest_tokens == longest.n_tokens
    for tokens, expected in ((8192, 16_777_216), (16_777_217, 16_777_217), (20_000_000, 20_000_000)):
        text = planned(1, model="tiny-qwen3", tokens=tokens, gpu_gib=4096, host_gib=65_536).text()
        assert f"the longest that fits is at least {expected:,} tokens" in text


def test_help_says_how_many_gpus() -> None:
    code, out, _ = invoke("plan", "--help")
    assert code == 0
    assert "1<=x<=64" in out


def test_a_fixed_order_of_sums_takes_memory() -> None:
    short: dict[str, Any] = {"tokens": 8192, "scored": 100, "gpu_gib": 10}
    assert planned(1, "model.deterministic=true", **short).longest_tokens < planned(1, **short).longest_tokens


def test_a_prediction_is_all_that_is_said() -> None:
    with started("plan", "--model", "tiny-qwen3", "--tokens", "2048") as process:
        assert ended(process)[1] == ""
