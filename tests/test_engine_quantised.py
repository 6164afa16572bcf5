"""The walk on NF4 and int8 bases, and in bfloat16, against the same weights dequantised to float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import LINEARS, tiny_model
from torch import nn

from benchmarks import layer_inputs
from benchmarks.engine_correctness import compare, run
from engine import reference
from engine.layers import LongContextScorer
from engine.linears import base_linear, dense_weight
from engine.plan import uniform_plan
from engine.scores import token_logprobs

bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def quantised(kind: str) -> Any:
    """The tiny model in bfloat16, its linears quantised by bitsandbytes on the CPU."""
    model = tiny_model(dtype=torch.bfloat16, rank=4, hidden_size=64, intermediate_size=128, head_dim=16)
    for module in model.modules():
        if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
            continue
        old = module.base_layer
        if kind == "nf4":
            new = bitsandbytes.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
        else:
            new = bitsandbytes.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
            codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(old.weight.data.half())
            new.weight = bitsandbytes.nn.Int8Params(
                codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales
            )
        module.base_layer = new
    return model


def dequantised(model: Any) -> Any:
    """The same function in float32: an oracle for `model`, which it replaces."""
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            weight = dense_weight(module.base_layer).float()
            exact = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            exact.weight = nn.Parameter(weight, requires_grad=False)
            module.base_layer = exact
    return model.float()


@pytest.mark.parametrize("kind", ["nf4", "int8", "bf16"])
def test_walk_on_a_quantised_base(kind: str) -> None:
    """Near the oracle, and nearer to it once it is led through the walk's layer inputs: backward itself adds little."""
    model = quantised(kind) if kind != "bf16" else tiny_model(dtype=torch.bfloat16, rank=4)
    ids_BT = torch.randint(0, 89, (1, 40), generator=torch.Generator().manual_seed(1))
    batch = ids_BT, torch.ones_like(ids_BT), torch.zeros(20, dtype=torch.long), torch.arange(20, 40)
    plan = uniform_plan("attention_offload", 3, tile_tokens=16, head_groups=2)
    with layer_inputs.of_walk() as inputs:
        got = run(model, LongContextScorer(lambda _: plan), batch)
    exact = dequantised(model)
    error = compare(got, run(exact, reference.token_logprobs, batch))
    with layer_inputs.led_through(exact, inputs):
        error_at_inputs = compare(got, run(exact, token_logprobs, batch))
    assert error["score_mean_residual"] < 0.05  # 0.008 to 0.017 seen
    assert error["gradient_cosine"] > 0.999  # 0.9994 to 0.9998 seen
    assert error_at_inputs["score_mean_residual"] < 0.02  # 0.002 to 0.006 seen
    assert error_at_inputs["gradient_cosine"] > 0.9998  # 0.99990 to 0.99993 seen


def test_oracle_led_through_its_own_layer_inputs_is_itself() -> None:
    model = tiny_model(rank=4)
    ids_BT = torch.randint(0, 89, (1, 40), generator=torch.Generator().manual_seed(1))
    batch = ids_BT, torch.ones_like(ids_BT), torch.zeros(20, dtype=torch.long), torch.arange(20, 40)
    with layer_inputs.of_modules(model) as inputs:
        want = run(model, token_logprobs, batch)
    with layer_inputs.led_through(model, inputs):
        itself = compare(run(model, token_logprobs, batch), want)
    with layer_inputs.led_through(model, [1.1 * input_TD for input_TD in inputs]):
        other = compare(run(model, token_logprobs, batch), want)
    assert itself["gradient_relative_error"] < 1e-6
    assert itself["score_max_residual"] < 1e-6
    assert other["score_max_residual"] > 1e-3


def test_int8_is_codes_times_scales() -> None:
    """Dequantised int8 is within half a step of the weight it came from."""
    plain = tiny_model(dtype=torch.bfloat16, rank=4, hidden_size=64, intermediate_size=128, head_dim=16)
    packed = quantised("int8")
    for name in LINEARS[:4]:
        weight = base_linear(getattr(plain.get_base_model().model.layers[0].self_attn, name)).weight.float()
        linear = base_linear(getattr(packed.get_base_model().model.layers[0].self_attn, name))
        step_O1 = weight.abs().amax(1, keepdim=True) / 127
        assert ((dense_weight(linear) - weight).abs() <= 0.51 * step_O1 + 1e-6).all()
