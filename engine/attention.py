"""Attention of some queries over some keys as two functions, forward and backward, so that nothing else is kept alive.

Shapes: T queries, M keys, H query heads, K key-value heads (H a multiple of K), G = H / K, E head size; in the plain
version R query rows of a block, N = G * R rows of scores for a key head. Tensors may be strided views with a contiguous
last dimension; gradients come back as [T or M, heads, E].

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

from engine.attention_memory import math_rows
from schemas.errors import StageError


class AttentionBackend(NamedTuple):
    """A named pair of forward and backward (contracts above)."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]


def _heads_first(x_THE: Tensor) -> Tensor:
    return x_THE.transpose(0, 1)[None]


def _tokens_first(x_1HTE: Tensor) -> Tensor:
    return x_1HTE[0].transpose(0, 1)


def _block(x_THE: Tensor, rows: slice, n_key_heads: int) -> Tensor:
    """x_KNE [K, G * R, E]: R rows of the heads that share a key head, under one another, so that keys and values
    are not repeated and the products that give dk and dv also sum over these heads.
    """
    return x_THE[rows].unflatten(1, (n_key_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _put_block(out_THE: Tensor, rows: slice, block_KNE: Tensor) -> None:
    """The way back of `_block`."""
    target_RKGE = out_THE[rows].unflatten(1, (block_KNE.shape[0], -1))
    target_RKGE.copy_(block_KNE.unflatten(1, (-1, target_RKGE.shape[0])).permute(2, 0, 1, 3))


def _scores(scaled_q_KNE: Tensor, k_MKE: Tensor, rows: slice, causal: bool) -> Tensor:
    """scores_KNM over all keys; causal: over those up to the last row."""
    n_rows = rows.stop - rows.start
    keys = slice(rows.stop if causal else None)
    scores_KNM = scaled_q_KNE @ k_MKE[keys].permute(1, 2, 0)
    if causal:
        future_RR = torch.ones(n_rows, n_rows, dtype=torch.bool, device=k_MKE.device).triu_(1)
        scores_KNM.unflatten(1, (-1, n_rows))[..., rows].masked_fill_(future_RR, -torch.inf)
    return scores_KNM.to(torch.promote_types(scores_KNM.dtype, torch.float32))


def _row_blocks(q_THE: Tensor, k_MKE: Tensor) -> list[slice]:
    n_rows, n_heads, _ = q_THE.shape
    step = math_rows(n_heads, k_MKE.shape[0], max(q_THE.itemsize, 4))
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def _math_forward(q_THE: Tensor, k_MKE: Tensor, v_MKE: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One block of scores alive (`engine.attention_memory.math_workspace_bytes`)."""
    n_tokens, n_heads, _ = q_THE.shape
    v_KME = v_MKE.transpose(0, 1)
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    lse_HT = torch.empty(n_heads, n_tokens, dtype=torch.promote_types(q_THE.dtype, torch.float32), device=q_THE.device)
    for rows in _row_blocks(q_THE, k_MKE):
        weights_KNM = _scores(_block(q_THE, rows, k_MKE.shape[1]) * scale, k_MKE, rows, causal)
        most_KN1 = weights_KNM.amax(-1, keepdim=True)
        weights_KNM.sub_(most_KN1).exp_()
        sum_KN1 = weights_KNM.sum(-1, keepdim=True)
        out_KNE = weights_KNM.to(q_THE.dtype) @ v_KME[:, : weights_KNM.shape[2]]
        _put_block(out_THE, rows, out_KNE / sum_KN1)
        lse_HT[:, rows] = (most_KN1 + sum_KN1.log()).view(n_heads, -1)
        del weights_KNM  # or the next block would be made beside this one
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
    """Dao et al. 2022, algorithm 4, by blocks of query rows; two blocks of scores alive."""
    n_key_heads = k_MKE.shape[1]
    k_KME, v_KME = k_MKE.transpose(0, 1), v_MKE.transpose(0, 1)
    grad_q_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    grad_k_KME, grad_v_KME = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k_KME, v_KME))
    for rows in _row_blocks(q_THE, k_MKE):
        q_KNE, grad_KNE = _block(q_THE, rows, n_key_heads) * scale, _block(grad_out_THE, rows, n_key_heads)
        delta_KN1 = (grad_KNE * _block(out_THE, rows, n_key_heads)).sum(-1, keepdim=True)
        scores_KNM = _scores(q_KNE, k_MKE, rows, causal)
        weights_KNM = scores_KNM.sub_(lse_HT[:, rows].reshape(n_key_heads, -1, 1)).exp_().to(q_THE.dtype)
        keys = slice(weights_KNM.shape[2])
        grad_v_KME[:, keys].baddbmm_(weights_KNM.transpose(1, 2), grad_KNE)
        grad_scores_KNM = (grad_KNE @ v_KME[:, keys].transpose(1, 2)).sub_(delta_KN1).mul_(weights_KNM)
        grad_k_KME[:, keys].baddbmm_(grad_scores_KNM.transpose(1, 2), q_KNE)
        _put_block(grad_q_THE, rows, (grad_scores_KNM @ k_KME[:, keys]).mul_(scale))
        del scores_KNM, weights_KNM, grad_scores_KNM  # as in forward
    return grad_q_THE, grad_k_KME.transpose(0, 1), grad_v_KME.transpose(0, 1)


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
