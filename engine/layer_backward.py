"""Backward of one decoder layer, written out tile by tile.

Shapes: T tokens, Q query rows, N rows of a tile, D hidden size, W packed width of q|k|v, C features of a group's
attention output, F MLP size, H query heads of a group, X extra (LoRA) columns; suffix X also for "bordered by them".

Backward turns the gradient of a layer's output, in place, into that of its input:
  1. MLP, by tiles: gate and up again (unless kept), then down, SwiGLU, gate/up and norm backward;
  2. attention, by groups of heads: gradient of the group's output from o_proj, attention backward, RoPE and head-norm
     backward written over the raw q, k, v;
  3. q, k, v projections and norm, by tiles.
The residual connections are the additions into that one gradient. In the last layer 1 and 2 have the Q rows that scored
positions need, and 3 has all T; in all others Q = T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import block_attention, kernels
from engine.kernels import GroupColumns
from engine.linears import AdapterGradients
from engine.offload import Kept, Staging, TileReader
from engine.plan import FIELDS
from engine.segments import Queries
from engine.workspace import MID_RING, LayerActivations, Workspace, tiles


class LayerBackward(Workspace):
    """Backward of one layer at a time, last layer first, and what it needs computed again."""

    def prepare(self) -> None:
        """Buffers that kept activations arrive in; call once, before the first layer."""
        plan, rows, hidden = self.plan, self.spans[0].stop, self.hidden_size
        remote = self.transfers.apart
        on_host = {field: remote and any(getattr(x, field) == "host" for x in plan.layers) for field in FIELDS}
        first = max(hidden * on_host["mid"], hidden * on_host["input"] + self.out.n_in * on_host["attention"])
        if remote and plan.scratch_attention and plan.layers[0].input == "host":
            first = hidden + self.out.n_in
        self._first = Staging(self.transfers, rows * first, self.dtype, plan.tile_buffers)
        self._inputs = Staging(self.transfers, rows * hidden * on_host["input"], self.dtype, plan.tile_buffers)
        heads = self.groups[0].query_heads
        grouped = on_host["attention"] or (plan.scratch_attention > 0 and on_host["input"])
        count = min(2, len(self.groups))
        size = self.n_tokens * heads * grouped
        self._outputs = Staging(self.transfers, size * self.head_size, self.dtype, count)
        self._lse = Staging(self.transfers, size, self.sum_dtype, count)
        self._fetched: Kept | None = None
        self._gate_up_events: list[torch.cuda.Event | None] = []
        self._upcoming: tuple[LayerActivations, TileReader] | None = None

    def restore_output(self, source: Kept, kept: LayerActivations, output: Kept) -> None:
        """The layer's output from its input and its kept attention output: o_proj and MLP only."""
        for index, (span, (x_ND, *attention)) in enumerate(
            TileReader(self._first, [source, *kept.attention], self.spans)
        ):
            mid_ND = self._ring_tile(index, span)
            self._mid(x_ND, attention, mid_ND)
            self._mlp(mid_ND, mid_ND, None, span)
            self._ring_events[index % MID_RING] = self.transfers.write(output, span, mid_ND)

    def restore_attention(self, source: Kept, kept: LayerActivations, queries: Queries) -> None:
        """Attention outputs again from the layer's input; leaves the raw q|k|v in their store."""
        self._fill_qkv(source, kept)
        in_flight: list[Tensor] = []
        for index, output_QC in enumerate(self._attend(kept, queries)):
            in_flight.append(output_QC)
            if index > 0:  # a group's output has gone where it is kept while the next one was computed
                self.transfers.wait_written(kept.attention[index - 1])
                del in_flight[0]
        self._wait_all(kept)

    def _fill_qkv(self, source: Kept, kept: LayerActivations) -> None:
        if kept.qkv and kept.staged_qkv:
            return  # they are where they are staged
        for span, (x_ND,) in TileReader(self._inputs, [source], self.spans):
            self._project_qkv(x_ND, span, kept.staged_qkv)

    def _mlp_reader(self, source: Kept, kept: LayerActivations, queries: Queries | None = None) -> TileReader:
        if kept.mid is not None:
            first = [kept.mid]
        else:
            windows = queries.windows if queries is not None else None
            first = [source if windows is None else self._rows_of(source, windows), *kept.attention]
        if kept.gate_up is not None and not self.transfers.is_remote(kept.gate_up):
            first.append(kept.gate_up)
        spans = self.spans if queries is None else tiles(queries.n_rows, self.plan.tile_tokens)
        return TileReader(self._first, first, spans)

    def _rows_of(self, source: Kept, windows: tuple[tuple[int, int], ...]) -> Kept:
        """The windows' rows of a kept activation, on the device."""
        rows_QD = self._empty(sum(stop - start for start, stop in windows), source.data_TW.shape[1])
        event, row, free = None, 0, self.transfers.mark()
        for start, stop in windows:
            target = rows_QD[row : row + stop - start]
            event = self.transfers.load(source, slice(start, stop), target, free)
            row += stop - start
        self.transfers.wait(event)
        return Kept(rows_QD)

    def _fetch_gate_up(self, kept: LayerActivations) -> None:
        if kept.gate_up is None or self._gate_up_TX is None or not self.transfers.is_remote(kept.gate_up):
            return
        free, spans = self.transfers.mark(), tiles(kept.gate_up.data_TW.shape[0], self.plan.tile_tokens)
        self._fetched, self._gate_up_events = kept.gate_up, [
            self.transfers.load(kept.gate_up, span, self._gate_up_TX[span], free, bulk=True) for span in spans
        ]  # fmt: skip

    def _look_ahead(self, below: tuple[Kept | None, LayerActivations]) -> None:
        """Start fetching the first tiles of the layer below, unless something of it has to be computed again first."""
        source, kept = below
        if source is not None and (kept.mid is not None or kept.attention):
            self._upcoming = kept, self._mlp_reader(source, kept)

    def backward(
        self,
        grad_QX: Tensor,
        source: Kept,
        kept: LayerActivations,
        below: tuple[Kept | None, LayerActivations] | None,
        queries: Queries,
        *,
        qkv_filled: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """d(loss)/d(input) [T, X] from d(loss)/d(output), the first D columns of grad_QX, written over that where
        Q = T (left unfinished in the first layer); and the LoRA gradients by id.

        `source` is the layer's input and `below` the same pair of the next layer to come, whose first tiles travel
        while this one computes. `qkv_filled`: `restore_attention` ran for this layer just now.
        """
        sums = [AdapterGradients(pack, self.sum_dtype) for pack in (self.qkv, self.out, self.gate_up, self.down)]
        self.qkv_store.begin(kept.qkv, filled=qkv_filled)
        if kept.gate_up is not None and self._fetched is not kept.gate_up:
            self._fetch_gate_up(kept)
        upcoming, self._upcoming = self._upcoming, None
        if upcoming is not None and upcoming[0] is kept:
            reader = upcoming[1]
        else:
            reader = self._mlp_reader(source, kept, queries)
        first_output: list[tuple[Tensor, torch.cuda.Event | None]] = []
        qkv_there = qkv_filled or bool(kept.qkv)
        project_here = not qkv_there and kept.mid is None and queries.windows is None  # the tiles hold the input
        n_tiles = len(tiles(queries.n_rows, self.plan.tile_tokens))
        qkv_spans = [self.spans[index::n_tiles] for index in range(n_tiles)]
        for index, (span, inputs) in enumerate(reader):
            self.qkv_store.fetch(kept.qkv, qkv_spans[index])
            gate_up_NX = None
            if self.transfers.is_remote(kept.gate_up) and self._gate_up_TX is not None:
                self.transfers.wait(self._gate_up_events[index])
                gate_up_NX = self._gate_up_TX[span]
            elif kept.gate_up is not None:
                gate_up_NX = inputs.pop()
            if project_here:
                self._project_qkv(inputs[0], span, kept.staged_qkv)
            mid_ND = inputs[0]
            if kept.mid is None:
                mid_ND = self._mid_ring[0][: span.stop - span.start]
                self._mid(inputs[0], inputs[1:], mid_ND)
            if index == max(0, n_tiles - 2):  # early, but on the bulk stream: tiles would queue behind it
                first_output = self._group_output(kept, 0, bulk=True)
            self._mlp_backward(grad_QX[span], mid_ND, gate_up_NX, sums[2], sums[3])
        del reader, upcoming  # of the last layer they hold the windows' rows
        if below is not None:
            self._fetch_gate_up(below[1])
        if not qkv_there and not project_here:
            self._fill_qkv(source, kept)
        input_reader = TileReader(self._inputs, [source], self.spans)
        self._attention_backward(grad_QX, kept, first_output, sums[1], queries)
        grad_TX = grad_QX if queries.windows is None else self._spread(grad_QX, queries.windows)
        if below is not None:
            self._look_ahead(below)
        # strict: each of the two then runs to its end, which frees its last buffer
        for (span, (x_ND,)), packed_NW in zip(input_reader, self.qkv_store.gradients(kept.staged_qkv), strict=True):
            self._qkv_backward(grad_TX[span], packed_NW, x_ND, sums[0], wanted=below is not None)
        self.qkv_store.end()
        self.transfers.bulk_after_tiles()  # an attention output on its way would slow the tiles that are needed first
        return grad_TX, {key: grad for total in sums for key, grad in total.finish().items()}

    def _spread(self, grad_QX: Tensor, windows: tuple[tuple[int, int], ...]) -> Tensor:
        """The windows' rows at their places among those of all tokens."""
        grad_TX, row = grad_QX.new_zeros(self.n_tokens, grad_QX.shape[1]), 0
        for start, stop in windows:
            grad_TX[start:stop] = grad_QX[row : row + stop - start]
            row += stop - start
        return grad_TX

    def _mlp_backward(
        self,
        grad_NX: Tensor,
        mid_ND: Tensor,
        gate_up_NX: Tensor | None,
        gate_up_sums: AdapterGradients,
        down_sums: AdapterGradients,
    ) -> None:
        n_rows, size = mid_ND.shape
        norm, grad_down_NX = self.layer.post_attention_layernorm, grad_NX[:, : size + self.down.extra]
        normed_NX = self._normed(mid_ND, norm, self.gate_up)
        if gate_up_NX is None:
            gate_up_NX = self._gate_up_NX[:n_rows]
            self.gate_up.forward(normed_NX, gate_up_NX[:, : self.gate_up.n_out])
        else:
            self.gate_up.border_input(normed_NX)
        mlp_NX = self._mlp_NX[:n_rows]
        mlp_NF = mlp_NX[:, : self.mlp_size]
        self.down.border_grad(grad_down_NX)
        self.down.input_grad(grad_down_NX, mlp_NF)
        kernels.swiglu_backward(gate_up_NX[:, : self.gate_up.n_out], mlp_NF)
        self.down.border_input(mlp_NX)
        down_sums.add(grad_down_NX, mlp_NF, mlp_NX[:, self.mlp_size :])
        self.gate_up.border_grad(gate_up_NX)
        gate_up_sums.add(gate_up_NX, normed_NX[:, :size], normed_NX[:, size:])
        grad_normed_ND = self._empty(n_rows, size)
        self.gate_up.input_grad(gate_up_NX, grad_normed_ND)
        kernels.rms_norm_backward_add(grad_normed_ND, mid_ND, norm.weight, self.eps, grad_NX[:, :size])

    def _group_output(
        self, kept: LayerActivations, index: int, *, bulk: bool = False
    ) -> list[tuple[Tensor, torch.cuda.Event | None]]:
        """A group's attention output [Q, C] and log-sum-exp, on the device once their events have passed."""
        fetched = []
        for item, staging in ((kept.attention[index], self._outputs), (kept.lse[index], self._lse)):
            if not self.transfers.is_remote(item):
                fetched.append((item.data_TW, None))
                continue
            slot = index % len(staging.buffers)
            local = staging.buffers[slot][: item.data_TW.numel()].view(item.data_TW.shape)
            fetched.append((local, self.transfers.load(item, slice(None), local, staging.free[slot], bulk=bulk)))
        return fetched

    def _attention_backward(
        self,
        grad_QX: Tensor,
        kept: LayerActivations,
        first_output: list[tuple[Tensor, torch.cuda.Event | None]],
        sums: AdapterGradients,
        queries: Queries,
    ) -> None:
        bordered_QX = grad_QX[:, : self.out.n_out + self.out.extra]
        self.out.border_grad(bordered_QX)
        upcoming = first_output
        for index, (raw_TW, columns) in enumerate(self.qkv_store.groups(kept.staged_qkv, gradients=True)):
            current = upcoming
            upcoming = self._group_output(kept, index + 1) if index + 1 < len(self.groups) else []
            for _, event in current:
                self.transfers.wait(event)
            first = index * current[0][0].shape[1]
            self._group_backward(bordered_QX, raw_TW, columns, first, current[0][0], current[1][0], sums, queries)
            self._outputs.release(index)
            self._lse.release(index)

    def _group_backward(
        self,
        bordered_QX: Tensor,
        raw_TW: Tensor,
        columns: GroupColumns,
        first_feature: int,
        output_QC: Tensor,
        lse_HQ: Tensor,
        sums: AdapterGradients,
        queries: Queries,
    ) -> None:
        out, split = self.out, (columns.query_heads, self.head_size)
        features = slice(first_feature, first_feature + output_QC.shape[1])
        sums.add(bordered_QX, output_QC, out.input_border(output_QC, features), features)
        grad_output_QC = self._empty(*output_QC.shape)
        out.input_grad(bordered_QX, grad_output_QC, features)
        grads = block_attention.backward(
            self.backends, queries, grad_output_QC.unflatten(1, split), *self._group_qkv(raw_TW, columns),
            output_QC.unflatten(1, split), lse_HQ, self.scale,
        )  # fmt: skip
        kernels.norm_rope_backward(raw_TW, columns, self._norms(), self.eps, self.cos_TJ, self.sin_TJ, grads)

    def _qkv_backward(
        self, grad_NX: Tensor, packed_NW: Tensor, x_ND: Tensor, sums: AdapterGradients, *, wanted: bool
    ) -> None:
        """LoRA gradients, and unless nothing trains below this layer, the gradient of its input."""
        n_rows, size = x_ND.shape
        norm = self.layer.input_layernorm
        normed_NX = self._normed(x_ND, norm, self.qkv)
        self.qkv.border_input(normed_NX)
        self.qkv.border_grad(packed_NW)
        sums.add(packed_NW, normed_NX[:, :size], normed_NX[:, size:])
        if not wanted:
            return
        grad_normed_ND = self._empty(n_rows, size)
        self.qkv.input_grad(packed_NW, grad_normed_ND)
        kernels.rms_norm_backward_add(grad_normed_ND, x_ND, norm.weight, self.eps, grad_NX[:, :size])
