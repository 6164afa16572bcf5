"""The least time a step can take on this GPU: all matmuls and attention at their measured peaks, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine_common import median
from engine.attention import BACKENDS

BACKWARD_OF_ATTENTION = 2.5  # times the operations of its forward


def _tflops(work: Callable[[], Any], operations: float, repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return operations / median(seconds) / 1e12


def measured_peaks(n_tokens: int = 32768) -> dict[str, float]:
    """TFLOP/s, warm: a large bfloat16 matmul, and attention of Qwen3-8B's heads forward and backward."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = {"matmul": _tflops(lambda: a @ b, 2 * 8192**3, 20)}
    q = torch.randn(n_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(n_tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale, operations = 128**-0.5, 4 * n_tokens**2 * 32 * 128 / 2
    for name in ("cudnn", "flash"):
        forward, backward = BACKENDS[name].forward, BACKENDS[name].backward
        out, lse = forward(q, k, v, scale, True)
        grad = torch.randn_like(out)
        result[f"{name}_forward"] = _tflops(lambda f=forward: f(q, k, v, scale, True), operations, 3)
        result[f"{name}_backward"] = _tflops(
            lambda b=backward, out=out, lse=lse, grad=grad: b(grad, q, k, v, out, lse, scale, True),
            BACKWARD_OF_ATTENTION * operations,
            3,
        )
    return {key: round(value, 1) for key, value in result.items()}


def attention_forward_s(config: dict[str, Any], n_tokens: int, peak_tflops: dict[str, float]) -> float:
    """Seconds of one layer's causal attention at the measured peak."""
    operations = 2 * n_tokens**2 * config["num_attention_heads"] * config["head_dim"]
    return operations / max(peak_tflops["cudnn_forward"], peak_tflops["flash_forward"]) / 1e12


def floor_s(config: dict[str, Any], n_tokens: int, peak_tflops: dict[str, float]) -> float:
    """Seconds of forward + backward at the measured peaks, nothing recomputed, LoRA and elementwise work free."""
    hidden, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    n_layers = config["num_hidden_layers"]
    matmul = 4 * n_tokens * hidden * (2 * query + 2 * key + 3 * mlp) * n_layers / peak_tflops["matmul"] / 1e12
    forward = n_layers * attention_forward_s(config, n_tokens, peak_tflops)
    peaks = [max(peak_tflops[f"{name}_{way}"] for name in ("cudnn", "flash")) for way in ("forward", "backward")]
    return matmul + forward * (1 + BACKWARD_OF_ATTENTION * peaks[0] / peaks[1])
