"""Which attention kernel a walk takes: the fastest, and one that adds in a fixed order where that is asked for."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import attention
from engine.attention import BACKENDS, fastest, probe_backends
from engine.block_attention import block_backends

GPU = torch.device("cuda")
SIZES: dict[str, Any] = {"n_tokens": 64, "n_heads": 4, "n_key_heads": 2, "head_size": 8}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would win every probe."""
    seconds = {"cudnn": 1.0, "flash": 2.0, "flash_attn": 3.0}
    monkeypatch.setattr(attention, "_probe_s", lambda backend, *_: seconds[backend.name])
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "flash_attn" else found(name, *rest)
    )


@pytest.mark.usefixtures("probed")
def test_the_fastest_of_what_is_there() -> None:
    seconds = probe_backends(GPU, torch.bfloat16, **SIZES)
    assert seconds == {"cudnn": 1.0, "flash": 2.0}
    assert fastest(seconds).name == "cudnn"
    assert fastest({"cudnn": math.inf, "flash": 2.0}).name == "flash"
    assert fastest({"cudnn": math.inf}).name == fastest({}).name == "math"


@pytest.mark.usefixtures("probed", "deterministic")
def test_no_kernel_that_adds_in_any_order_where_a_fixed_one_is_asked_for() -> None:
    """cuDNN's backward is such a one: two equal steps on an H200 differed by 0.8 % of the gradient with it."""
    seconds = probe_backends(GPU, torch.bfloat16, **SIZES)
    assert seconds == {"flash": 2.0}
    assert {backend.name for backend in block_backends(fastest(seconds))} == {"flash"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_take_the_plain_version(dtype: torch.dtype) -> None:
    assert fastest(probe_backends(GPU, dtype, **SIZES)).name == "math"
    assert fastest(probe_backends(torch.device("cpu"), torch.bfloat16, **SIZES)).name == "math"


@pytest.mark.parametrize("fixed", [False, True])
def test_flash_attn_is_told(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package asks nobody: it takes the order of its sums as an argument."""
    told: list[bool] = []
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_backward = lambda *_, deterministic, **__: told.append(deterministic)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed)
    q_THE, k_MKE = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    BACKENDS["flash_attn"].backward(q_THE, q_THE, k_MKE, k_MKE, q_THE, torch.zeros(4, 3), 1.0, True)
    assert told == [fixed]
