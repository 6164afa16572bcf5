"""Attention of some queries over some keys as two functions, forward and backward, so that nothing else is kept alive.

Shapes: T queries, M keys, H query heads, K key-value heads (H a multiple of K), E head size. Tensors may be strided
views with a contiguous last dimension; gradients come back as [T or M, heads, E].

forward(q_THE, k_MKE, v_MKE, scale, causal) -> (out_THE, lse_HT): lse is the log-sum-exp of the scaled scores, float32
(float64 for float64). backward(grad_out_THE, q, k, v, out, lse, scale, causal) -> (grad_q_THE, grad_k_MKE, grad_v_MKE).
Causal wants as many keys as queries. Backward may be given an out and a (contiguous) lse over more keys than the ones
it is given: it then returns these keys' part of the gradients (`engine.block_attention`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from schemas.errors import StageError

_MATH_ROWS = 512  # query rows whose scores are alive at once in the plain version


class AttentionBackend(NamedTuple):
    """A named pair of forward and backward (contracts above)."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]


def _heads_first(x_THE: Tensor) -> Tensor:
    return x_THE.transpose(0, 1)[None]


def _tokens_first(x_1HTE: Tensor) -> Tensor:
    return x_1HTE[0].transpose(0, 1)


def _repeat(x_MKE: Tensor, n_query_heads: int) -> Tensor:
    return x_MKE.repeat_interleave(n_query_heads // x_MKE.shape[1], 1).transpose(0, 1)


def _masked_scores(q_HRE: Tensor, k_HME: Tensor, first_row: int, scale: float, causal: bool) -> Tensor:
    scores_HRM = q_HRE @ k_HME.transpose(1, 2) * scale
    if not causal:
        return scores_HRM
    rows = torch.arange(first_row, first_row + q_HRE.shape[1], device=q_HRE.device)
    future_RM = torch.arange(k_HME.shape[1], device=q_HRE.device)[None] > rows[:, None]
    return scores_HRM.masked_fill(future_RM, -torch.inf)


def _math_forward(q_THE: Tensor, k_MKE: Tensor, v_MKE: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    n_tokens, n_heads, _ = q_THE.shape
    k_HME, v_HME = _repeat(k_MKE, n_heads), _repeat(v_MKE, n_heads)
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    lse_HT = torch.empty(n_heads, n_tokens, dtype=torch.promote_types(q_THE.dtype, torch.float32), device=q_THE.device)
    for start in range(0, n_tokens, _MATH_ROWS):
        rows = slice(start, start + _MATH_ROWS)
        scores_HRM = _masked_scores(q_THE[rows].transpose(0, 1), k_HME, start, scale, causal).to(lse_HT.dtype)
        lse_HT[:, rows] = scores_HRM.logsumexp(-1)
        weights_HRM = (scores_HRM - lse_HT[:, rows, None]).exp().to(q_THE.dtype)
        out_THE[rows] = (weights_HRM @ v_HME).transpose(0, 1)
    return out_THE, lse_HT


def _math_backward(
    grad_out_THE: Tensor,
    q_THE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, algorithm 4, by blocks of query rows."""
    n_tokens, n_heads, _ = q_THE.shape
    k_HME, v_HME = _repeat(k_MKE, n_heads), _repeat(v_MKE, n_heads)
    grad_q_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    grad_k_HME, grad_v_HME = torch.zeros_like(k_HME), torch.zeros_like(v_HME)
    for start in range(0, n_tokens, _MATH_ROWS):
        rows = slice(start, start + _MATH_ROWS)
        q_HRE, grad_HRE = q_THE[rows].transpose(0, 1), grad_out_THE[rows].transpose(0, 1)
        scores_HRM = _masked_scores(q_HRE, k_HME, start, scale, causal).to(lse_HT.dtype)
        weights_HRM = (scores_HRM - lse_HT[:, rows, None]).exp().to(q_THE.dtype)
        delta_HR1 = (grad_HRE * out_THE[rows].transpose(0, 1)).sum(-1, keepdim=True)
        grad_scores_HRM = weights_HRM * (grad_HRE @ v_HME.transpose(1, 2) - delta_HR1) * scale
        grad_q_THE[rows] = (grad_scores_HRM @ k_HME).transpose(0, 1)
        grad_k_HME += grad_scores_HRM.transpose(1, 2) @ q_HRE
        grad_v_HME += weights_HRM.transpose(1, 2) @ grad_HRE
    n_key_heads = k_MKE.shape[1]
    grad_k_MKE, grad_v_MKE = (
        grad.unflatten(0, (n_key_heads, -1)).sum(1).transpose(0, 1) for grad in (grad_k_HME, grad_v_HME)
    )
    return grad_q_THE, grad_k_MKE, grad_v_MKE


def _cudnn_forward(q_THE: Tensor, k_MKE: Tensor, v_MKE: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _heads_first(q_THE), _heads_first(k_MKE), _heads_first(v_MKE), None, True, 0.0, causal, False, scale=scale
    )
    return _tokens_first(out), lse.view(q_THE.shape[1], q_THE.shape[0])


def _cudnn_backward(
    grad_out_THE: Tensor,
    q_THE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(1, dtype=torch.int64, device=q_THE.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _heads_first(grad_out_THE), _heads_first(q_THE), _heads_first(k_MKE), _heads_first(v_MKE),
        _heads_first(out_THE), lse_HT[None, :, :, None], no_dropout, no_dropout, None, None, None,
        q_THE.shape[0], k_MKE.shape[0], 0.0, causal, scale=scale,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (_tokens_first(grad) for grad in grads)
    return grad_q, grad_k, grad_v


def _flash_forward(q_THE: Tensor, k_MKE: Tensor, v_MKE: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        _heads_first(q_THE), _heads_first(k_MKE), _heads_first(v_MKE), 0.0, causal, False, scale=scale
    )
    return _tokens_first(out), lse[0]


def _flash_backward(
    grad_out_THE: Tensor,
    q_THE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _heads_first(grad_out_THE), _heads_first(q_THE), _heads_first(k_MKE), _heads_first(v_MKE),
        _heads_first(out_THE), lse_HT[None], None, None, q_THE.shape[0], k_MKE.shape[0], 0.0, causal,
        no_dropout, no_dropout[:0], scale=scale,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (_tokens_first(grad) for grad in grads)
    return grad_q, grad_k, grad_v


def _flash_attn_forward(
    q_THE: Tensor, k_MKE: Tensor, v_MKE: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward  # type: ignore[import-not-found]

    out, lse, *_ = forward(
        q_THE[None], k_MKE[None], v_MKE[None], 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1,
        softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out[0], lse[0]


def _flash_attn_backward(
    grad_out_THE: Tensor,
    q_THE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward  # type: ignore[import-not-found]

    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THE, k_MKE, v_MKE))
    backward(
        grad_out_THE[None], q_THE[None], k_MKE[None], v_MKE[None], out_THE[None], lse_HT[None].contiguous(),
        grad_q[None], grad_k[None], grad_v[None], 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1,
        softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


BACKENDS = {
    "math": AttentionBackend("math", _math_forward, _math_backward),
    "cudnn": AttentionBackend("cudnn", _cudnn_forward, _cudnn_backward),
    "flash": AttentionBackend("flash", _flash_forward, _flash_backward),
    "flash_attn": AttentionBackend("flash_attn", _flash_attn_forward, _flash_attn_backward),
}


def _probe_s(backend: AttentionBackend, n_tokens: int, heads: tuple[int, int], head_size: int) -> float:
    """Seconds of one warm forward + backward on random bfloat16 data, or infinity when the backend refuses.

    Raises:
        torch.OutOfMemoryError: which says nothing of the backend.
    """
    shapes = [(n_tokens, n, head_size) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    seconds = math.inf
    try:
        for _ in range(2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            out, lse = backend.forward(q, k, v, head_size**-0.5, True)
            backend.backward(out, q, k, v, out, lse, head_size**-0.5, True)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ImportError):
        return math.inf
    return seconds


def _fused_names() -> list[str]:
    """Backends to probe. Where kernels are to add in a fixed order it is one, whatever the clock says: PyTorch's flash,
    which has such a backward. cuDNN's has none (PyTorch leaves it out of its own choice then, but does not ask about an
    operator that is called by name).
    """
    if torch.are_deterministic_algorithms_enabled():
        return ["flash"]
    return ["cudnn", "flash"] + (["flash_attn"] if importlib.util.find_spec("flash_attn") else [])


def probe_backends(
    device: torch.device, dtype: torch.dtype, *, n_tokens: int, n_heads: int, n_key_heads: int, head_size: int
) -> dict[str, float]:
    """Seconds that each fused backend takes here, forward + backward, at most 16,384 tokens; infinite where it refuses.

    Empty off the GPU, and for float32 and float64: the fused kernels take 16-bit input only.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return {}
    length = min(n_tokens, 16_384)
    return {name: _probe_s(BACKENDS[name], length, (n_heads, n_key_heads), head_size) for name in _fused_names()}


def fastest(seconds: Mapping[str, float]) -> AttentionBackend:
    """The backend that took least; the plain one where there was none to time.

    Raises:
        StageError: all refused. The plain one would take their place at a tiny part of their speed.
    """
    if not seconds:
        return BACKENDS["math"]
    best = min(seconds, key=lambda name: seconds[name])
    if math.isinf(seconds[best]):
        raise StageError(f"no fused attention kernel runs on this GPU (tried {', '.join(sorted(seconds))})")
    return BACKENDS[best]
