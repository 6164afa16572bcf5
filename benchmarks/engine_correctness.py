"""Error of the long-context engine on a GPU against a float32 oracle, beside plain bfloat16's own error.

    python -m benchmarks.engine_correctness OUT.jsonl --tokens 4096

1. every attention backend against plain attention in float64;
2. a small float32 model: the whole walk, with its GPU kernels, against the oracle;
3. Qwen3-8B's shape on NF4: scores and LoRA gradients of the engine, and of transformers + peft in bfloat16, both
   against the same weights dequantised to float32, and against those led through the layer inputs of either one.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import layer_inputs
from benchmarks.engine_common import append_result, config_dict, machine, random_branch, random_nf4_model, with_lora
from engine import reference
from engine.attention import BACKENDS
from engine.layers import LongContextScorer
from engine.linears import dense_weight
from engine.plan import POLICIES, LayerPlan, MemoryPlan, uniform_plan
from engine.scores import Scorer, token_logprobs


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def attention_errors(n_tokens: int = 1000) -> dict[str, list[float]]:
    """Relative errors of output, dq, dk, dv per backend, from bfloat16 inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n_tokens, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    grad = torch.randn_like(q)
    exact_grad, *exact = (x.double() for x in (grad, q, k, v))
    out, lse = BACKENDS["math"].forward(exact[0], exact[1], exact[2], 128**-0.5, True)
    want = [out, *BACKENDS["math"].backward(exact_grad, exact[0], exact[1], exact[2], out, lse, 128**-0.5, True)]
    errors = {}
    for name in ("cudnn", "flash"):
        out, lse = BACKENDS[name].forward(q, k, v, 128**-0.5, True)
        got = [out, *BACKENDS[name].backward(grad, q, k, v, out, lse, 128**-0.5, True)]
        errors[name] = [round(relative_error(a, b), 6) for a, b in zip(got, want, strict=True)]
    return errors


def run(model: Any, scorer: Scorer, branch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores and LoRA gradients of their mean."""
    logp_P = scorer(model, *branch)
    logp_P.mean().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grads[name], parameter.grad = parameter.grad.float(), None
    return logp_P.detach().float(), grads


def compare(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """Residuals of the scores (nats), cosine and relative error of the gradient, and the worst tensor's cosine."""
    residual_P = (got[0] - want[0]).abs()
    mine, true = (torch.cat([grads[name].flatten() for name in want[1]]).double() for grads in (got[1], want[1]))
    cosines = [
        float(torch.nn.functional.cosine_similarity(got[1][n].flatten().double(), g.flatten().double(), dim=0))
        for n, g in want[1].items()
    ]
    return {
        "score_max_residual": float(residual_P.max()),
        "score_mean_residual": float(residual_P.mean()),
        "score_of_branch_residual": float((got[0].mean() - want[0].mean()).abs()),
        "gradient_cosine": float(mine @ true / (mine.norm() * true.norm())),
        "gradient_relative_error": float((mine - true).norm() / true.norm()),
        "gradient_norm_ratio": float(mine.norm() / true.norm()),
        "worst_tensor_cosine": min(cosines),
    }


def to_float32(model: Any) -> None:
    """Replace quantised linears by their dequantised float32 selves, and everything else by float32."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(module, "lora_A"):
            weight = dense_weight(base).float()
            exact = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            exact.weight = nn.Parameter(weight, requires_grad=False)
            module.base_layer = exact
    model.float()


def walk_scorer(n_layers: int, tile: int, groups: int) -> LongContextScorer:
    plan = uniform_plan("attention_offload", n_layers, tile_tokens=tile, head_groups=groups)
    return LongContextScorer(lambda _: plan)


def small_model_error() -> dict[str, float]:
    """Float32 all through: kernels, offload and streams of the GPU path against the oracle."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5, "vocab_size": 97}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kind: Any = AutoConfig
    model = with_lora(AutoModelForCausalLM.from_config(kind.for_model(**(config_dict() | sizes))), 4).cuda()
    branch = random_branch(301, 64, 97, 0, "cuda")
    want = run(model, reference.token_logprobs, branch)
    full = LayerPlan(input="host", attention="host", mid="host", qkv="host", gate_up="host")
    layers = (full, LayerPlan(), LayerPlan(mid="host", gate_up="device"), full, LayerPlan(qkv="host"))
    plans = {name: uniform_plan(name, 5, tile_tokens=64, head_groups=2) for name in POLICIES}  # type: ignore[arg-type]
    plans["everything on the host"] = MemoryPlan(policy="auto", layers=(full,) * 5, tile_tokens=64, head_groups=2)
    plans["mixed, restored"] = MemoryPlan(policy="auto", layers=layers, tile_tokens=64, head_groups=1)
    for name, staged in (("all of it staged", (full,) * 5), ("mixed, restored and staged", layers)):
        plans[name] = MemoryPlan(policy="auto", layers=staged, tile_tokens=64, head_groups=2, staged_qkv=True)
    for name in ("everything on the host", "mixed, restored"):
        plans[f"{name}, five buffers"] = plans[name].model_copy(update={"tile_buffers": 5})
    errors = {}
    for name, plan in plans.items():
        scorer = LongContextScorer(lambda _, plan=plan: plan)
        for _ in range(3):  # a race would not strike every time
            found = compare(run(model, scorer, branch), want)
            error = max(found["gradient_relative_error"], found["score_max_residual"])
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--small-only", action="store_true")
    parser.add_argument("--residual-std", type=float, default=0.02, help="standard deviation of o_proj and down_proj")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    append_result(arguments.out, {"what": "machine", **machine(arguments.commit)})
    append_result(arguments.out, {"what": "attention_errors", **attention_errors()})
    errors = small_model_error()
    append_result(arguments.out, {"what": "small_float32_model", "errors": errors})
    if max(errors.values()) > 1e-4:
        raise SystemExit("the walk differs from the oracle in float32")
    if arguments.small_only:
        return
    config = config_dict(arguments.layers)
    model = random_nf4_model(config, residual_std=arguments.residual_std)
    branch = random_branch(arguments.tokens, arguments.scored, config["vocab_size"], 0, "cuda")
    with layer_inputs.of_walk() as walk_inputs:
        walked = run(model, walk_scorer(arguments.layers, 1024, 4), branch)
    with layer_inputs.of_modules(model) as plain_inputs:
        plain = run(model, token_logprobs, branch)
    to_float32(model)
    gc.collect()
    want = run(model, token_logprobs, branch)
    with layer_inputs.led_through(model, walk_inputs):
        want_at_walk = run(model, token_logprobs, branch)
    with layer_inputs.led_through(model, plain_inputs):
        want_at_plain = run(model, token_logprobs, branch)
    facts = {"tokens": arguments.tokens, "scored": int(branch[3].numel()), "layers": arguments.layers}
    facts |= {"residual_std": arguments.residual_std}
    for what, got, exact in (
        ("engine_vs_float32", walked, want),
        ("plain_bfloat16_vs_float32", plain, want),
        ("engine_vs_float32_through_its_layer_inputs", walked, want_at_walk),
        ("plain_bfloat16_vs_float32_through_its_layer_inputs", plain, want_at_plain),
        ("float32_through_layer_inputs_of_engine_vs_float32", want_at_walk, want),
        ("engine_vs_plain_bfloat16", walked, plain),
    ):
        append_result(arguments.out, {"what": what, **facts, **compare(got, exact)})


if __name__ == "__main__":
    main()
