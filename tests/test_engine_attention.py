"""Which attention kernel a walk takes: the fastest, and one that adds in a fixed order where that is asked for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import attention, block_attention, segments
from engine.attention import BACKENDS, AttentionBackend, fastest, probe_backends
from engine.block_attention import block_backends
from schemas.errors import StageError

GPU = torch.device("cuda")
SIZES: dict[str, Any] = {"n_tokens": 64, "n_heads": 4, "n_key_heads": 2, "head_size": 8}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN wins every probe, and the flash-attn package is there."""
    seconds = {"cudnn": 1.0, "flash": 3.0, "flash_attn": 2.0}
    monkeypatch.setattr(attention, "_probe_s", lambda backend, *_: seconds[backend.name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or None)


@pytest.mark.usefixtures("probed")
def test_the_fastest_of_what_is_there() -> None:
    seconds = probe_backends(GPU, torch.bfloat16, **SIZES)
    assert seconds == {"cudnn": 1.0, "flash": 3.0, "flash_attn": 2.0}
    assert fastest(seconds).name == "cudnn"
    assert fastest({"cudnn": math.inf, "flash": 2.0}).name == "flash"
    assert fastest({}).name == "math"


def test_a_gpu_that_runs_no_fused_kernel_is_told() -> None:
    """The plain version would run there at a tiny part of their speed, in memory that no plan counts."""
    with pytest.raises(StageError, match=r"no fused attention kernel runs on this GPU \(tried cudnn, flash\)"):
        fastest({"flash": math.inf, "cudnn": math.inf})


def test_a_probe_that_runs_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randn", lambda shape, **_: torch.zeros(shape))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None))
    with pytest.raises(torch.OutOfMemoryError):
        attention._probe_s(BACKENDS["flash"]._replace(forward=refuses), 8, (4, 2), 8)
    refusing = BACKENDS["flash"]._replace(forward=lambda *_: (_ for _ in ()).throw(RuntimeError("head size")))
    assert attention._probe_s(refusing, 8, (4, 2), 8) == math.inf


@pytest.mark.usefixtures("probed", "deterministic")
def test_no_kernel_that_adds_in_any_order_where_a_fixed_one_is_asked_for() -> None:
    """cuDNN's backward is such a one: two equal steps on an H200 differed by 0.8 % of the gradient with it."""
    seconds = probe_backends(GPU, torch.bfloat16, **SIZES)
    assert seconds == {"flash": 3.0}, "one kernel, whatever is installed and whatever the clock says"
    assert {backend.name for backend in block_backends(fastest(seconds))} == {"flash"}


def test_short_branches_do_not_wait_for_a_graph_of_their_length() -> None:
    """cuDNN builds one for every new length; below 8,192 tokens its kernels do not win that back."""
    backends = block_backends(BACKENDS["cudnn"], {"cudnn": 1.0, "flash": 2.0})
    taken = [backends.of(n_tokens, n_tokens).name for n_tokens in (1, 8191, 8192, 400_000)]
    assert taken == ["flash", "flash", "cudnn", "cudnn"]
    assert backends.names == "cudnn, flash under 8,192 x 8,192"
    assert block_backends(BACKENDS["flash"]).names == "flash"
    refused = block_backends(BACKENDS["cudnn"], {"cudnn": 1.0, "flash": math.inf})
    assert refused.of(1, 1).name == "cudnn", "a kernel that does not run here is no way out"


@pytest.mark.parametrize(("n_tokens", "taken"), [(8, {"small"}), (9, {"large"})])
def test_a_plain_branch_goes_to_the_backend_of_its_size(
    n_tokens: int, taken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "LARGE_BLOCK", 9 * 9)
    used = set[str]()
    backends = block_attention.BlockBackends(*(_noting(name, used) for name in ("large", "small")))
    queries = segments.all_queries(segments.one_row(n_tokens))
    q, k, v = (torch.randn(n_tokens, n, 8) for n in (4, 2, 2))
    out, lse = block_attention.forward(backends, queries, q, k, v, 1.0)
    assert used == taken
    used.clear()
    block_attention.backward(backends, queries, out, q, k, v, out, lse, 1.0)
    assert used == taken


def _noting(name: str, used: set[str]) -> AttentionBackend:
    """Plain attention that writes its name down when it is used."""

    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        used.add(name)
        return BACKENDS["math"].forward(*arguments)

    def backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        used.add(name)
        return BACKENDS["math"].backward(*arguments)

    return AttentionBackend(name, forward, backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_take_the_plain_version(dtype: torch.dtype) -> None:
    assert fastest(probe_backends(GPU, dtype, **SIZES)).name == "math"
    assert fastest(probe_backends(torch.device("cpu"), torch.bfloat16, **SIZES)).name == "math"
