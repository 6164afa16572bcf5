"""Elementwise pieces of a decoder layer, forward and backward: Triton on a GPU, plain PyTorch elsewhere.

Shapes: N tokens of a tile, T tokens, D features, F MLP size, W row width of a packed buffer, E head size, J = E / 2,
S heads of one group (its query heads, then its key heads, then its value heads).

Every function takes row-strided views (last dimension contiguous), computes inside in float32 (float64 for float64
input) and rounds once, on the way out. RMSNorm: Zhang & Sennrich 2019; RoPE (half-rotated): Su et al. 2021;
SwiGLU: Shazeer 2020.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the precision its arithmetic is done in."""
    return x if x.dtype == torch.float64 else x.float()


@dataclasses.dataclass(frozen=True)
class GroupColumns:
    """Where one group of heads lies in a row of the packed q|k|v buffer."""

    head_size: int
    query_heads: int
    key_heads: int
    query_column: int
    key_column: int
    value_column: int

    @property
    def heads(self) -> int:
        return self.query_heads + 2 * self.key_heads


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor) -> None:
    """out = x / rms(x) * weight."""
    if x_ND.is_cuda:
        from engine import kernels_triton

        return kernels_triton.rms_norm(x_ND, weight_D, eps, out_ND)
    x = wide(x_ND)
    out_ND.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D)
    return None


def _rms_norm_grad(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit, weighted = x * scale, grad * weight
    return scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))


def rms_norm_backward_add(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, eps: float, residual_grad_ND: Tensor
) -> None:
    """residual_grad += d(rms_norm)/dx applied to grad."""
    if x_ND.is_cuda:
        from engine import kernels_triton

        return kernels_triton.rms_norm_backward_add(grad_ND, x_ND, weight_D, eps, residual_grad_ND)
    grad_x = _rms_norm_grad(wide(grad_ND), wide(x_ND), wide(weight_D), eps)
    residual_grad_ND.copy_(wide(residual_grad_ND) + grad_x)
    return None


def _rotate(x: Tensor, cos_TJ: Tensor, sin_TJ: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_TJ[:, None], sin_TJ[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _head_slices(columns: GroupColumns, packed_TW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = columns.head_size
    starts = (columns.query_column, columns.key_column, columns.value_column)
    counts = (columns.query_heads, columns.key_heads, columns.key_heads)
    q, k, v = (
        packed_TW[:, start : start + n * size].unflatten(1, (n, size)) for start, n in zip(starts, counts, strict=True)
    )
    return q, k, v


def norm_rope(
    packed_TW: Tensor,
    columns: GroupColumns,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_TJ: Tensor,
    sin_TJ: Tensor,
    out_TSE: Tensor,
) -> None:
    """One group's q, k, v out of raw projections: per-head RMSNorm (when the model has it) and RoPE on q and k."""
    if packed_TW.is_cuda:
        from engine import kernels_triton

        return kernels_triton.norm_rope(packed_TW, columns, norms, eps, cos_TJ, sin_TJ, out_TSE)
    q, k, v = _head_slices(columns, packed_TW)
    split = columns.query_heads
    for index, raw, out in ((0, q, out_TSE[:, :split]), (1, k, out_TSE[:, split : split + columns.key_heads])):
        x = wide(raw)
        if norms is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norms[index]
        out.copy_(_rotate(x, cos_TJ, sin_TJ))
    out_TSE[:, split + columns.key_heads :].copy_(v)
    return None


def norm_rope_backward(
    packed_TW: Tensor,
    columns: GroupColumns,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_TJ: Tensor,
    sin_TJ: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Overwrite one group's raw q, k, v by their gradients, given those after RoPE ([T, heads, E] each)."""
    if packed_TW.is_cuda:
        from engine import kernels_triton

        return kernels_triton.norm_rope_backward(packed_TW, columns, norms, eps, cos_TJ, sin_TJ, grads)
    q, k, v = _head_slices(columns, packed_TW)
    for index, raw in ((0, q), (1, k)):
        grad = _rotate(wide(grads[index]), cos_TJ, -sin_TJ)
        if norms is not None:
            grad = _rms_norm_grad(grad, wide(raw), wide(norms[index]), eps)
        raw.copy_(grad)
    v.copy_(grads[2])
    return None


def swiglu(gate_up_NW: Tensor, out_NF: Tensor) -> None:
    """out = silu(gate) * up, with gate in the first F columns and up in the next F."""
    if gate_up_NW.is_cuda:
        from engine import kernels_triton

        return kernels_triton.swiglu(gate_up_NW, out_NF)
    size = out_NF.shape[1]
    gate, up = wide(gate_up_NW[:, :size]), wide(gate_up_NW[:, size : 2 * size])
    out_NF.copy_(torch.nn.functional.silu(gate) * up)
    return None


def swiglu_backward(gate_up_NW: Tensor, grad_NF: Tensor) -> None:
    """In place: gate and up become their gradients, grad_NF becomes the forward output silu(gate) * up."""
    if gate_up_NW.is_cuda:
        from engine import kernels_triton

        return kernels_triton.swiglu_backward(gate_up_NW, grad_NF)
    size = grad_NF.shape[1]
    gate, up, grad = wide(gate_up_NW[:, :size]), wide(gate_up_NW[:, size : 2 * size]), wide(grad_NF)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate, grad_up, output = grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu, silu * up
    gate_up_NW[:, :size].copy_(grad_gate)
    gate_up_NW[:, size : 2 * size].copy_(grad_up)
    grad_NF.copy_(output)
    return None
