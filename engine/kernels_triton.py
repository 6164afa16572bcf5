# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
"""The Triton half of `engine.kernels` (same functions, same contracts). Imported only when tensors are on a GPU.

Row offsets are 64-bit: the packed q|k|v buffer of 384K tokens has more than 2^31 elements.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from engine.kernels import GroupColumns

_ROPE_TOKENS = 32
_MLP_COLUMNS = 2048


@triton.jit
def _rms_norm_kernel(x, weight, out, x_stride, out_stride, eps, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    grad, x, weight, residual, grad_stride, x_stride, residual_stride, eps, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weighted = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    weighted *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    target = residual + row * residual_stride + column
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    unit = value * scale
    total += scale * (weighted - unit * (tl.sum(weighted * unit, 0) / size))
    tl.store(target, total.to(residual.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_kernel(
    packed, q_norm, k_norm, cos, sin, out, packed_stride, n_tokens, eps, q_column, k_column, v_column,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.program_id(1)
    lane = tl.arange(0, HALF)
    inside = (token < n_tokens)[:, None]
    is_query, is_value = slot < Q_HEADS, slot >= Q_HEADS + K_HEADS
    column = tl.where(is_query, q_column + slot * 2 * HALF, k_column + (slot - Q_HEADS) * 2 * HALF)
    column = tl.where(is_value, v_column + (slot - Q_HEADS - K_HEADS) * 2 * HALF, column)
    source = packed + token[:, None] * packed_stride + column + lane[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if not is_value:
        if NORMED:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
            if is_query:
                first *= scale * tl.load(q_norm + lane).to(tl.float32)[None, :]
                second *= scale * tl.load(q_norm + HALF + lane).to(tl.float32)[None, :]
            else:
                first *= scale * tl.load(k_norm + lane).to(tl.float32)[None, :]
                second *= scale * tl.load(k_norm + HALF + lane).to(tl.float32)[None, :]
        angle = token[:, None] * HALF + lane[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    target = out + (token[:, None] * (Q_HEADS + 2 * K_HEADS) + slot) * 2 * HALF + lane[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_backward_kernel(
    packed, q_norm, k_norm, cos, sin, grad_q, grad_k, grad_v, packed_stride, n_tokens, eps,
    q_column, k_column, v_column, q_token, q_head, k_token, k_head, v_token, v_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.program_id(1)
    lane = tl.arange(0, HALF)
    inside = (token < n_tokens)[:, None]
    is_query, is_value = slot < Q_HEADS, slot >= Q_HEADS + K_HEADS
    if is_query:
        source = grad_q + token[:, None] * q_token + slot * q_head + lane[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        column = q_column + slot * 2 * HALF
    elif is_value:
        source_v = grad_v + token[:, None] * v_token + (slot - Q_HEADS - K_HEADS) * v_head + lane[None, :]
        first = tl.load(source_v, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source_v + HALF, mask=inside, other=0.0).to(tl.float32)
        column = v_column + (slot - Q_HEADS - K_HEADS) * 2 * HALF
    else:
        source_k = grad_k + token[:, None] * k_token + (slot - Q_HEADS) * k_head + lane[None, :]
        first = tl.load(source_k, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source_k + HALF, mask=inside, other=0.0).to(tl.float32)
        column = k_column + (slot - Q_HEADS) * 2 * HALF
    target = packed + token[:, None] * packed_stride + column + lane[None, :]
    if not is_value:
        angle = token[:, None] * HALF + lane[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        first, second = first * c + second * s, second * c - first * s
        if NORMED:
            if is_query:
                first *= tl.load(q_norm + lane).to(tl.float32)[None, :]
                second *= tl.load(q_norm + HALF + lane).to(tl.float32)[None, :]
            else:
                first *= tl.load(k_norm + lane).to(tl.float32)[None, :]
                second *= tl.load(k_norm + HALF + lane).to(tl.float32)[None, :]
            raw_first = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            raw_second = tl.load(target + HALF, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(raw_first * raw_first, 1) + tl.sum(raw_second * raw_second, 1)
            scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
            raw_first *= scale
            raw_second *= scale
            mean = ((tl.sum(first * raw_first, 1) + tl.sum(second * raw_second, 1)) / (2 * HALF))[:, None]
            first = scale * (first - raw_first * mean)
            second = scale * (second - raw_second * mean)
    tl.store(target, first.to(packed.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(packed.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(gate_up, out, gate_up_stride, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad, gate_up_stride, grad_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = gate_up + row * gate_up_stride + column
    target = grad + row * grad_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(target, (silu * up).to(grad.dtype.element_ty), mask=inside)
    tl.store(source + size, (g * silu).to(gate_up.dtype.element_ty), mask=inside)
    grad_gate = g * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(source, grad_gate.to(gate_up.dtype.element_ty), mask=inside)


@triton.jit
def _dequantise_4bit_kernel(codes, table, scales, out, out_stride, row_bytes, block_size, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = column < row_bytes
    packed = tl.load(codes + row * row_bytes + column, mask=inside, other=0)
    scale = tl.load(scales + (row * row_bytes + column) * 2 // block_size, mask=inside, other=0.0)
    high = tl.load(table + (packed >> 4).to(tl.int32)) * scale
    low = tl.load(table + (packed & 15).to(tl.int32)) * scale
    lanes = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    values = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + lanes, values, mask=lanes < 2 * row_bytes)


def dequantise_4bit(codes: Tensor, table_16: Tensor, scales: Tensor, block_size: int, out_OI: Tensor) -> None:
    """out = table[code] * scale of its block, from two codes a byte (high nibble first), into a row-strided view."""
    n_rows, n_columns = out_OI.shape
    row_bytes = n_columns // 2
    _dequantise_4bit_kernel[(n_rows, triton.cdiv(row_bytes, 1024))](
        codes, table_16, scales, out_OI, out_OI.stride(0), row_bytes, block_size, BYTES=1024, num_warps=4
    )


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor) -> None:
    n_rows, size = x_ND.shape
    _rms_norm_kernel[(n_rows,)](
        x_ND, weight_D, out_ND, x_ND.stride(0), out_ND.stride(0), eps, size,
        BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip


def rms_norm_backward_add(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, eps: float, residual_grad_ND: Tensor
) -> None:
    n_rows, size = x_ND.shape
    _rms_norm_backward_kernel[(n_rows,)](
        grad_ND, x_ND, weight_D, residual_grad_ND,
        grad_ND.stride(0), x_ND.stride(0), residual_grad_ND.stride(0), eps, size,
        BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip


def _rope_arguments(packed_TW: Tensor, columns: GroupColumns, norms: tuple[Tensor, Tensor] | None):
    half = columns.head_size // 2
    if half != triton.next_power_of_2(half):
        raise ValueError(f"head size {columns.head_size} is not a power of two: the GPU kernels do not cover it")
    grid = (triton.cdiv(packed_TW.shape[0], _ROPE_TOKENS), columns.heads)
    weights = norms if norms is not None else (packed_TW, packed_TW)
    constants = {
        "Q_HEADS": columns.query_heads, "K_HEADS": columns.key_heads, "HALF": half,
        "NORMED": norms is not None, "TOKENS": _ROPE_TOKENS,
    }  # fmt: skip
    return grid, weights, (columns.query_column, columns.key_column, columns.value_column), constants


def norm_rope(
    packed_TW: Tensor, columns: GroupColumns, norms: tuple[Tensor, Tensor] | None, eps: float,
    cos_TJ: Tensor, sin_TJ: Tensor, out_TSE: Tensor,
) -> None:  # fmt: skip
    grid, weights, starts, constants = _rope_arguments(packed_TW, columns, norms)
    _norm_rope_kernel[grid](
        packed_TW, *weights, cos_TJ, sin_TJ, out_TSE, packed_TW.stride(0), packed_TW.shape[0], eps, *starts, **constants
    )


def norm_rope_backward(
    packed_TW: Tensor, columns: GroupColumns, norms: tuple[Tensor, Tensor] | None, eps: float,
    cos_TJ: Tensor, sin_TJ: Tensor, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    grid, weights, starts, constants = _rope_arguments(packed_TW, columns, norms)
    strides = [stride for grad in grads for stride in grad.stride()[:2]]
    _norm_rope_backward_kernel[grid](
        packed_TW, *weights, cos_TJ, sin_TJ, *grads, packed_TW.stride(0), packed_TW.shape[0], eps,
        *starts, *strides, **constants,
    )  # fmt: skip


def swiglu(gate_up_NW: Tensor, out_NF: Tensor) -> None:
    n_rows, size = out_NF.shape
    _swiglu_kernel[(n_rows, triton.cdiv(size, _MLP_COLUMNS))](
        gate_up_NW, out_NF, gate_up_NW.stride(0), out_NF.stride(0), size, BLOCK=_MLP_COLUMNS, num_warps=4
    )


def swiglu_backward(gate_up_NW: Tensor, grad_NF: Tensor) -> None:
    n_rows, size = grad_NF.shape
    _swiglu_backward_kernel[(n_rows, triton.cdiv(size, _MLP_COLUMNS))](
        gate_up_NW, grad_NF, gate_up_NW.stride(0), grad_NF.stride(0), size, BLOCK=_MLP_COLUMNS, num_warps=4
    )
