"""The Triton kernels against their plain PyTorch counterparts, in Triton's interpreter (no GPU needed).

The interpreter has to be chosen before Triton is imported, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from engine_models import relative_error

from engine import kernels
from engine.kernels import GroupColumns

TOLERANCE = 2e-6  # float32 throughout; measured below 3e-7


def rows(n: int, width: int, *, inside: int) -> torch.Tensor:
    """[n, inside], strided: a view of wider rows."""
    return torch.randn(n, width)[:, :inside]


def both(name: str, *arguments: Any, changed: tuple[int, ...]) -> None:
    """Run both versions on equal copies; arguments `changed` must come out equal, and nothing else may change."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return tuple(map(copy, value)) if type(value) is tuple else value
        return torch.empty_strided(value.shape, value.stride()).copy_(value)

    from engine import kernels_triton

    mine, plain = [copy(a) for a in arguments], [copy(a) for a in arguments]
    getattr(kernels_triton, name)(*mine)
    getattr(kernels, name)(*plain)
    for index, (a, b, before) in enumerate(zip(mine, plain, arguments, strict=True)):
        if index in changed:
            assert relative_error(a, b) < TOLERANCE
            assert not torch.equal(b, before)
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, before)


def check_norms() -> None:
    x, weight, grad, total = rows(5, 40, inside=24), torch.randn(24), rows(5, 24, inside=24), rows(5, 30, inside=24)
    both("rms_norm", x, weight, 1e-6, torch.zeros(5, 24), changed=(3,))
    both("rms_norm_backward_add", grad, x, weight, 1e-6, total, changed=(4,))


def check_swiglu() -> None:
    gate_up, grad = rows(3, 90, inside=80), rows(3, 50, inside=40)
    both("swiglu", gate_up, torch.zeros(3, 40), changed=(1,))
    both("swiglu_backward", gate_up, grad, changed=(0, 1))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("group", [0, 1])
def check_norm_and_rope(normed: bool, group: int) -> None:
    """37 tokens (more than a block, not a multiple), 2 groups of 2 query and 1 key head, head size 8."""
    columns = GroupColumns(8, 2, 1, query_column=16 * group, key_column=32 + 8 * group, value_column=48 + 8 * group)
    packed, angle = rows(37, 70, inside=64), torch.randn(37, 4)
    norms = (torch.randn(8), torch.randn(8)) if normed else None
    tables = angle.cos(), angle.sin()
    both("norm_rope", packed, columns, norms, 1e-6, *tables, torch.zeros(37, 4, 8), changed=(6,))
    grads = (torch.randn(2, 37, 8).transpose(0, 1), torch.randn(37, 1, 8), torch.randn(37, 1, 8))
    both("norm_rope_backward", packed, columns, norms, 1e-6, *tables, grads, changed=(0,))


def check_dequantisation() -> None:
    """bitsandbytes' own NF4 against ours, into a strided view, with double quantisation undone by bitsandbytes."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    from engine import kernels_triton

    packed, state = functional.quantize_4bit(torch.randn(6, 256), quant_type="nf4", compress_statistics=True)
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    out = torch.zeros(6, 300)[:, :256]
    kernels_triton.dequantise_4bit(packed, state.code, scales, state.blocksize, out)
    assert torch.equal(out, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("grad_k", ["*bf16", "*fp32"])
def test_triton_kernels_compile_for_a_gpu(grad_k: str) -> None:
    """To machine code of an H100/H200, from bfloat16; attention in blocks gives dk and dv in float32, beside dq.

    The interpreter does not see a mismatch of types.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from engine import kernels_triton

    bf16, wide = "*bf16", {"cos": "*fp32", "sin": "*fp32", "table": "*fp32", "scales": "*fp32", "eps": "fp32"}
    tensors = dict.fromkeys(("packed", "q_norm", "k_norm", "grad_q", "x", "weight", "out", "residual"), bf16)
    tensors |= dict.fromkeys(("grad", "gate_up"), bf16) | {"grad_k": grad_k, "grad_v": grad_k, "codes": "*u8"} | wide
    rope = {"Q_HEADS": 4, "K_HEADS": 1, "HALF": 64, "NORMED": True, "TOKENS": 32}
    constants = {
        "_rms_norm_kernel": {"BLOCK": 4096}, "_rms_norm_backward_kernel": {"BLOCK": 4096},
        "_norm_rope_kernel": rope, "_norm_rope_backward_kernel": rope, "_swiglu_kernel": {"BLOCK": 2048},
        "_swiglu_backward_kernel": {"BLOCK": 2048}, "_dequantise_4bit_kernel": {"BYTES": 1024},
    }  # fmt: skip
    for name, values in constants.items():
        kernel = getattr(kernels_triton, name)
        signature = {n: "constexpr" if n in values else tensors.get(n, "i32") for n in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


def test_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_functions=check_*", __file__]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert "......." in run.stdout  # seven checks ran
