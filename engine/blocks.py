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

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.attention import AttentionBackend
from engine.kernels import GroupColumns
from engine.linears import AdapterGradients, PackedLinears, compute_dtype
from engine.offload import Kept, TileReader, Transfers
from engine.plan import Dimensions, MemoryPlan

_MID_RING = 3  # tiles of the mid residual in flight to the host


@dataclasses.dataclass
class LayerActivations:
    """What one layer keeps (None: recomputed). Attention output and log-sum-exp are per group of heads."""

    input: Kept | None = None
    mid: Kept | None = None
    qkv: Kept | None = None
    gate_up: Kept | None = None
    attention: list[Kept] = dataclasses.field(default_factory=list)
    lse: list[Kept] = dataclasses.field(default_factory=list)


class LayerWalk:
    """Workspace and arithmetic for the layers of one decoder at one length."""

    def __init__(
        self, decoder: Any, plan: MemoryPlan, n_tokens: int, transfers: Transfers, backend: AttentionBackend
    ) -> None:
        first, config = decoder.layers[0], decoder.config
        self.plan, self.n_tokens, self.transfers, self.backend = plan, n_tokens, transfers, backend
        self.device, self.dtype = transfers.device, compute_dtype(first.self_attn.q_proj)
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self.spans = [
            slice(start, min(start + plan.tile_tokens, n_tokens)) for start in range(0, n_tokens, plan.tile_tokens)
        ]
        align = 64 if self.device.type == "cuda" else 1
        packs = [PackedLinears(modules, self.dtype, self.device, align) for modules in self._modules(first)]
        self.qkv, self.out, self.gate_up, self.down = packs
        self.hidden_size, self.mlp_size = config.hidden_size, self.down.n_in
        self.head_size: int = first.self_attn.head_dim
        self.query_heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = float(first.self_attn.scaling)
        self.eps = float(first.input_layernorm.variance_epsilon)
        self.groups = self._group_columns()
        self._qkv_TW = self._empty(n_tokens, self.qkv.n_out + self.qkv.extra)
        rows = self.spans[0].stop
        self._normed_NX = self._empty(rows, self.hidden_size + max(self.qkv.extra, self.gate_up.extra))
        self._gate_up_NX = self._empty(rows, self.gate_up.n_out + self.gate_up.extra)
        self._mlp_NX = self._empty(rows, self.mlp_size + self.down.extra)
        self._attended_NX = self._empty(rows, self.out.n_in + self.out.extra)
        self._mid_ring = [self._empty(rows, self.hidden_size) for _ in range(min(_MID_RING, len(self.spans)))]
        self._ring_events: list[torch.cuda.Event | None] = [None] * _MID_RING
        self._in_flight: list[Tensor] = []  # sources of copies to the host, alive until these are done
        positions_1T = torch.arange(n_tokens, device=self.device)[None]
        probe = torch.empty(0, dtype=self.sum_dtype, device=self.device)
        cos_1TE, sin_1TE = decoder.rotary_emb(probe, positions_1T)
        half = self.head_size // 2
        self.cos_TJ, self.sin_TJ = cos_1TE[0, :, :half].contiguous(), sin_1TE[0, :, :half].contiguous()
        self.sizes = Dimensions(
            n_layers=len(decoder.layers), hidden_size=self.hidden_size, mlp_size=self.mlp_size,
            vocab_size=config.vocab_size, n_query_heads=self.query_heads, n_key_heads=self.key_heads,
            head_size=self.head_size, itemsize=self.dtype.itemsize, extra_qkv=self.qkv.extra,
            extra_out=self.out.extra, extra_gate_up=self.gate_up.extra, extra_down=self.down.extra,
        )  # fmt: skip
        self.grad_width = self.hidden_size + max(self.out.extra, self.down.extra)

    @staticmethod
    def _modules(layer: Any) -> list[list[Any]]:
        attn, mlp = layer.self_attn, layer.mlp
        return [[attn.q_proj, attn.k_proj, attn.v_proj], [attn.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]

    def _group_columns(self) -> list[GroupColumns]:
        n_groups, size = self.plan.head_groups, self.head_size
        query, key = self.query_heads // n_groups, self.key_heads // n_groups
        key_start = self.query_heads * size
        value_start = key_start + self.key_heads * size
        return [
            GroupColumns(
                head_size=size, query_heads=query, key_heads=key, query_column=g * query * size,
                key_column=key_start + g * key * size, value_column=value_start + g * key * size,
            )
            for g in range(n_groups)
        ]  # fmt: skip

    def _empty(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)

    def load(self, layer: Any) -> None:
        """Dequantise the layer's weights, once for this pass over it."""
        self.layer = layer
        for pack, modules in zip((self.qkv, self.out, self.gate_up, self.down), self._modules(layer), strict=True):
            pack.load(modules)

    # -- pieces used in both directions --------------------------------------------------------------------------

    def _normed(self, x_ND: Tensor, norm: Any, pack: PackedLinears) -> Tensor:
        normed_NX = self._normed_NX[: x_ND.shape[0], : pack.n_in + pack.extra]
        kernels.rms_norm(x_ND, norm.weight, self.eps, normed_NX[:, : pack.n_in])
        return normed_NX

    def _project_qkv(self, x_ND: Tensor, span: slice) -> None:
        normed_NX = self._normed(x_ND, self.layer.input_layernorm, self.qkv)
        self.qkv.forward(normed_NX, self._qkv_TW[span, : self.qkv.n_out])

    def _mid(self, x_ND: Tensor, attention_N: list[Tensor], out_ND: Tensor) -> None:
        attended_NX = self._attended_NX[: x_ND.shape[0]]
        torch.cat(attention_N, dim=1, out=attended_NX[:, : self.out.n_in])
        self.out.forward(attended_NX, out_ND, residual_NO=x_ND)

    def _mlp(self, mid_ND: Tensor, out_ND: Tensor, gate_up: Kept | None, span: slice) -> None:
        normed_NX = self._normed(mid_ND, self.layer.post_attention_layernorm, self.gate_up)
        gate_up_NX = self._gate_up_NX[: mid_ND.shape[0]]
        self.gate_up.forward(normed_NX, gate_up_NX[:, : self.gate_up.n_out])
        if gate_up is not None:
            self.transfers.write(gate_up, span, gate_up_NX)
        mlp_NX = self._mlp_NX[: mid_ND.shape[0]]
        kernels.swiglu(gate_up_NX[:, : self.gate_up.n_out], mlp_NX[:, : self.mlp_size])
        self.down.forward(mlp_NX, out_ND, residual_NO=mid_ND)
        self.transfers.wait_written(gate_up)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        attn = self.layer.self_attn
        return (attn.q_norm.weight, attn.k_norm.weight) if hasattr(attn, "q_norm") else None

    def _group_qkv(self, packed_TW: Tensor, columns: GroupColumns) -> tuple[Tensor, Tensor, Tensor]:
        out_TSE = torch.empty(self.n_tokens, columns.heads, self.head_size, dtype=self.dtype, device=self.device)
        kernels.norm_rope(packed_TW, columns, self._norms(), self.eps, self.cos_TJ, self.sin_TJ, out_TSE)
        q_THE, k_TKE, v_TKE = out_TSE.split([columns.query_heads, columns.key_heads, columns.key_heads], dim=1)
        return q_THE, k_TKE, v_TKE

    def _attend(self, kept: LayerActivations) -> list[Tensor]:
        """Attention of every group from the packed q|k|v; outputs [T, heads * E], kept where the plan says."""
        outputs = []
        for index, columns in enumerate(self.groups):
            out_THE, lse_HT = self.backend.forward(*self._group_qkv(self._qkv_TW, columns), self.scale)
            outputs.append(out_THE.reshape(self.n_tokens, -1))
            if kept.attention:
                self.transfers.write(kept.attention[index], slice(None), outputs[-1])
                self.transfers.write(kept.lse[index], slice(None), lse_HT)
                self._in_flight.append(lse_HT)
        return outputs

    # -- forward -------------------------------------------------------------------------------------------------

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
                self._ring_events[index % _MID_RING] = self.transfers.write(kept.mid, span, mid_ND)
            self._mlp(mid_ND, hidden_TD[span], kept.gate_up, span)
            if next_input is not None:
                self.transfers.write(next_input, span, hidden_TD[span])
        self._wait_all(kept)

    def _ring_tile(self, index: int, span: slice) -> Tensor:
        self.transfers.wait(self._ring_events[index % _MID_RING])
        return self._mid_ring[index % len(self._mid_ring)][: span.stop - span.start]

    def _wait_all(self, kept: LayerActivations) -> None:
        """After this, what is kept has left the device and its sources may be reused."""
        for item in (*kept.attention, *kept.lse, kept.qkv, kept.mid):
            self.transfers.wait_written(item)
        self._in_flight.clear()

    def restore_output(self, source: Kept, kept: LayerActivations, output: Kept) -> None:
        """The layer's output from its input and its kept attention output: o_proj and MLP only."""
        for index, (span, (x_ND, *attention)) in enumerate(
            TileReader(self.transfers, [source, *kept.attention], self.spans)
        ):
            mid_ND = self._ring_tile(index, span)
            self._mid(x_ND, attention, mid_ND)
            self._mlp(mid_ND, mid_ND, None, span)
            self._ring_events[index % _MID_RING] = self.transfers.write(output, span, mid_ND)

    def restore_attention(self, source: Kept, kept: LayerActivations) -> None:
        """Attention outputs again from the layer's input; leaves the packed q|k|v filled."""
        self._fill_qkv(source)
        outputs = self._attend(kept)  # alive until their copies are done
        self._wait_all(kept)
        del outputs

    def _fill_qkv(self, source: Kept) -> None:
        for span, (x_ND,) in TileReader(self.transfers, [source], self.spans):
            self._project_qkv(x_ND, span)

    # -- backward ------------------------------------------------------------------------------------------------

    def mlp_reader(self, source: Kept, kept: LayerActivations) -> TileReader:
        """Starts fetching what step 1 of backward reads; may be called before the layer is loaded."""
        first = [kept.mid] if kept.mid is not None else [source, *kept.attention]
        if kept.gate_up is not None:
            first.append(kept.gate_up)
        return TileReader(self.transfers, first, self.spans)

    def backward(
        self,
        grad_TX: Tensor,
        source: Kept,
        kept: LayerActivations,
        reader: TileReader,
        *,
        qkv_filled: bool,
        prefetch: Callable[[], None],
    ) -> dict[int, Tensor]:
        """Turn d(loss)/d(output), the first D columns of grad_TX, into d(loss)/d(input); LoRA gradients by id.

        `source` is the layer's input, `reader` its `mlp_reader`; `prefetch` is called before step 3, so that the next
        layer's first tiles travel meanwhile.
        """
        sums = [AdapterGradients(pack, self.sum_dtype) for pack in (self.qkv, self.out, self.gate_up, self.down)]
        packed_TW, fetch_qkv, events = self._qkv_TW, False, []
        if kept.qkv is not None and not qkv_filled:
            fetch_qkv = self.transfers.is_remote(kept.qkv)
            packed_TW = packed_TW if fetch_qkv else kept.qkv.data_TW
        for span, tiles in reader:
            if fetch_qkv and kept.qkv is not None:
                events.append(self.transfers.load(kept.qkv, span, packed_TW[span]))
            gate_up_NX = tiles.pop() if kept.gate_up is not None else None
            mid_ND = tiles[0]
            if kept.mid is None:
                mid_ND = self._mid_ring[0][: span.stop - span.start]
                self._mid(tiles[0], tiles[1:], mid_ND)
            self._mlp_backward(grad_TX[span], mid_ND, gate_up_NX, sums[2], sums[3])
        if kept.qkv is None and not qkv_filled:
            self._fill_qkv(source)
        for event in events:
            self.transfers.wait(event)
        input_reader = TileReader(self.transfers, [source], self.spans)
        self._attention_backward(grad_TX, packed_TW, kept, sums[1])
        prefetch()
        for span, (x_ND,) in input_reader:
            self._qkv_backward(grad_TX[span], packed_TW[span], x_ND, sums[0])
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
        for item in (kept.attention[index], kept.lse[index]):
            if self.transfers.is_remote(item):
                local = torch.empty_like(item.data_TW, device=self.device)
                fetched.append((local, self.transfers.load(item, slice(None), local)))
            else:
                fetched.append((item.data_TW, None))
        return fetched

    def _attention_backward(
        self, grad_TX: Tensor, packed_TW: Tensor, kept: LayerActivations, sums: AdapterGradients
    ) -> None:
        out = self.out
        bordered_TX = grad_TX[:, : out.n_out + out.extra]
        out.border_grad(bordered_TX)
        upcoming = self._group_output(kept, 0)
        for index, columns in enumerate(self.groups):
            current = upcoming
            upcoming = self._group_output(kept, index + 1) if index + 1 < len(self.groups) else []
            for _, event in current:
                self.transfers.wait(event)
            (output_TC, _), (lse_HT, _) = current
            features = slice(columns.query_column, columns.query_column + output_TC.shape[1])
            sums.add(bordered_TX, output_TC, out.input_border(output_TC, features), features)
            grad_output_TC = self._empty(*output_TC.shape)
            out.input_grad(bordered_TX, grad_output_TC, features)
            split = (columns.query_heads, self.head_size)
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
