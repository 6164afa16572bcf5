"""Where the raw q, k, v of the layer at work lie, and then their gradients: on the device, or staged through the host.

Shapes: T tokens, N tokens of a tile, X width of packed q|k|v bordered by LoRA columns, G width of q|k|v of one group of
heads.

Both stores are filled tile by tile, read (and in backward overwritten) group by group, and in backward read tile by
tile once more. On the device that is one tensor [T, X]. Staged, it is one host tensor [T, G] for each group: the device
holds two of them, the one at work and the next one on its way, and a few tiles. Copies are ordered by events alone:

  tile   projected -> split by groups into one of two tile buffers -> host; the buffer is free when that copy is done
  group  host (after all its tiles) -> one of two group buffers -> attention; free then, or in backward when the
         gradient that was written over it is back on the host
  tile   of the gradient, host (after its group) -> tile buffer -> packed for the projections' backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.kernels import GroupColumns
from engine.linears import PackedLinears
from engine.offload import Kept, Staging, TileReader, Transfers


class PackedQkv:
    """All of it on the device."""

    def __init__(
        self,
        transfers: Transfers,
        n_tokens: int,
        spans: Sequence[slice],
        qkv: PackedLinears,
        groups: list[GroupColumns],
    ) -> None:
        self._transfers, self._spans, self._groups, self._width = transfers, spans, groups, qkv.n_out
        self._packed_TX = torch.empty(
            n_tokens, qkv.n_out + qkv.extra, dtype=qkv.matrix.dtype, device=qkv.matrix.device
        )  # fmt: skip
        self._source_TX, self._fetching = self._packed_TX, False
        self._events: list[torch.cuda.Event | None] = []
        self._free: torch.cuda.Event | None = None  # since when it may be overwritten

    def tile(self, span: slice) -> Tensor:
        """Where the projections of these tokens are to be written: [N, q|k|v]."""
        return self._packed_TX[span, : self._width]

    def put(self, slots: list[Kept], span: slice) -> None:
        """The tile has been written; slots: where it is kept (none: nowhere)."""
        for slot in slots:
            self._transfers.write(slot, span, self._packed_TX[span])

    def begin(self, kept: list[Kept], *, filled: bool) -> None:
        """A layer's backward begins: it reads what was kept, unless it was `filled` again."""
        if kept and not filled:
            self._fetching = self._transfers.is_remote(kept[0])
            self._source_TX = self._packed_TX if self._fetching else kept[0].data_TW
            self._free = self._transfers.mark()  # not since the layer above: attention may have been restored in it

    def fetch(self, kept: list[Kept], spans: Sequence[slice]) -> None:
        """Start to bring these tiles of what was kept on the host."""
        for span in spans if self._fetching else ():
            self._events.append(self._transfers.load(kept[0], span, self._packed_TX[span], self._free))

    def groups(self, slots: list[Kept], *, gradients: bool) -> Iterator[tuple[Tensor, GroupColumns]]:
        """Raw q|k|v that hold each group's heads, and its columns there; gradients: to be overwritten by them."""
        for event in self._events:
            self._transfers.wait(event)
        self._events.clear()
        for columns in self._groups:
            yield self._source_TX, columns

    def gradients(self, slots: list[Kept]) -> Iterator[Tensor]:
        """Gradients of q|k|v, tile by tile [N, X], with room for the border."""
        for span in self._spans:
            yield self._source_TX[span]

    def end(self) -> None:
        """The layer's backward is issued."""
        self._source_TX, self._fetching = self._packed_TX, False


class StagedQkv:
    """On the host, with two groups and a few tiles on the device. Iterate its generators to the end."""

    def __init__(
        self,
        transfers: Transfers,
        n_tokens: int,
        spans: Sequence[slice],
        qkv: PackedLinears,
        groups: list[GroupColumns],
    ) -> None:
        dtype, rows, n_groups = qkv.matrix.dtype, spans[0].stop, len(groups)
        self._transfers, self._spans, self._groups, self._width = transfers, spans, groups, qkv.n_out
        self._shape = n_tokens, qkv.n_out // n_groups
        self._tile_NX = torch.empty(rows, qkv.n_out + qkv.extra, dtype=dtype, device=qkv.matrix.device)
        self._tiles = Staging(transfers, rows * qkv.n_out, dtype)
        self._in_groups = Staging(transfers, n_tokens * self._shape[1], dtype, min(2, n_groups))
        first = groups[0]
        keys_at = first.query_heads * first.head_size
        values_at = keys_at + first.key_heads * first.head_size
        self._columns = GroupColumns(first.head_size, first.query_heads, first.key_heads, 0, keys_at, values_at)
        self._n_put = 0

    def tile(self, span: slice) -> Tensor:
        return self._tile_NX[: span.stop - span.start, : self._width]

    def _parts(self, tile_NX: Tensor, columns: GroupColumns) -> list[Tensor]:
        queries, keys = columns.query_heads * columns.head_size, columns.key_heads * columns.head_size
        starts = ((columns.query_column, queries), (columns.key_column, keys), (columns.value_column, keys))
        return [tile_NX[:, start : start + width] for start, width in starts]

    def put(self, slots: list[Kept], span: slice) -> None:
        """The tile has been written; it goes to the host."""
        tile_NX, buffer = self.tile(span), self._n_put % len(self._tiles.buffers)
        self._n_put += 1
        self._transfers.wait(self._tiles.free[buffer])
        pieces = self._tiles.buffers[buffer][: tile_NX.numel()].view(len(slots), tile_NX.shape[0], -1)
        for piece_NG, columns in zip(pieces, self._groups, strict=True):
            torch.cat(self._parts(tile_NX, columns), dim=1, out=piece_NG)
        for piece_NG, slot in zip(pieces, slots, strict=True):
            self._tiles.free[buffer] = self._transfers.write(slot, span, piece_NG)

    def begin(self, kept: list[Kept], *, filled: bool) -> None:
        """Nothing to prepare: groups come from where they were put."""

    def fetch(self, kept: list[Kept], spans: Sequence[slice]) -> None:
        """Groups are fetched when their turn is near."""

    def _fetch(self, slots: list[Kept], index: int) -> tuple[Tensor, torch.cuda.Event | None]:
        buffer = index % len(self._in_groups.buffers)
        raw_TG = self._in_groups.buffers[buffer].view(self._shape)
        return raw_TG, self._transfers.load(slots[index], slice(None), raw_TG, self._in_groups.free[buffer])

    def groups(self, slots: list[Kept], *, gradients: bool) -> Iterator[tuple[Tensor, GroupColumns]]:
        upcoming = self._fetch(slots, 0)
        for index, slot in enumerate(slots):
            raw_TG, arrived = upcoming
            if index + 1 < len(slots):
                upcoming = self._fetch(slots, index + 1)
            self._transfers.wait(arrived)
            yield raw_TG, self._columns
            if gradients:
                written = self._transfers.write(slot, slice(None), raw_TG)
                self._in_groups.free[index % len(self._in_groups.buffers)] = written
            else:
                self._in_groups.release(index)

    def gradients(self, slots: list[Kept]) -> Iterator[Tensor]:
        for span, pieces in TileReader(self._tiles, slots, self._spans):
            tile_NX = self._tile_NX[: span.stop - span.start]
            for piece_NG, columns in zip(pieces, self._groups, strict=True):
                for part_N, mine_N in zip(
                    self._parts(tile_NX, columns), self._parts(piece_NG, self._columns), strict=True
                ):
                    part_N.copy_(mine_N)
            yield tile_NX

    def end(self) -> None:
        """Nothing is held over."""


QkvStore = PackedQkv | StagedQkv
