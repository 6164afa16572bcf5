"""Linear layers with LoRA as one dense matrix each pass, so that LoRA costs no elementwise work.

Shapes: N tokens, I input features, O output features (of all packed linears together), X extra columns.

Linears that share an input (q, k, v; gate, up) are packed into one matrix, bordered by their adapters:

                I columns            X columns
    O rows   [  W (dequantised)   |  scaling * B, bias  ]
    X rows   [  A                 |  0                  ]

With x bordered by t = x A^T (and a 1 for the bias), y = x W^T + scaling * t B^T + bias is one matmul over I + X
columns; with dy bordered by u = scaling * dy B, dx = dy W + u A is one over O + X rows. The sum over the rank happens
in the matmul's float32 accumulator instead of as a rounded addition. X is padded so that rows stay aligned on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from engine.moments import INT8_ROWS
from schemas.errors import UserError


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One active LoRA pair of one linear: parameters, scaling, and where it lies in the packed matrix."""

    weight_a: nn.Parameter
    weight_b: nn.Parameter
    scaling: float
    extra_start: int
    output_start: int

    @property
    def rank(self) -> int:
        return self.weight_a.shape[0]

    @property
    def extra(self) -> slice:
        return slice(self.extra_start, self.extra_start + self.rank)

    @property
    def outputs(self) -> slice:
        return slice(self.output_start, self.output_start + self.weight_b.shape[0])


def base_linear(module: Any) -> Any:
    """The frozen linear inside a peft layer, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _refuse(module: Any, what: str, fix: str) -> None:
    raise UserError(f"the long-context engine does not cover {what}", where=type(module).__name__, fix=fix)


def _adapters(module: Any, extra_start: int, output_start: int) -> list[Adapter]:
    if not hasattr(module, "lora_A") or module.disable_adapters or module.merged:
        return []
    found = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if module.use_dora.get(name, False) or module.lora_bias.get(name, False):
            _refuse(module, "DoRA or LoRA with a bias", "train a plain LoRA")
        if module.training and getattr(module.lora_dropout[name], "p", 0.0) > 0:
            _refuse(module, "LoRA dropout", "set lora_dropout = 0")
        pair = module.lora_A[name].weight, module.lora_B[name].weight
        found.append(Adapter(*pair, float(module.scaling[name]), extra_start, output_start))
        extra_start += found[-1].rank
    return found


def compute_dtype(module: Any) -> torch.dtype:
    """The dtype a linear computes in: its weight's, or the one its quantisation was set up with."""
    base = base_linear(module)
    if getattr(base.weight, "quant_state", None) is not None:
        return base.compute_dtype or base.weight.quant_state.dtype
    return base.weight.dtype if base.weight.is_floating_point() else torch.bfloat16


def _int8_factors(linear: Any) -> tuple[Tensor, Tensor]:
    """(codes [O, I], float32 scales [O, 1]) of an int8 weight."""
    weight, state = linear.weight, linear.state
    codes, scales = (state.CB, state.SCB) if state.CB is not None else (weight.CB, weight.SCB)
    return weight.data if codes is None else codes, scales.float()[:, None] / 127.0


def dense_weight(linear: Any) -> Tensor:
    """The weight [O, I] of a plain, NF4/FP4 (bitsandbytes Linear4bit) or int8 (Linear8bitLt) linear.

    Quantised weights come back dequantised; int8 is CB * SCB / 127 in float32 (Dettmers et al. 2022), without the
    rounding of activations that bitsandbytes' own int8 matmul adds.
    """
    weight = linear.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    if weight.dtype == torch.int8:
        return torch.mul(*_int8_factors(linear))
    if not weight.is_floating_point():
        _refuse(linear, f"weights stored as {weight.dtype}", "use bfloat16, NF4 or int8")
    return weight.data


def write_dense_weight(linear: Any, out_OI: Tensor) -> None:
    """`dense_weight` into a row-strided view; 4-bit codes on a GPU and int8 without a dense copy between."""
    state = getattr(linear.weight, "quant_state", None)
    if state is None and linear.weight.dtype == torch.int8:
        codes_OI, scales_O1 = _int8_factors(linear)
        for start in range(0, codes_OI.shape[0], INT8_ROWS):  # in float32, rounded on the way out
            rows = slice(start, start + INT8_ROWS)
            torch.mul(codes_OI[rows], scales_O1[rows], out=out_OI[rows])
        return
    if state is None or not out_OI.is_cuda or linear.weight.shape[0] == 1 or out_OI.shape[1] % 2:
        out_OI.copy_(dense_weight(linear))
        return
    from bitsandbytes.functional import dequantize_blockwise

    from engine import kernels_triton

    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    kernels_triton.dequantise_4bit(linear.weight.data, state.code, scales.float(), state.blocksize, out_OI)


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's precision even when the factors are 16-bit."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class PackedLinears:
    """The bordered matrix of linears that share an input; one buffer, refilled for every layer."""

    def __init__(self, modules: list[Any], dtype: torch.dtype, device: torch.device, align: int) -> None:
        bases = [base_linear(module) for module in modules]
        self.n_in: int = bases[0].in_features
        self.n_out: int = sum(base.out_features for base in bases)
        ranks = sum(adapter.rank for module in modules for adapter in _adapters(module, 0, 0))
        used = ranks + (1 if any(base.bias is not None for base in bases) else 0)
        self.extra = -(-used // align) * align
        self.matrix = torch.zeros(self.n_out + self.extra, self.n_in + self.extra, dtype=dtype, device=device)
        self.adapters: list[Adapter] = []
        self.bias_column: int | None = None

    def load(self, modules: list[Any]) -> None:
        """Dequantise one layer's weights into the buffer and lay its adapters and biases around them."""
        self.matrix[self.n_out :].zero_()
        self.matrix[:, self.n_in :].zero_()
        self.adapters = []
        row, extra, biased = 0, 0, []
        for module in modules:
            base = base_linear(module)
            write_dense_weight(base, self.matrix[row : row + base.out_features, : self.n_in])
            found = _adapters(module, extra, row)
            self.adapters += found
            extra += sum(adapter.rank for adapter in found)
            if base.bias is not None:
                biased.append((row, base.bias))
            row += base.out_features
        self.bias_column = extra if biased else None
        if extra + len(biased[:1]) > self.extra:
            raise UserError(
                f"a layer has {extra} LoRA columns, the first layer {self.extra}",
                fix="give every layer adapters of the same rank",
            )
        for adapter in self.adapters:
            self.matrix[self.n_out + adapter.extra_start :][: adapter.rank, : self.n_in].copy_(adapter.weight_a.data)
            border = self.matrix[adapter.outputs, self.n_in + adapter.extra_start :][:, : adapter.rank]
            border.copy_(adapter.weight_b.data * adapter.scaling)
        for start, bias in biased:
            self.matrix[start : start + bias.numel(), self.n_in + extra].copy_(bias.data)

    def border_input(self, x_NX: Tensor) -> None:
        """Fill the extra columns of bordered inputs [N, I + X] with x A^T (and the bias's 1)."""
        if self.extra:
            torch.mm(x_NX[:, : self.n_in], self.matrix[self.n_out :, : self.n_in].t(), out=x_NX[:, self.n_in :])
            if self.bias_column is not None:
                x_NX[:, self.n_in + self.bias_column] = 1

    def input_border(self, x_NC: Tensor, columns: slice) -> Tensor:
        """The part of x A^T [N, X] that comes from input features `columns` alone."""
        return torch.mm(x_NC, self.matrix[self.n_out :, : self.n_in][:, columns].t())

    def border_grad(self, grad_NX: Tensor) -> None:
        """Fill the extra columns of bordered output gradients [N, O + X] with scaling * dy B."""
        if self.extra:
            torch.mm(grad_NX[:, : self.n_out], self.matrix[: self.n_out, self.n_in :], out=grad_NX[:, self.n_out :])

    def forward(self, x_NX: Tensor, out_NO: Tensor, residual_NO: Tensor | None = None) -> None:
        """out = bordered x times the packed weights (+ residual, added inside the matmul)."""
        self.border_input(x_NX)
        weight = self.matrix[: self.n_out].t()
        if residual_NO is None:
            torch.mm(x_NX, weight, out=out_NO)
        else:
            torch.addmm(residual_NO, x_NX, weight, out=out_NO)

    def input_grad(self, grad_NX: Tensor, out_NI: Tensor, columns: slice = slice(None)) -> None:
        """out = gradient with respect to input features `columns`, given bordered output gradients."""
        torch.mm(grad_NX, self.matrix[:, : self.n_in][:, columns], out=out_NI)


class AdapterGradients:
    """Sums of the LoRA gradients of one packed matrix over tiles, in float32 (float64 for a float64 model)."""

    def __init__(self, packed: PackedLinears, dtype: torch.dtype) -> None:
        self.packed = packed
        device = packed.matrix.device
        self.trained = [a for a in packed.adapters if a.weight_a.requires_grad or a.weight_b.requires_grad]
        rows = packed.extra if self.trained else 0
        self.grad_a_XI = torch.zeros(rows, packed.n_in, dtype=dtype, device=device)
        self.grad_b = [torch.zeros(a.weight_b.shape, dtype=dtype, device=device) for a in self.trained]

    def add(self, grad_NX: Tensor, x_NI: Tensor, t_NX: Tensor, columns: slice = slice(None)) -> None:
        """One tile: bordered output gradients, the inputs (features `columns`), and their t = x A^T."""
        if not self.trained:
            return
        accumulate_product(self.grad_a_XI[:, columns], grad_NX[:, self.packed.n_out :].t(), x_NI)
        for adapter, total in zip(self.trained, self.grad_b, strict=True):
            accumulate_product(total, grad_NX[:, adapter.outputs].t(), t_NX[:, adapter.extra])

    def finish(self) -> dict[int, Tensor]:
        """Gradients by id of their parameter, in the parameter's dtype."""
        grads = {}
        for adapter, total in zip(self.trained, self.grad_b, strict=True):
            mine = self.grad_a_XI[adapter.extra]  # copied, or its view would keep the padded sums alive
            grads[id(adapter.weight_a)] = mine.to(adapter.weight_a.dtype, copy=True)
            grads[id(adapter.weight_b)] = total.mul_(adapter.scaling).to(adapter.weight_b.dtype)
        return grads
