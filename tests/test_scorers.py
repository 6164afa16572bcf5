"""The engine of a stage: which and why, equal numbers from both, refused budgets, NF4, out of memory."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import tiny_model
from safetensors.torch import load_file
from training_inputs import float64_norm, make_adapter, make_model, make_tables, simpo_spec
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine import evaluate, loading, preference, scorers, sft
from engine.attention import BACKENDS
from engine.budget import Budget, choose_engine, scoring_plan, training_plan, window_of
from engine.choose import longest_branch, sized_plans
from engine.data import BranchTable
from engine.group import Group
from engine.layers import PACK_TOKENS, LongContextScorer
from engine.memory import GIB, Setup
from engine.scorers import open_engine
from engine.scores import split_head, token_logprobs
from engine.session import Stop
from schemas.config import EvaluateConfig, LoraConfig, ModelConfig
from schemas.errors import StageError, UserError
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SftConfig, SimpoConfig
from tasks.plan import SHAPES

OPTIMIZER = OptimizerConfig(learning_rate=5e-3, warmup_share=0.0, max_grad_norm=0.3)
QWEN3_8B = SHAPES["qwen3-8b"]


@pytest.fixture(autouse=True)
def _float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", float64_norm)


def with_engine(spec: TrainSpec, engine: str, **options: Any) -> TrainSpec:
    return spec.model_copy(update={"base": spec.base.model_copy(update={"engine": engine} | options)})


def difference(one: Path, other: Path) -> float:
    """||one - other|| / ||other|| of two stored adapters."""
    got, want = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (one, other))
    squares = [(float((got[name] - want[name]).norm()) ** 2, float(want[name].norm()) ** 2) for name in want]
    return math.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares))


@pytest.fixture
def spec(tmp_path: Path) -> TrainSpec:
    config = SimpoConfig(optimizer=OPTIMIZER, plan="sequential", accumulation=2, epochs=2)
    return simpo_spec(tmp_path / "inputs", config, n_pairs=4, n_heldout=3)


def test_preference_stage_gives_the_same_adapter_with_both_engines(spec: TrainSpec, tmp_path: Path) -> None:
    """4 steps in float64 (measured: 2e-15)."""
    assert spec.simpo is not None
    for engine in ("plain", "long_context"):
        report = preference.train(with_engine(spec, engine), spec.simpo, Group(), tmp_path / engine, Stop())
        assert report.settings["engine"] == f"{engine} (as configured)"
        assert report.settings["attention"] == {"plain": "sdpa", "long_context": "math"}[engine]
    assert difference(tmp_path / "long_context", tmp_path / "plain") < 1e-9


def test_shared_prefix_in_the_long_context_engine_gives_the_same_adapter(tmp_path: Path) -> None:
    """Pairs behind their common prefix, walked in blocks, against two branches a pair in the plain engine (2e-15)."""
    config = SimpoConfig(optimizer=OPTIMIZER, plan="sequential", accumulation=2, epochs=2)
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=4, n_heldout=3, shared_prefix=True)
    shared = config.model_copy(update={"plan": "shared_prefix"})
    for engine, run in (("plain", config), ("long_context", shared)):
        report = preference.train(with_engine(spec, engine), run, Group(), tmp_path / engine, Stop())
        assert ("behind their shared prefix" in report.plan) == (engine == "long_context")
    assert difference(tmp_path / "long_context", tmp_path / "plain") < 1e-9


def test_sft_gives_the_same_adapter_with_both_engines(spec: TrainSpec, tmp_path: Path) -> None:
    """Padded batches of several rows (measured: 3e-15)."""
    config = SftConfig(optimizer=OPTIMIZER, tokens_per_micro_batch=600, accumulation=2, epochs=2)
    run = spec.model_copy(update={"stage": "sft", "sft": config, "lora": LoraConfig(r=4)})
    for engine in ("plain", "long_context"):
        report = sft.train(with_engine(run, engine), config, Group(), tmp_path / engine, Stop())
        assert report.padding_share > 0
        assert report.settings["engine"] == f"{engine} (as configured)"
    assert difference(tmp_path / "long_context", tmp_path / "plain") < 1e-9


def test_evaluation_gives_the_same_scores_with_both_engines(spec: TrainSpec) -> None:
    spec = spec.model_copy(update={"adapters": {"sft": spec.adapters["start"]}})
    plain, long = (
        evaluate.evaluate(with_engine(spec, e), EvaluateConfig(), Group()) for e in ("plain", "long_context")
    )
    assert long.settings["engine"] == "long_context (as configured)"
    for mine, other in zip(long.models, plain.models, strict=True):
        assert mine.nll_per_action_token == pytest.approx(other.nll_per_action_token, rel=1e-9)
        assert mine.mean_margin == pytest.approx(other.mean_margin, rel=1e-9)


@pytest.mark.parametrize(
    ("engine", "on_gpu", "problem", "expected"),
    [
        ("auto", True, None, "long_context"),
        ("auto", True, "attention dropout", "plain"),
        ("auto", False, None, "plain"),
        ("plain", True, None, "plain"),
        ("long_context", False, None, "long_context"),
    ],
)
def test_auto_takes_the_long_context_engine_where_it_computes_the_same(
    engine: Any, on_gpu: bool, problem: str | None, expected: str
) -> None:
    assert choose_engine(ModelConfig(engine=engine), problem, 4_096, on_gpu=on_gpu)[0] == expected


@pytest.mark.parametrize(
    ("config", "base", "lora", "problem"),
    [
        ({"model_type": "gemma3_text"}, {}, {}, "gemma3_text loaded by transformers (it covers llama, mistral, qwen2"),
        ({}, {}, {}, "unknown loaded by transformers"),
        ({}, {"backend": "unsloth"}, {}, "loaded by unsloth"),
        ({"model_type": "mistral", "sliding_window": 50}, {}, {}, "a sliding window of 50 tokens on a branch of"),
        ({"model_type": "qwen3", "hidden_act": "gelu"}, {}, {}, "activation gelu"),
        ({"model_type": "qwen3", "attention_dropout": 0.1}, {}, {}, "attention dropout (0.1)"),
        ({"model_type": "qwen3"}, {}, {"target_modules": ("q_proj", "lm_head")}, "LoRA on lm_head"),
        ({"model_type": "qwen3"}, {}, {"dropout": 0.05}, "LoRA dropout (0.05)"),
    ],
)
def test_long_context_where_it_would_not_compute_the_same_is_refused_before_the_model_is_loaded(
    spec: TrainSpec, config: dict[str, Any], base: dict[str, Any], lora: dict[str, Any], problem: str
) -> None:
    (Path(spec.model.path) / "config.json").write_text(json.dumps(config))
    run = with_engine(spec, "long_context", **base).model_copy(update={"lora": LoraConfig(**lora)})
    branches = BranchTable(spec.branches)
    with pytest.raises(UserError, match=f"does not cover .*{re.escape(problem)}"):
        open_engine(run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True)


@pytest.mark.parametrize(
    ("config", "window_tokens"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 64}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 99}, None),
    ],
)
def test_the_window_is_that_of_transformers_reading_of_a_config(
    config: dict[str, Any], window_tokens: int | None
) -> None:
    assert window_of(AutoConfig.for_model(**config)) == window_tokens


def test_dropout_counts_where_something_is_trained(spec: TrainSpec) -> None:
    """A stage that trains under dropout takes the plain engine; evaluation, which draws no mask, does not mind."""
    folder = Path(spec.adapters["start"].path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.1}))
    branches, run = BranchTable(spec.branches), with_engine(spec, "long_context")
    with pytest.raises(UserError, match=r"does not cover LoRA dropout \(0.1\)"):
        open_engine(run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True)
    assert open_engine(run, branches, ["good-3"], Group(), optimizer=None, accumulating=False).name == "long_context"


def test_all_ranks_take_the_attention_kernel_that_is_fastest_on_them_together(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank found flash faster, the other cuDNN by more; flash-attn is not installed here."""
    engine = open_engine(
        with_engine(spec, "long_context"), BranchTable(spec.branches), ["good-3"], Group(), optimizer=OPTIMIZER,
        accumulating=True,
    )  # fmt: skip
    scorer = engine.scorer
    assert isinstance(scorer, LongContextScorer)
    other_s = {"cudnn": 1.0, "flash": 1.5, "flash_attn": 0.1}

    def gathered(_: Group, own_K: torch.Tensor) -> torch.Tensor:
        return torch.stack([own_K, torch.tensor([other_s.get(name, math.inf) for name in BACKENDS])])

    monkeypatch.setattr(scorers, "gather", gathered)
    scorer.backend, scorer.probe_s = BACKENDS["flash"], {"cudnn": 1.2, "flash": 1.0}
    engine.agree_on_attention(torch.nn.Module(), Group(world_size=2))
    assert scorer.backend.name == "cudnn"
    scorer.probe_s = {"cudnn": math.inf, "flash": 1.0}
    other_s["flash"] = math.inf
    with pytest.raises(StageError, match="no fused attention kernel runs"):  # on both
        engine.agree_on_attention(torch.nn.Module(), Group(world_size=2))


def test_no_shared_pass_where_a_tokens_embedding_depends_on_what_stands_behind_it(spec: TrainSpec) -> None:
    """Both tails of a pair in one pass are longer than either branch: dynamic RoPE would turn the prefix otherwise."""
    run, branches, model = with_engine(spec, "plain"), BranchTable(spec.branches), tiny_model()
    engine = open_engine(run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True)
    config = SimpoConfig(plan="auto")
    assert preference._max_packed_tokens(config, engine, model, 0.0, Group()) > 0
    decoder: Any = split_head(model)[0]
    decoder.rotary_emb.rope_type = "dynamic"
    assert preference._max_packed_tokens(config, engine, model, 0.0, Group()) == 0
    asked = config.model_copy(update={"plan": "shared_prefix"})
    with pytest.raises(UserError, match=r"plan shared_prefix is not possible: .*rotary embeddings depend"):
        preference._max_packed_tokens(asked, engine, model, 0.0, Group())


def test_over_budget_is_refused_before_the_model_is_loaded(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget of 3 MiB nothing fits, and what a short branch would take is named."""
    branches = BranchTable(spec.branches)
    run = with_engine(spec, "long_context")
    small = Budget(device_bytes=3 * 2**20, host_bytes=GIB)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(
        UserError,
        match=r"a branch of \d+ tokens does not fit 0.00293 GiB .*\(1,024 tokens take 0.\d+ GiB on the device",
    ):
        open_engine(run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True, budget=small)
    large = Budget(device_bytes=GIB, host_bytes=GIB)
    engine = open_engine(run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True, budget=large)
    assert engine.ledger is not None
    assert engine.ledger.n_tokens == branches["good-3"].n_tokens == engine.longest_tokens
    assert engine.ledger.peak_device_bytes < GIB


def test_packs_and_pairs_are_planned_with_their_blocks(spec: TrainSpec) -> None:
    """Blocks take memory of their own: a pair's tokens are fewer than one branch's, packs shrink with the budget."""
    branches, run = BranchTable(spec.branches), with_engine(spec, "long_context")
    found = []
    for device_bytes in (72 * 2**20, 80 * 2**20, GIB):
        engine = open_engine(
            run, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=True,
            budget=Budget(device_bytes=device_bytes, host_bytes=GIB),
        )  # fmt: skip
        assert isinstance(engine.scorer, LongContextScorer)
        found.append(engine.scorer.pack_tokens)
        assert engine.setup is not None
        pair, one = engine.longest_pair(), engine.setup
        assert pair <= longest_branch(engine.model_config, one, device_bytes=device_bytes, host_bytes=GIB)
    assert found == sorted(found)
    assert found[0] < found[-1] == PACK_TOKENS


def test_fields_that_a_config_does_not_have_are_planned_as_the_family_takes_them(spec: TrainSpec) -> None:
    path = Path(spec.model.path) / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in stored.items() if key != "head_dim"}))
    spec, branches = with_engine(spec, "long_context"), BranchTable(spec.branches)
    engine = open_engine(
        spec, branches, ["good-3"], Group(), optimizer=OPTIMIZER, accumulating=False, budget=Budget(GIB, GIB)
    )
    assert engine.model_config["head_dim"] == 128  # qwen3's own, whatever the hidden size


def test_longest_that_fits_is_named_and_fits() -> None:
    setup, budget = Setup(n_scored=4096), Budget(int(23.5 * GIB), 110 * GIB)
    with pytest.raises(UserError, match=r"the longest that fits is ([\d,]+) tokens") as error:
        training_plan(QWEN3_8B, 2_000_000, setup, budget)
    longest = int(str(error.value).split("longest that fits is ")[1].split(" ")[0].replace(",", ""))
    assert longest > 131_072
    training_plan(QWEN3_8B, longest, setup, budget)


def test_scoring_leaves_the_allocator_its_share() -> None:
    plan, ledger = scoring_plan(QWEN3_8B, 65_536, Setup(), Budget(11 * GIB, 0))
    exact = Budget(ledger.peak_device_bytes, 0)
    assert scoring_plan(QWEN3_8B, 65_536, Setup(), exact)[0] != plan
    assert scoring_plan(QWEN3_8B, 65_536, Setup(), Budget(int(exact.device_bytes / 0.97) + 1, 0))[0] == plan


@pytest.mark.parametrize(("key_heads", "groups"), [(8, [1, 2, 4, 8]), (20, [1, 2, 4, 5]), (3, [1, 3]), (7, [1, 7])])
def test_heads_are_grouped_by_what_divides_them(key_heads: int, groups: list[int]) -> None:
    plans = sized_plans({**QWEN3_8B, "num_key_value_heads": key_heads}, 65_536, "layer_offload")
    assert sorted({plan.head_groups for plan in plans}) == groups
    assert {plan.tile_tokens for plan in plans} == {8192, 4096, 2048}
    assert [plan.staged_qkv for plan in plans].count(True) == 3


def test_scoring_needs_less_than_training() -> None:
    """9 GiB do not train an 81,920-token branch of Qwen3-8B, but score it."""
    setup, budget = Setup(n_scored=4096), Budget(9 * GIB, 110 * GIB)
    with pytest.raises(UserError, match="does not fit"):
        training_plan(QWEN3_8B, 81_920, setup, budget)
    _, ledger = scoring_plan(QWEN3_8B, 81_920, setup, budget)
    assert ledger.n_tokens == 81_920
    with pytest.raises(UserError, match="scoring a branch of 81,920 tokens takes"):
        scoring_plan(QWEN3_8B, 81_920, setup, Budget(2 * GIB, 110 * GIB))


@pytest.mark.filterwarnings("error:bitsandbytes")  # a kernel without a backward pass warns only
@pytest.mark.parametrize("engine", ["plain", "long_context"])
@pytest.mark.parametrize("stage", ["sft", "simpo"])
def test_nf4_base_trains_a_float32_adapter(tmp_path: Path, engine: str, stage: str) -> None:
    """bitsandbytes has NF4 on a CPU too. TRL would cast the adapter to bfloat16: steps of 1e-5 would be lost there."""
    base = ModelConfig(name="tiny", dtype="bfloat16", quantization="nf4", engine=engine)  # type: ignore[arg-type]
    model = make_model(tmp_path / "model", hidden_size=64, head_size=16)  # rows in blocks of 32
    branches, paired = make_tables(tmp_path, n_pairs=2, n_heldout=0)
    start = make_adapter(tmp_path / "start", model, dtype="float32")
    optimizer = OptimizerConfig(learning_rate=1e-5, warmup_share=0.0)
    spec = TrainSpec(
        stage=stage,  # type: ignore[arg-type]
        branches=(branches,),
        pairs=paired.pairs,
        model=model,
        base=base,
        lora=LoraConfig(r=4) if stage == "sft" else None,
        adapters={"start": start} if stage == "simpo" else {},
        sft=SftConfig(optimizer=optimizer),
        simpo=SimpoConfig(optimizer=optimizer, plan="sequential", epochs=1),
    )
    seen: list[Any] = []

    def spy(loaded: Any, *arguments: Any) -> torch.Tensor:
        seen[:] = [loaded]
        return token_logprobs(loaded, *arguments)

    scorer = spy if engine == "plain" else None
    assert spec.sft is not None
    assert spec.simpo is not None
    if stage == "sft":
        report = sft.train(spec, spec.sft, Group(), tmp_path / "out", Stop(), scorer)
    else:
        report = preference.train(spec, spec.simpo, Group(), tmp_path / "out", Stop(), scorer)
    assert report.settings["engine"].startswith(engine)
    assert math.isfinite(report.last_loss)
    stored = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert any(type(module).__name__ == "Linear4bit" for model in seen for module in model.modules()) == bool(scorer)
