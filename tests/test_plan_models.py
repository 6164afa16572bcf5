"""`traceforge plan` on a config.json: numbers for what the training stage would load and run, else one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.budget import window_of
from engine.model_config import ROPE_TYPES, config_problem, stored_format
from schemas.errors import UserError
from schemas.load import load_config
from tasks.model_shape import SHAPES
from tasks.plan import plan_memory, plan_request

QWEN3 = dict(SHAPES["qwen3-8b"])
LLAMA, MISTRAL, QWEN2 = (QWEN3 | {"model_type": family} for family in ("llama", "mistral", "qwen2"))
N_LAYERS = QWEN3["num_hidden_layers"]


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3.items() if name != key}


def rope(kind: object, **numbers: object) -> dict[str, Any]:
    return QWEN3 | {"rope_scaling": {"rope_type": kind, "factor": 2.0, **numbers}}


def layers(kind: str, family: dict[str, Any] = QWEN3, **others: Any) -> dict[str, Any]:
    return family | {"layer_types": [kind] * N_LAYERS, **others}


def quantised(**how: Any) -> dict[str, Any]:
    return QWEN3 | {"quantization_config": how}


LONGROPE = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "original_max_position_embeddings": 4096}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "model_type: Field required"),
        ([], "should be an object"),
        (None, "should be an object"),
        ("[" * 5000, "Invalid JSON"),
        (
            {"model_type": "gpt2", "n_embd": 768},
            "does not cover gpt2 (plan for a model of one of these: llama, mistral,",
        ),
        (QWEN3 | {"model_type": "qwen3_moe"}, "does not cover qwen3_moe (plan for a model of one of these"),
        (QWEN3 | {"model_type": "gemma"}, "does not cover gemma"),
        (QWEN3 | {"model_type": "qwen3_vl", "text_config": QWEN3}, "does not cover qwen3_vl"),
        (QWEN3 | {"model_type": ["qwen3"]}, "model_type: Input should be a valid string"),
        (without("model_type"), "model_type: Field required"),
        (QWEN3 | {"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater"),
        (QWEN3 | {"num_hidden_layers": 3.5}, "num_hidden_layers: Input should be a valid integer"),
        (QWEN3 | {"num_hidden_layers": 3_000_000}, "num_hidden_layers: Input should be less"),
        (QWEN3 | {"hidden_size": "4096"}, "hidden_size: Input should be a valid integer"),
        (QWEN3 | {"hidden_size": None}, "hidden_size: Input should be a valid integer"),
        (QWEN3 | {"head_dim": None}, "does not take it: Field 'head_dim' expected int, got null (compare it with"),
        (QWEN3 | {"head_dim": 0}, "head_dim: Input should be greater"),
        (QWEN3 | {"head_dim": 7}, "an odd head_dim (7)"),
        (LLAMA | {"head_dim": None, "hidden_size": 32 * 65}, "an odd head_dim (65), "),
        (QWEN2 | {"head_dim": None, "hidden_size": 4097}, "(4097) that is no multiple of num_attention_heads (32)"),
        (QWEN3 | {"vocab_size": -5}, "vocab_size: Input should be greater"),
        (QWEN3 | {"num_key_value_heads": 0}, "num_key_value_heads: Input should be greater"),
        (QWEN3 | {"num_key_value_heads": 5}, "(32) that is no multiple of num_key_value_heads (5) (compare"),
        (
            without("num_key_value_heads") | {"num_attention_heads": 8},
            "num_key_value_heads (32); the file has no num_key_value_heads: that is the family's default",
        ),
        (QWEN3 | {"rms_norm_eps": "x"}, "rms_norm_eps: Input should be a valid number"),
        (QWEN3 | {"torch_dtype": "banana"}, "torch_dtype: Input should be 'float32', 'bfloat16'"),
        (QWEN3 | {"dtype": 5}, "dtype: Input should be 'float32', 'bfloat16'"),
        (QWEN3 | {"max_position_embeddings": "x"}, "max_position_embeddings: Input should be a valid integer"),
        (QWEN3 | {"initializer_range": "x"}, "Field 'initializer_range' expected float, got str (value: 'x')"),
        (QWEN3 | {"rope_theta": "x"}, "rope_theta: Input should be a valid number"),
        (QWEN3 | {"rope_theta": -1}, "rope_theta: Input should be greater than 0"),
        (QWEN3 | {"rope_theta": None}, "whose rope_theta is null"),
        (QWEN3 | {"rope_parameters": {"rope_theta": "x"}}, 'whose rope_theta is "x"'),
        (QWEN3 | {"rope_scaling": {"type": "yarn"}}, "transformers does not take it: Missing required keys"),
        (QWEN3 | {"rope_scaling": {"type": "banana"}}, 'rope_type "banana" (known: default, linear, dynamic,'),
        (QWEN3 | {"rope_parameters": {"rope_type": "banana"}}, 'rope_type "banana"'),
        (rope("banana"), 'rope_type "banana"'),
        (rope(None), "rope_type null"),
        (rope(5), "rope_type 5"),
        (rope(["linear"]), 'rope_type ["linear"]'),
        (rope("linear", factor=-2.0), "whose factor is -2.0, where positive numbers belong"),
        (rope("dynamic", factor=0), "whose factor is 0"),
        (rope("linear", factor="x"), 'whose factor is "x"'),
        (rope("linear", factor=None), "whose factor is null"),
        (rope("linear", factor=True), "whose factor is true"),
        (rope("linear", factor=float("inf")), "whose factor is Infinity"),
        (rope("linear", factor=10**400), "whose factor is 1000"),
        (rope("yarn", attention_factor=-1), "whose attention_factor is -1"),
        (
            rope("llama3", **LLAMA3 | {"original_max_position_embeddings": "x"}),
            'original_max_position_embeddings is "x"',
        ),
        (QWEN3 | {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "of their own for full_attention"),
        (rope("llama3", **LLAMA3 | {"low_freq_factor": 0}), "whose low_freq_factor is 0"),
        (rope("longrope", **LONGROPE | {"long_factor": [1.0] * 63}), "whose long_factor has 63 numbers for the 64"),
        (rope("longrope", **LONGROPE | {"long_factor": [0.0] * 64}), "whose long_factor is [0.0, 0.0"),
        (rope("linear", partial_rotary_factor=0.5), "whose partial_rotary_factor is 0.5"),
        (layers("linear_attention"), "layer_types of linear_attention (known: full_attention, sliding_attention)"),
        (layers("chunked_attention", attention_chunk_size=100), "layer_types of chunked_attention"),
        (layers("banana"), "'banana', 'banana']"),
        (layers("sliding_attention", sliding_window=100), "layer_types of sliding_attention without a sliding_window"),
        (layers("sliding_attention"), "layer_types of sliding_attention without a sliding_window"),
        (
            quantised(quant_method="gptq", bits=4),
            "model.quantization: the model's weights are stored quantised as gptq",
        ),
        (quantised(quant_method="mxfp4"), "stored quantised as mxfp4, planned for is nf4 (give a folder with weights"),
        (quantised(quant_method="bitsandbytes", load_in_4bit=True), "stored quantised as fp4, planned for is nf4"),
        (quantised(quant_method="bitsandbytes", load_in_8bit=True), 'stored quantised as int8, .* (set it to "int8")'),
        (MISTRAL | {"sliding_window": 4096}, "--tokens: the long-context engine, whose memory alone is predicted, "),
        (MISTRAL, "a sliding window of 4,096 tokens"),  # which transformers takes where there is none
        (layers("full_attention", MISTRAL, sliding_window=4096), "a sliding window of 4,096 tokens"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act in config.json: the long-context engine"),
        (QWEN3 | {"attention_dropout": 0.1}, "does not cover attention dropout (0.1) (set it to 0)"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(tmp_path: Path, config: object, expected: str) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    code, out, err = invoke("plan", "--model", tmp_path, "--tokens", "8192")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert all(part in line for part in expected.split(".*"))
    assert "came with the model" not in line
    assert "file has no max_position" not in line


@pytest.mark.parametrize(
    "config",
    [
        rope("linear"),
        rope("dynamic"),
        rope("yarn", attention_factor=None),
        rope("llama3", **LLAMA3),
        rope("longrope", **LONGROPE | {"factor": None}),
        QWEN3 | {"rope_scaling": {"type": "default", "factor": None}},
        QWEN3
        | {"rope_theta": 1_000_000, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "partial_rotary_factor": 1.0},
        QWEN3 | {"head_dim": 128, "hidden_size": 4098},
        layers("full_attention", sliding_window=100),
        quantised(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ],
)
def test_a_model_that_can_be_trained_is_planned(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = invoke("plan", "--model", tmp_path, "--tokens", "8192")
    assert (code, err) == (0, "")
    assert "a branch of 8,192 tokens" in out


def test_a_window_bounds_the_longest_branch_and_keeps_pairs_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 4096}))

    def planned(*settings: str) -> Any:
        config = load_config(Path("configs/qwen3-8b-2x24g.toml").absolute(), settings)
        asked = plan_request(config, tokens=2048, scored=100, shared=1024)
        return plan_memory(config, asked, str(tmp_path))

    report = planned()
    assert report.longest_tokens == 4096
    assert set(report.branch_plan.plans) == {"sequential"}
    with pytest.raises(UserError, match="shared_prefix is not possible: the model attends within a sliding window"):
        planned('simpo.plan="shared_prefix"')


def test_rope_types_are_those_of_transformers() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(ROPE_TYPES)


def test_other_families_are_left_to_transformers() -> None:
    """Gemma 3 has rotary embeddings of their own for each type of layer."""
    assert config_problem(AutoConfig.for_model("gemma3_text")) is None


def test_mistral_attends_within_its_window_whatever_its_layer_types_say() -> None:
    types = ["full_attention"] * N_LAYERS
    config = AutoConfig.for_model("mistral", sliding_window=64, layer_types=types, num_hidden_layers=N_LAYERS)
    assert window_of(config) == 64


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, "none"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}, "nf4"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "fp4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
def test_stored_formats(stored: dict[str, Any] | None, expected: str) -> None:
    assert stored_format(AutoConfig.for_model("qwen3", quantization_config=stored)) == expected
