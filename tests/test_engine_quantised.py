"""The walk on NF4 and int8 bases, and in bfloat16, against the same weights dequantised to float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import LINEARS, lora_gradients, tiny_model
from torch import nn

from engine import reference
from engine.layers import LongContextScorer
from engine.linears import base_linear, dense_weight
from engine.plan import uniform_plan

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
    model = quantised(kind) if kind != "bf16" else tiny_model(dtype=torch.bfloat16, rank=4)
    ids_BT = torch.randint(0, 89, (1, 40), generator=torch.Generator().manual_seed(1))
    batch = ids_BT, torch.ones_like(ids_BT), torch.zeros(20, dtype=torch.long), torch.arange(20, 40)
    plan = uniform_plan("attention_offload", 3, tile_tokens=16, head_groups=2)
    got_P = LongContextScorer(lambda _: plan)(model, *batch)
    got_P.mean().backward()
    got = lora_gradients(model)
    want_P = reference.token_logprobs(dequantised(model), *batch)
    want_P.mean().backward()
    want = lora_gradients(model)
    mine, true = (torch.cat([grads[name].flatten().double() for name in want]) for grads in (got, want))
    cosine = float(mine @ true / (mine.norm() * true.norm()))
    assert float((got_P - want_P).detach().abs().mean()) < 0.2
    assert cosine > 0.99, cosine


def test_int8_is_codes_times_scales() -> None:
    """Dequantised int8 is within half a step of the weight it came from."""
    plain = tiny_model(dtype=torch.bfloat16, rank=4, hidden_size=64, intermediate_size=128, head_dim=16)
    packed = quantised("int8")
    for name in LINEARS[:4]:
        weight = base_linear(getattr(plain.get_base_model().model.layers[0].self_attn, name)).weight.float()
        linear = base_linear(getattr(packed.get_base_model().model.layers[0].self_attn, name))
        step_O1 = weight.abs().amax(1, keepdim=True) / 127
        assert ((dense_weight(linear) - weight).abs() <= 0.51 * step_O1 + 1e-6).all()
