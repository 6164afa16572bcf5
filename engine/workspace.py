"""Buffers and pieces of arithmetic that forward and backward of a decoder layer share.

Shapes: as in `engine.layer_backward`: T tokens, Q query rows, N rows of a tile, D hidden size, W packed width of q|k|v,
F MLP size, S heads of a group, E head size, J = E / 2, C features of a group's attention output, X bordered by LoRA
columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine import block_attention, kernels
from engine.block_attention import BlockBackends
from engine.kernels import GroupColumns
from engine.linears import PackedLinears, compute_dtype
from engine.offload import Kept, Transfers
from engine.plan import Dimensions, MemoryPlan
from engine.qkv import PackedQkv, QkvStore, StagedQkv
from engine.rope import forget_lengths
from engine.segments import Layout, Queries

MID_RING = 3  # tiles of the mid residual in flight to the host


@dataclasses.dataclass
class LayerActivations:
    """What one layer keeps (None, empty: recomputed). Attention output and log-sum-exp are per group of heads.

    qkv: one packed tensor; staged, one for each group. staged_qkv: where staged q|k|v are while the layer is at work,
    which is where they are kept, or scratch that all layers share.
    """

    input: Kept | None = None
    mid: Kept | None = None
    gate_up: Kept | None = None
    qkv: list[Kept] = dataclasses.field(default_factory=list)
    staged_qkv: list[Kept] = dataclasses.field(default_factory=list)
    attention: list[Kept] = dataclasses.field(default_factory=list)
    lse: list[Kept] = dataclasses.field(default_factory=list)


def tiles(n_rows: int, tile_rows: int) -> list[slice]:
    """Row ranges of at most tile_rows."""
    return [slice(start, min(start + tile_rows, n_rows)) for start in range(0, n_rows, tile_rows)]


class Workspace:
    """Buffers for the layers of one decoder and one layout, and the layer whose weights are loaded."""

    def __init__(
        self, decoder: Any, plan: MemoryPlan, layout: Layout, transfers: Transfers, backends: BlockBackends
    ) -> None:
        first, config, n_tokens = decoder.layers[0], decoder.config, layout.n_tokens
        self.plan, self.n_tokens, self.transfers, self.backends = plan, n_tokens, transfers, backends
        self.device, self.dtype = transfers.device, compute_dtype(first.self_attn.q_proj)
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self.spans = tiles(n_tokens, plan.tile_tokens)
        align = 64 if self.device.type == "cuda" else 1
        packs = [PackedLinears(modules, self.dtype, self.device, align) for modules in self._modules(first)]
        self.qkv, self.out, self.gate_up, self.down = packs
        self.hidden_size, self.mlp_size = config.hidden_size, self.down.n_in
        self.head_size: int = first.self_attn.head_dim
        self.query_heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = float(first.self_attn.scaling)
        self.eps = float(first.input_layernorm.variance_epsilon)
        self.groups = self._group_columns()
        store = StagedQkv if plan.staged_qkv else PackedQkv
        self.qkv_store: QkvStore = store(transfers, n_tokens, self.spans, self.qkv, self.groups)
        rows = self.spans[0].stop
        self._normed_NX = self._empty(rows, self.hidden_size + max(self.qkv.extra, self.gate_up.extra))
        self._gate_up_NX = self._empty(rows, self.gate_up.n_out + self.gate_up.extra)
        self._mlp_NX = self._empty(rows, self.mlp_size + self.down.extra)
        self._attended_NX = self._empty(rows, self.out.n_in + self.out.extra)
        self._mid_ring = [self._empty(rows, self.hidden_size) for _ in range(min(MID_RING, len(self.spans)))]
        self._ring_events: list[torch.cuda.Event | None] = [None] * MID_RING
        self._in_flight: list[Tensor] = []  # sources of copies to the host, alive until these are done
        # The wide projections travel whole: a layer's worth of compute hides their copy, a tile's worth does not.
        gate_up_on_host = transfers.apart and any(layer.gate_up == "host" for layer in plan.layers)
        width = self.gate_up.n_out + self.gate_up.extra
        self._gate_up_TX = self._empty(n_tokens, width) if gate_up_on_host else None
        self._gate_up_sent: list[tuple[slice, torch.cuda.Event | None]] = []  # rows that are on their way
        self._unsent: list[tuple[Kept, slice]] = []  # pieces of gate|up that have yet to go to the host
        positions_1T = torch.cat(
            [
                torch.arange(s.first_position, s.first_position + s.stop - s.start, device=self.device)
                for s in layout.segments
            ]
        )[None]
        probe = torch.empty(0, dtype=self.sum_dtype, device=self.device)
        forget_lengths(decoder)
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

    def _normed(self, x_ND: Tensor, norm: Any, pack: PackedLinears) -> Tensor:
        normed_NX = self._normed_NX[: x_ND.shape[0], : pack.n_in + pack.extra]
        kernels.rms_norm(x_ND, norm.weight, self.eps, normed_NX[:, : pack.n_in])
        return normed_NX

    def _project_qkv(self, x_ND: Tensor, span: slice, slots: list[Kept]) -> None:
        normed_NX = self._normed(x_ND, self.layer.input_layernorm, self.qkv)
        self.qkv.forward(normed_NX, self.qkv_store.tile(span))
        self.qkv_store.put(slots, span)

    def _mid(self, x_ND: Tensor, attention_N: list[Tensor], out_ND: Tensor) -> None:
        attended_NX = self._attended_NX[: x_ND.shape[0]]
        torch.cat(attention_N, dim=1, out=attended_NX[:, : self.out.n_in])
        self.out.forward(attended_NX, out_ND, residual_NO=x_ND)

    def _mlp(self, mid_ND: Tensor, out_ND: Tensor, gate_up: Kept | None, span: slice) -> None:
        normed_NX = self._normed(mid_ND, self.layer.post_attention_layernorm, self.gate_up)
        gate_up_NX = self._gate_up_NX[: mid_ND.shape[0]]
        if self._gate_up_TX is not None and self.transfers.is_remote(gate_up):
            for sent, event in self._gate_up_sent:  # a tile waits for its own rows only
                if sent.start < span.stop and span.start < sent.stop:
                    self.transfers.wait(event)
            gate_up_NX = self._gate_up_TX[span]
        elif gate_up is not None:
            gate_up_NX = gate_up.data_TW[span]
        self.gate_up.forward(normed_NX, gate_up_NX[:, : self.gate_up.n_out])
        mlp_NX = self._mlp_NX[: mid_ND.shape[0]]
        kernels.swiglu(gate_up_NX[:, : self.gate_up.n_out], mlp_NX[:, : self.mlp_size])
        self.down.forward(mlp_NX, out_ND, residual_NO=mid_ND)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        attn = self.layer.self_attn
        return (attn.q_norm.weight, attn.k_norm.weight) if hasattr(attn, "q_norm") else None

    def _group_qkv(self, packed_TW: Tensor, columns: GroupColumns) -> tuple[Tensor, Tensor, Tensor]:
        out_TSE = torch.empty(self.n_tokens, columns.heads, self.head_size, dtype=self.dtype, device=self.device)
        kernels.norm_rope(packed_TW, columns, self._norms(), self.eps, self.cos_TJ, self.sin_TJ, out_TSE)
        q_THE, k_TKE, v_TKE = out_TSE.split([columns.query_heads, columns.key_heads, columns.key_heads], dim=1)
        return q_THE, k_TKE, v_TKE

    def _attend(self, kept: LayerActivations, queries: Queries) -> Iterator[Tensor]:
        """Attention of every group from the raw q|k|v; outputs [Q, heads * E], kept where the plan says."""
        for index, (raw_TW, columns) in enumerate(self.qkv_store.groups(kept.staged_qkv, gradients=False)):
            out_QHE, lse_HQ = block_attention.forward(
                self.backends, queries, *self._group_qkv(raw_TW, columns), self.scale
            )  # q, k, v get no name, which would hold them beside the next group's
            output_QC = out_QHE.reshape(queries.n_rows, -1)
            if kept.attention:
                self.transfers.write(kept.attention[index], slice(None), output_QC)
                self.transfers.write(kept.lse[index], slice(None), lse_HQ)
                self._in_flight.append(lse_HQ)
            yield output_QC

    def _ring_tile(self, index: int, span: slice) -> Tensor:
        self.transfers.wait(self._ring_events[index % MID_RING])
        return self._mid_ring[index % len(self._mid_ring)][: span.stop - span.start]

    def _wait_all(self, kept: LayerActivations) -> None:
        """After this, attention's results and q|k|v have left the device and their buffers may be reused."""
        for item in (*kept.attention, *kept.lse, *kept.qkv):
            self.transfers.wait_written(item)
        self._in_flight.clear()
