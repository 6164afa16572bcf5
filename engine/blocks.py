"""One decoder layer, forward and backward written out, tile by tile.

Shapes: T tokens, N tokens of a tile, D hidden size, W packed width of q|k|v, F MLP size, G groups of heads,
S heads of a group (query, key, value), E head size, X extra (LoRA) columns, suffix X also for "bordered by them".

Forward keeps what the plan says. Backward turns the gradient of a layer's output, in place, into that of its input:
  1. MLP, by tiles: gate and up again (unless kept), then down, SwiGLU, gate/up and norm backward;
  2. attention, by groups of heads: gradient of the group's output from o_proj, attention backward, RoPE and head-norm
     backward written over the raw q, k, v;
  3. q, k, v projections and norm, by tiles.
The residual connections are the additions into that one gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import GroupColumns
from engine.linears import AdapterGradients
from engine.offload import Kept, Staging, TileReader
from engine.plan import FIELDS
from engine.workspace import MID_RING, LayerActivations, Workspace


class LayerForward(Workspace):
    """Forward of one layer at a time."""

    def forward(self, hidden_TD: Tensor, kept: LayerActivations | None, next_input: Kept | None) -> None:
        """Overwrite a layer's input by its output. `load` the layer first; kept=None keeps nothing."""
        kept = kept or LayerActivations()
        for span in self.spans:
            self._project_qkv(hidden_TD[span], span)
            if kept.qkv is not None:
                self.transfers.write(kept.qkv, span, self._qkv_TW[span])
        outputs = self._attend(kept)
        self.transfers.wait_written(kept.input)
        for index, span in enumerate(self.spans):
            mid_ND = self._ring_tile(index, span)
            self._mid(hidden_TD[span], [out[span] for out in outputs], mid_ND)
            if kept.mid is not None:
                self._ring_events[index % MID_RING] = self.transfers.write(kept.mid, span, mid_ND)
            self._mlp(mid_ND, hidden_TD[span], kept.gate_up, span)
            if next_input is not None:
                self.transfers.write(next_input, span, hidden_TD[span])
        if self._gate_up_TX is not None and kept.gate_up is not None and self.transfers.is_remote(kept.gate_up):
            # Only now: it then travels beside the next layer's attention, and no tile queues behind it.
            for span in self.spans:
                self._gate_up_written = self.transfers.write(kept.gate_up, span, self._gate_up_TX[span], bulk=True)
        self._wait_all(kept)

    def finish(self) -> None:
        """All copies to the host are done before the workspace may be freed."""
        self.transfers.wait(self._gate_up_written)


class LayerBackward(Workspace):
    """Backward of one layer at a time, last layer first, and what it needs computed again."""

    def prepare(self) -> None:
        """Buffers that kept activations arrive in; call once, before the first layer."""
        plan, rows, hidden = self.plan, self.spans[0].stop, self.hidden_size
        remote = self.device.type == "cuda"
        on_host = {field: remote and any(getattr(x, field) == "host" for x in plan.layers) for field in FIELDS}
        first = max(hidden * on_host["mid"], hidden * on_host["input"] + self.out.n_in * on_host["attention"])
        if remote and plan.scratch_attention and plan.layers[0].input == "host":
            first = hidden + self.out.n_in
        self._first = Staging(self.transfers, rows * first, self.dtype)
        self._inputs = Staging(self.transfers, rows * hidden * on_host["input"], self.dtype)
        heads = self.groups[0].query_heads
        grouped = on_host["attention"] or (plan.scratch_attention > 0 and on_host["input"])
        count = min(2, len(self.groups))
        size = self.n_tokens * heads * grouped
        self._outputs = Staging(self.transfers, size * self.head_size, self.dtype, count)
        self._lse = Staging(self.transfers, size, self.sum_dtype, count)
        self._free: torch.cuda.Event | None = self.transfers.mark()  # since when packed q|k|v may be overwritten
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

    def restore_attention(self, source: Kept, kept: LayerActivations) -> None:
        """Attention outputs again from the layer's input; leaves the packed q|k|v filled."""
        self._fill_qkv(source)
        outputs = self._attend(kept)  # alive until their copies are done
        self._wait_all(kept)
        del outputs

    def _fill_qkv(self, source: Kept) -> None:
        for span, (x_ND,) in TileReader(self._inputs, [source], self.spans):
            self._project_qkv(x_ND, span)

    def _mlp_reader(self, source: Kept, kept: LayerActivations) -> TileReader:
        first = [kept.mid] if kept.mid is not None else [source, *kept.attention]
        if kept.gate_up is not None and not self.transfers.is_remote(kept.gate_up):
            first.append(kept.gate_up)
        return TileReader(self._first, first, self.spans)

    def _fetch_gate_up(self, kept: LayerActivations) -> None:
        if kept.gate_up is None or self._gate_up_TX is None or not self.transfers.is_remote(kept.gate_up):
            return
        free = self.transfers.mark()
        self._fetched, self._gate_up_events = kept.gate_up, [
            self.transfers.load(kept.gate_up, span, self._gate_up_TX[span], free, bulk=True) for span in self.spans
        ]  # fmt: skip

    def _look_ahead(self, below: tuple[Kept | None, LayerActivations]) -> None:
        """Start fetching the first tiles of the layer below, unless something of it has to be computed again first."""
        source, kept = below
        if source is not None and (kept.mid is not None or kept.attention):
            self._upcoming = kept, self._mlp_reader(source, kept)

    def backward(
        self,
        grad_TX: Tensor,
        source: Kept,
        kept: LayerActivations,
        below: tuple[Kept | None, LayerActivations] | None,
        *,
        qkv_filled: bool,
    ) -> dict[int, Tensor]:
        """Turn d(loss)/d(output), the first D columns of grad_TX, into d(loss)/d(input); LoRA gradients by id.

        `source` is the layer's input and `below` the same pair of the next layer to come, whose first tiles travel
        while this one computes. `qkv_filled`: `restore_attention` ran for this layer just now.
        """
        sums = [AdapterGradients(pack, self.sum_dtype) for pack in (self.qkv, self.out, self.gate_up, self.down)]
        packed_TW, fetch_qkv, events = self._qkv_TW, False, []
        if kept.qkv is not None and not qkv_filled:
            fetch_qkv = self.transfers.is_remote(kept.qkv)
            packed_TW = packed_TW if fetch_qkv else kept.qkv.data_TW
        if kept.gate_up is not None and self._fetched is not kept.gate_up:
            self._fetch_gate_up(kept)
        upcoming, self._upcoming = self._upcoming, None
        reader = upcoming[1] if upcoming is not None and upcoming[0] is kept else self._mlp_reader(source, kept)
        first_output: list[tuple[Tensor, torch.cuda.Event | None]] = []
        for index, (span, tiles) in enumerate(reader):
            if fetch_qkv and kept.qkv is not None:
                events.append(self.transfers.load(kept.qkv, span, packed_TW[span], self._free))
            gate_up_NX = None
            if self.transfers.is_remote(kept.gate_up) and self._gate_up_TX is not None:
                self.transfers.wait(self._gate_up_events[index])
                gate_up_NX = self._gate_up_TX[span]
            elif kept.gate_up is not None:
                gate_up_NX = tiles.pop()
            mid_ND = tiles[0]
            if kept.mid is None:
                mid_ND = self._mid_ring[0][: span.stop - span.start]
                self._mid(tiles[0], tiles[1:], mid_ND)
            if index + 1 == len(self.spans):  # not earlier: it is large, and tiles would queue behind it
                first_output = self._group_output(kept, 0)
            self._mlp_backward(grad_TX[span], mid_ND, gate_up_NX, sums[2], sums[3])
        if below is not None:
            self._fetch_gate_up(below[1])
        if kept.qkv is None and not qkv_filled:
            self._fill_qkv(source)
        for event in events:
            self.transfers.wait(event)
        input_reader = TileReader(self._inputs, [source], self.spans)
        self._attention_backward(grad_TX, packed_TW, kept, first_output, sums[1])
        if below is not None:
            self._look_ahead(below)
        for span, (x_ND,) in input_reader:
            self._qkv_backward(grad_TX[span], packed_TW[span], x_ND, sums[0])
        self._free = self.transfers.mark()
        return {key: grad for total in sums for key, grad in total.finish().items()}

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

    def _group_output(self, kept: LayerActivations, index: int) -> list[tuple[Tensor, torch.cuda.Event | None]]:
        """A group's attention output [T, C] and log-sum-exp, on the device once their events have passed."""
        fetched = []
        for item, staging in ((kept.attention[index], self._outputs), (kept.lse[index], self._lse)):
            if not self.transfers.is_remote(item):
                fetched.append((item.data_TW, None))
                continue
            slot = index % len(staging.buffers)
            local = staging.buffers[slot].view(item.data_TW.shape)
            fetched.append((local, self.transfers.load(item, slice(None), local, staging.free[slot])))
        return fetched

    def _attention_backward(
        self,
        grad_TX: Tensor,
        packed_TW: Tensor,
        kept: LayerActivations,
        first_output: list[tuple[Tensor, torch.cuda.Event | None]],
        sums: AdapterGradients,
    ) -> None:
        bordered_TX = grad_TX[:, : self.out.n_out + self.out.extra]
        self.out.border_grad(bordered_TX)
        upcoming = first_output
        for index, columns in enumerate(self.groups):
            current = upcoming
            upcoming = self._group_output(kept, index + 1) if index + 1 < len(self.groups) else []
            for _, event in current:
                self.transfers.wait(event)
            self._group_backward(bordered_TX, packed_TW, columns, current[0][0], current[1][0], sums)
            self._outputs.release(index)
            self._lse.release(index)

    def _group_backward(
        self,
        bordered_TX: Tensor,
        packed_TW: Tensor,
        columns: GroupColumns,
        output_TC: Tensor,
        lse_HT: Tensor,
        sums: AdapterGradients,
    ) -> None:
        out, split = self.out, (columns.query_heads, self.head_size)
        features = slice(columns.query_column, columns.query_column + output_TC.shape[1])
        sums.add(bordered_TX, output_TC, out.input_border(output_TC, features), features)
        grad_output_TC = self._empty(*output_TC.shape)
        out.input_grad(bordered_TX, grad_output_TC, features)
        grads = self.backend.backward(
            grad_output_TC.unflatten(1, split), *self._group_qkv(packed_TW, columns),
            output_TC.unflatten(1, split), lse_HT, self.scale,
        )  # fmt: skip
        kernels.norm_rope_backward(packed_TW, columns, self._norms(), self.eps, self.cos_TJ, self.sin_TJ, grads)

    def _qkv_backward(self, grad_NX: Tensor, packed_NW: Tensor, x_ND: Tensor, sums: AdapterGradients) -> None:
        n_rows, size = x_ND.shape
        norm = self.layer.input_layernorm
        normed_NX = self._normed(x_ND, norm, self.qkv)
        self.qkv.border_input(normed_NX)
        self.qkv.border_grad(packed_NW)
        sums.add(packed_NW, normed_NX[:, :size], normed_NX[:, size:])
        grad_normed_ND = self._empty(n_rows, size)
        self.qkv.input_grad(packed_NW, grad_normed_ND)
        kernels.rms_norm_backward_add(grad_normed_ND, x_ND, norm.weight, self.eps, grad_NX[:, :size])
