"""Forward and backward of one packed sequence through all decoder layers.

Shapes: T tokens, P scored positions, D hidden size, Q rows of the last layer, X columns for LoRA beside D.

No autograd graph exists inside: forward is a loop that keeps what the memory plan says, backward a loop in reverse that
recomputes one layer at a time. To autograd the whole walk is a single function of the LoRA parameters. Exact: attention
sees every token of a branch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.block_attention import BlockBackends
from engine.head import head_logprobs
from engine.layer_backward import LayerBackward
from engine.layer_forward import LayerForward
from engine.offload import HostPool, Kept, Transfers, slot_bytes
from engine.plan import MemoryPlan, kept_shapes
from engine.scores import split_head
from engine.segments import Layout, Queries, all_queries, scored_queries
from engine.unchanged import Used, check_unchanged, used_tensors
from engine.workspace import LayerActivations, Workspace


class Sequence(NamedTuple):
    """One packed sequence: its tokens, how rows lie in it, and per scored token the row before it and its id."""

    input_ids_T: Tensor
    layout: Layout
    before_P: Tensor
    targets_P: Tensor


def _in_own_dtypes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast, which would round what the walk computes in its weights' dtype, in the pass it is on for."""

    @functools.wraps(method)
    def run(walk: Walk, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(walk.transfers.device.type, enabled=False):
            return method(walk, *arguments, **options)

    return run


class Walk:
    """One sequence's way through the layers; holds what forward keeps until backward has used it.

    Args:
        free_pool: gives a host buffer that nothing else uses now; it is busy while this walk keeps something there.
        gap_tokens: windows of the last layer that are nearer than this are one (`engine.segments`).
    """

    def __init__(
        self,
        model: nn.Module,
        sequence: Sequence,
        plan: MemoryPlan,
        backends: BlockBackends,
        free_pool: Callable[[], HostPool],
        *,
        chunk_positions: int,
        gap_tokens: int,
    ) -> None:
        decoder, head = split_head(model)
        self.decoder: Any = decoder
        self.head_weight: Tensor = head.weight  # type: ignore[assignment]
        self.sequence, self.plan, self.backends = sequence, plan, backends
        self._free_pool, self._pool, self._finished = free_pool, HostPool(torch.device("cpu")), False
        self.chunk_positions = chunk_positions
        self.transfers = Transfers(sequence.input_ids_T.device)
        self.queries = all_queries(sequence.layout)
        self.last_queries, self.picked_P = self._last_queries(gap_tokens)
        self.kept: list[LayerActivations] = []
        self.scratch, self.scratch_inputs = LayerActivations(), list[Kept]()
        self.unit_grad_PD: Tensor | None = None

    def _last_queries(self, gap_tokens: int) -> tuple[Queries, Tensor]:
        """The last layer's queries, and where among its rows the scored ones are."""
        before_P = self.sequence.before_P
        queries = scored_queries(self.sequence.layout, before_P.tolist(), gap_tokens)
        if queries.windows is None:
            return queries, before_P
        starts, stops = torch.tensor(queries.windows, device=before_P.device).t().contiguous()
        window_P = torch.searchsorted(starts, before_P, right=True) - 1
        first_rows = (stops - starts).cumsum(0) - (stops - starts)
        return queries, before_P - starts[window_P] + first_rows[window_P]

    def _queries(self, index: int) -> Queries:
        return self.last_queries if index + 1 == len(self.plan.layers) else self.queries

    def _workspace(self) -> tuple[Any, MemoryPlan, Layout, Transfers, BlockBackends]:
        return self.decoder, self.plan, self.sequence.layout, self.transfers, self.backends

    def _allocate(self, walk: Workspace, *, keep: bool) -> None:
        """Slots for what the plan keeps, and scratch; keep=False: only what a forward pass alone needs."""
        shapes = kept_shapes(walk.sizes, self.plan, walk.n_tokens, self.last_queries.n_rows, keeps=keep)
        on_host = [shape.place == "host" for shape in shapes]
        self.kept = [LayerActivations() for _ in self.plan.layers]
        if shapes:
            self._pool = self._free_pool()
            self._pool.lend(self)
            self._pool.reserve(
                sum(slot_bytes(shape.n_bytes) for shape, host in zip(shapes, on_host, strict=True) if host)
            )
        for shape, host in zip(shapes, on_host, strict=True):
            dtype = walk.sum_dtype if shape.field == "lse" else walk.dtype
            size = (shape.n_rows, shape.width)
            kept = Kept(self._pool.take(*size, dtype) if host else torch.empty(size, dtype=dtype, device=walk.device))
            owner = self.scratch if shape.layer < 0 else self.kept[shape.layer]
            if shape.field in ("attention", "lse", "qkv"):
                getattr(owner, shape.field).append(kept)
            elif shape.layer < 0:
                self.scratch_inputs.append(kept)
            else:
                setattr(owner, shape.field, kept)
        if self.plan.staged_qkv:
            for kept_of_layer in self.kept:
                kept_of_layer.staged_qkv = kept_of_layer.qkv or self.scratch.qkv

    def _release(self) -> None:
        self.kept, self.scratch, self.scratch_inputs = [], LayerActivations(), []
        self._pool.release_owner()

    @_in_own_dtypes
    def forward(self, *, keep: bool) -> Tensor:
        """logp_P. keep: what backward needs stays; without it, backward runs the forward pass again."""
        walk = LayerForward(*self._workspace())
        self._allocate(walk, keep=keep)
        ids_T, embedding = self.sequence.input_ids_T, self.decoder.embed_tokens.weight
        hidden_QD = nn.functional.embedding(ids_T.to(embedding.device), embedding).to(walk.device, walk.dtype)
        if keep:
            assert self.kept[0].input is not None
            self.transfers.write(self.kept[0].input, slice(None), hidden_QD)
        for index, layer in enumerate(self.decoder.layers):
            walk.load(layer)
            following = self.kept[index + 1].input if index + 1 < len(self.kept) else None
            hidden_QD = walk.forward(hidden_QD, self.kept[index], following, self._queries(index))
        walk.finish()
        hidden_PD = hidden_QD[self.picked_P]
        del walk, hidden_QD
        if not keep:
            self._release()
        logp_P, self.unit_grad_PD = head_logprobs(
            hidden_PD, self.decoder.norm, self.head_weight, self.sequence.targets_P,
            chunk_positions=self.chunk_positions, with_grad=keep,
        )  # fmt: skip
        return logp_P

    @_in_own_dtypes
    def backward(self, grad_P: Tensor) -> dict[int, Tensor]:
        """LoRA gradients by id of their parameter, given d(loss)/d(logp_P). Frees what forward kept."""
        if self._finished:
            raise RuntimeError("backward ran already (retain_graph is not covered)")
        if self.unit_grad_PD is None:
            self.forward(keep=True)
        walk = LayerBackward(*self._workspace())
        walk.prepare()
        grad_QX = self._grad_of_output(walk, grad_P)
        grads: dict[int, Tensor] = {}
        inputs = [kept.input for kept in self.kept]
        for index in reversed(range(len(self.kept))):
            kept = self.kept[index]
            if inputs[index] is None:
                self._restore_inputs(walk, inputs, index)
            source = inputs[index]
            assert source is not None
            walk.load(self.decoder.layers[index])
            slots = None
            if not kept.attention:
                slots = self._restore_attention(walk, source, index)
            below = (inputs[index - 1], self.kept[index - 1]) if index > 0 else None
            filled = slots is not None
            grad_QX, found = walk.backward(grad_QX, source, kept, below, self._queries(index), qkv_filled=filled)
            grads |= found
            if self.plan.layers[index].attention == "recompute":
                self._return_slots(slots or kept)
            self.kept[index], inputs[index] = LayerActivations(), None
        self._release()
        self._finished = True
        return grads

    def _grad_of_output(self, walk: LayerBackward, grad_P: Tensor) -> Tensor:
        """d(loss)/d(output of the last layer), bordered; from here on the scored positions' own is not needed."""
        assert self.unit_grad_PD is not None
        grad_QX = torch.zeros(self.last_queries.n_rows, walk.grad_width, dtype=walk.dtype, device=walk.device)
        scaled_PD = (self.unit_grad_PD * grad_P[:, None]).to(walk.dtype)
        grad_QX[:, : walk.hidden_size].index_add_(0, self.picked_P, scaled_PD)
        self.unit_grad_PD = None
        return grad_QX

    def _restore_inputs(self, walk: LayerBackward, inputs: list[Kept | None], index: int) -> None:
        """Fill the dropped inputs up to layer `index` from the nearest one kept before it."""
        start = max(i for i in range(index) if inputs[i] is not None)
        for layer in range(start, index):
            walk.load(self.decoder.layers[layer])
            source, output = inputs[layer], self.scratch_inputs[layer - start]
            assert source is not None
            if not self.kept[layer].attention:
                self._restore_attention(walk, source, layer)
            walk.restore_output(source, self.kept[layer], output)
            inputs[layer + 1] = output

    def _restore_attention(self, walk: LayerBackward, source: Kept, index: int) -> LayerActivations:
        """Compute a layer's attention again, into free scratch slots, which are returned whole."""
        n_groups, scratch, kept, queries = self.plan.head_groups, self.scratch, self.kept[index], self._queries(index)
        slots = LayerActivations(attention=scratch.attention[:n_groups], lse=scratch.lse[:n_groups])
        del scratch.attention[:n_groups], scratch.lse[:n_groups]
        kept.attention = [slot.reshaped(queries.n_rows, slot.data_TW.shape[1]) for slot in slots.attention]
        kept.lse = [slot.reshaped(slot.data_TW.shape[0], queries.n_rows) for slot in slots.lse]
        walk.restore_attention(source, kept, queries)
        return slots

    def _return_slots(self, slots: LayerActivations) -> None:
        self.scratch.attention += slots.attention
        self.scratch.lse += slots.lse


class WalkFunction(torch.autograd.Function):
    """logp_P of a walk as one function of the LoRA parameters, those among what it used that are trained."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, keep: bool, used: dict[str, list[Used]], *parameters: Tensor) -> Tensor:
        ctx.walk, ctx.used, ctx.keys = walk, used, [id(parameter) for parameter in parameters]
        return walk.forward(keep=keep)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_unchanged(ctx.used, used_tensors(ctx.walk.decoder, ctx.walk.head_weight))
        grads = ctx.walk.backward(grad_outputs[0])
        return (None, None, None, *(grads.get(key) for key in ctx.keys))
