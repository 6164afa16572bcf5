"""q, k, v staged through the host; copies that arrive as late as their events allow. Float64 against the oracle."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import ARCHITECTURES, tiny_config, tiny_model
from test_engine_layers import N_TOKENS, TOLERANCE, assert_equal, one_row, relative_error
from test_engine_memory import QWEN3_8B, TINY
from test_engine_segments import batch_of
from torch import Tensor

import engine.walk
from engine import choose, reference
from engine.budget import Budget, scoring_plan
from engine.choose import _sparse_layers, choose_plan, longest_branch
from engine.layers import LongContextScorer
from engine.memory import GIB, Setup, predict
from engine.offload import Kept, Transfers
from engine.plan import LayerPlan, MemoryPlan, uniform_plan
from engine.qkv import StagedQkv

HOST = LayerPlan(input="host", attention="host", mid="host", qkv="host", gate_up="host")
MIXED = (HOST, LayerPlan(), LayerPlan(mid="host", gate_up="device"), HOST, LayerPlan(qkv="host"))
SCATTERED = [1, 2, 9, 21, 22]


def plan_of(
    layers: tuple[LayerPlan, ...], *, staged: bool, tile: int = 7, groups: int = 2, buffers: int = 2
) -> MemoryPlan:
    return MemoryPlan(
        policy="auto", layers=layers, tile_tokens=tile, head_groups=groups, staged_qkv=staged, tile_buffers=buffers
    )  # fmt: skip


def scorer_of(plan: MemoryPlan, **options: int) -> LongContextScorer:
    return LongContextScorer(lambda _: plan, chunk_positions=3, **options)  # type: ignore[arg-type]


LAYERS = {
    "attention_offload": (LayerPlan(input="host", attention="host"),) * 5,
    "layer_offload": (LayerPlan(input="host"),) * 5,
    "mlp_attention": (LayerPlan(input="device", attention="device"),) * 5,
    "all on the host": (HOST,) * 5,
    "all but mid and gate|up": (LayerPlan(input="host", attention="host", qkv="host"),) * 5,
    "mixed, restored": MIXED,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_staged_equals_the_oracle(architecture: str, layers: tuple[LayerPlan, ...]) -> None:
    """All rows of the last layer, then windows of it."""
    model = tiny_model(architecture, num_hidden_layers=5)
    for options in ({}, {"gap_tokens": 1}):
        assert_equal(model, scorer_of(plan_of(layers, staged=True), **options), one_row(SCATTERED))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("n_on_device", [1, 3, 5])
def test_what_a_small_host_leaves_on_the_device_equals_the_oracle(staged: bool, stride: int, n_on_device: int) -> None:
    layers = tuple(_sparse_layers(5, stride, 3, n_on_device))
    model = tiny_model(num_hidden_layers=5)
    for options in ({}, {"gap_tokens": 1}):
        assert_equal(model, scorer_of(plan_of(layers, staged=staged), **options), one_row(SCATTERED))


@pytest.mark.parametrize("tile", [1, 7, N_TOKENS, 1000])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_staged_in_tiles_and_groups(tile: int, groups: int) -> None:
    """Four groups for two buffers: each is used twice, and the second time waits for the gradient to leave."""
    model = tiny_model(num_hidden_layers=5, num_key_value_heads=4)
    plan = plan_of(MIXED, staged=True, tile=tile, groups=groups)
    assert_equal(model, scorer_of(plan), one_row([1, 9, 22]), 3.0)


def test_staged_packed_rows() -> None:
    plan = uniform_plan("attention_offload", 3, tile_tokens=7, head_groups=2, staged_qkv=True)
    assert_equal(tiny_model(), scorer_of(plan, gap_tokens=0), batch_of([9, 2, 6, 7]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_host_bytes_equal_the_ledger(architecture: str, layers: tuple[LayerPlan, ...]) -> None:
    """Of training, and of scoring alone, which keeps nothing and still stages."""
    plan, config = plan_of(layers, staged=True), tiny_config(architecture, num_hidden_layers=5).to_dict()
    setup = TINY.model_copy(update={"n_last_rows": N_TOKENS})
    model, batch = tiny_model(architecture, num_hidden_layers=5), one_row(list(range(1, N_TOKENS)))
    for keeps in (True, False):
        scorer = scorer_of(plan)
        with torch.set_grad_enabled(keeps):
            logp_P = scorer(model, *batch)
        assert relative_error(logp_P, reference.token_logprobs(model, *batch)) < TOLERANCE
        assert scorer.host_bytes == predict(config, N_TOKENS, plan, setup, keeps=keeps).host_bytes > 0
        assert scorer._pools[0].busy == keeps


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_device_bytes_of_staging_equal_the_ledger(groups: int) -> None:
    model, made = tiny_model(num_hidden_layers=5, num_key_value_heads=4), []

    class Spy(StagedQkv):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    plan = plan_of(MIXED, staged=True, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.workspace.StagedQkv", Spy)
        scorer_of(plan)(model, *one_row([4]))
    tensors = [made[0]._tile_NX, *made[0]._tiles.buffers, *made[0]._in_groups.buffers]
    config = tiny_config("qwen3", num_hidden_layers=5, num_key_value_heads=4).to_dict()
    rows = {r.component: r.device_bytes for r in predict(config, N_TOKENS, plan, TINY).rows if r.moment == "forward"}
    assert sum(x.nbytes for x in tensors) == rows["packed q|k|v"] + rows["staged q|k|v"]


def test_staging_is_chosen_only_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B in 11.5 GiB the longest branch grows from 139,264 to 194,560 tokens."""
    budget = {"device_bytes": int(11.5 * GIB), "host_bytes": 110 * GIB}
    staged = longest_branch(QWEN3_8B, Setup(), **budget)
    with monkeypatch.context() as patch:
        patch.setattr(choose, "SIZES", [size for size in choose.SIZES if not size.staged_qkv])
        plain = longest_branch(QWEN3_8B, Setup(), **budget)
    assert staged > 1.35 * plain
    assert not choose_plan(QWEN3_8B, plain, Setup(), **budget)[0].staged_qkv
    plan, ledger = choose_plan(QWEN3_8B, plain + 1024, Setup(), **budget)
    assert plan.staged_qkv
    assert plan.tile_tokens == 4096  # large tiles again, so that only what must is paid
    assert ledger.host_bytes <= budget["host_bytes"]
    scored, _ = scoring_plan(QWEN3_8B, staged, Setup(), Budget(**budget))  # what can be trained can be evaluated
    assert scored.policy == "layer_offload"


def test_tiles_from_the_host_have_as_many_buffers_as_fit() -> None:
    """A buffer for every tile where there is room, before wide projections are kept; two where memory is short."""
    host_bytes = 110 * GIB
    for n_tokens, gib, n_buffers in ((32_768, 23.5, 4), (65_536, 23.5, 8), (262_144, 23.5, 8), (194_560, 11.5, 2)):
        plan, ledger = choose_plan(QWEN3_8B, n_tokens, Setup(), device_bytes=int(gib * GIB), host_bytes=host_bytes)
        assert plan.tile_buffers == n_buffers
        assert ledger.peak_device_bytes <= gib * GIB


def test_staged_and_kept_on_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="staged through the host are kept there or not at all"):
        plan_of((LayerPlan(input="host", qkv="device"),), staged=True)


class LateCopy:
    """A copy that runs when it is waited for, and not before; earlier ones of its stream run first."""

    def __init__(self, stream: list[LateCopy], run: Callable[[], object], after: list[LateCopy | None]) -> None:
        self._before, self._run, self._after, self.done = list(stream), run, after, False
        stream.append(self)

    def wait(self) -> None:
        if self.done:
            return
        for copy in (*self._before, *self._after):
            if copy is not None:
                copy.wait()
        self._before.clear()
        self._run()
        self.done = True


class LateTransfers(Transfers):
    """The GPU's rules on a CPU: host memory is apart, copies are late, and what they will overwrite is gone at once."""

    n_late = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.apart = True
        self._streams: dict[tuple[str, bool], list[LateCopy]] = {}

    def is_remote(self, kept: Kept | None) -> bool:
        return kept is not None and not kept.data_TW.untyped_storage().resizable()  # in the host buffer

    def _late(self, direction: str, bulk: bool, run: Callable[[], object], after: list[Any]) -> Any:
        LateTransfers.n_late += 1
        return LateCopy(self._streams.setdefault((direction, bulk), []), run, after)

    def write(self, kept: Kept, span: slice, source_NW: Tensor, *, bulk: bool = False) -> Any:
        if not self.is_remote(kept):
            return super().write(kept, span, source_NW)
        owner = weakref.ref(source_NW if source_NW._base is None else source_NW._base)
        place = source_NW.shape, source_NW.stride(), source_NW.storage_offset()
        del source_NW

        def copy() -> None:  # memory that was freed meanwhile would be somebody else's by now
            source = owner()
            kept.data_TW[span] = torch.nan if source is None else source.as_strided(*place)

        kept.written = self._late("out", bulk, copy, [])
        return kept.written

    def load(self, kept: Kept, span: slice, out_NW: Tensor, free: Any, *, bulk: bool = False) -> Any:
        if not self.is_remote(kept):
            return super().load(kept, span, out_NW, free)
        if free is None or free.done:
            out_NW.fill_(torch.nan)
        return self._late("in", bulk, lambda: out_NW.copy_(kept.data_TW[span]), [free, kept.written])

    def wait(self, event: Any) -> None:
        if event is not None:
            event.wait()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.walk, "Transfers", LateTransfers)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(("tile", "buffers"), [(3, 2), (7, 2), (3, 4), (7, 8)])
def test_every_copy_is_waited_for(
    late: None, layers: tuple[LayerPlan, ...], tile: int, buffers: int, staged: bool
) -> None:
    """Rings of buffers go round several times, or hold a whole branch; twice, as a buffer is used again by a step."""
    before = LateTransfers.n_late
    model = tiny_model(num_hidden_layers=5, num_key_value_heads=4)
    scorer = scorer_of(plan_of(layers, staged=staged, tile=tile, groups=4, buffers=buffers))
    for positions in (SCATTERED, list(range(1, N_TOKENS))):
        assert_equal(model, scorer, one_row(positions))
    if staged or layers[0].input == "host":
        assert LateTransfers.n_late > before + 100


def test_several_walks_of_a_batch_share_one_buffer() -> None:
    """Four rows in four walks take the host memory of the longest one, and give the gradients of one batch."""
    plan = uniform_plan("attention_offload", 3, tile_tokens=7, head_groups=2)
    scorer = scorer_of(plan, pack_tokens=0)
    assert_equal(tiny_model(), scorer, batch_of([9, 2, 6, 7]), 3.0)
    config = tiny_config("qwen3").to_dict()
    assert scorer.host_bytes == predict(config, 9, plan, TINY.model_copy(update={"n_last_rows": None})).host_bytes
