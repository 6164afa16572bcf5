"""Where kept activations live: on the device, or in one pinned host buffer with copies on side streams.

Shapes: T tokens, N tokens of a tile, W features.

PyTorch's own pinned allocator rounds sizes up to a power of two (110 GiB would take 128), so the host buffer is plain
memory registered with CUDA, exactly as large as the ledger says. On a CPU model everything is a plain tensor and a
"copy" is a copy or a view.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from schemas.errors import StageError

_ALIGN_BYTES = 4096


class HostPool:
    """One registered host buffer, kept between steps and grown when a longer branch needs it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.busy = False
        self._map: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, n_bytes: int) -> None:
        """Make room for n_bytes and forget what was there. StageError when the host refuses."""
        self._used_bytes = 0
        if n_bytes <= self.capacity_bytes:
            return
        self.release()
        self._map = mmap.mmap(-1, n_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to pin
        self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        if self.device.type == "cuda":
            self._buffer.fill_(0)  # many threads touch the pages; the driver would do it with one
            status = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), n_bytes, 0)  # type: ignore[union-attr]
            if int(status) != 0:
                self._buffer = torch.empty(0, dtype=torch.uint8)
                raise StageError(f"the host refused to pin {n_bytes / 2**30:.1f} GiB (CUDA error {int(status)})")

    def take(self, n_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A [rows, width] tensor inside the buffer. `reserve` must have made room."""
        n_bytes = n_rows * width * dtype.itemsize
        start = self._used_bytes
        self._used_bytes += slot_bytes(n_bytes)
        if self._used_bytes > self.capacity_bytes:
            raise StageError(f"host buffer of {self.capacity_bytes} bytes is too small for the plan")
        return self._buffer[start : start + n_bytes].view(dtype).view(n_rows, width)

    def release(self) -> None:
        """Unpin and free."""
        if self.capacity_bytes and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())  # type: ignore[union-attr]
        self._buffer, self._map = torch.empty(0, dtype=torch.uint8), None


def slot_bytes(n_bytes: int) -> int:
    """Bytes a tensor takes in the host buffer, alignment included."""
    return -(-n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Kept:
    """A full-length activation [T, W] kept for backward, with the event of its last write."""

    def __init__(self, data_TW: Tensor) -> None:
        self.data_TW = data_TW
        self.written: torch.cuda.Event | None = None


class Transfers:
    """Copies between the device and kept activations, on one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.in_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def is_remote(self, kept: Kept) -> bool:
        return kept.data_TW.device != self.device

    def write(self, kept: Kept, span: slice, source_NW: Tensor) -> torch.cuda.Event | None:
        """Store a tile. A remote copy reads source later: wait for the event before overwriting or freeing source."""
        if self.out_stream is None or not self.is_remote(kept):
            kept.data_TW[span].copy_(source_NW)
            return None
        self.out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out_stream):
            kept.data_TW[span].copy_(source_NW, non_blocking=True)
            kept.written = torch.cuda.Event()
            kept.written.record(self.out_stream)
        return kept.written

    def wait_written(self, kept: Kept | None) -> None:
        """Later work on the current stream starts only when all writes to `kept` so far are done."""
        if kept is not None and kept.written is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.written)

    def load(self, kept: Kept, span: slice, out_NW: Tensor) -> torch.cuda.Event | None:
        """Fetch a tile into out; the current stream must wait for the returned event before reading it."""
        if self.in_stream is None or not self.is_remote(kept):
            out_NW.copy_(kept.data_TW[span])
            return None
        self.in_stream.wait_stream(torch.cuda.current_stream(self.device))
        if kept.written is not None:
            self.in_stream.wait_event(kept.written)
        with torch.cuda.stream(self.in_stream):
            out_NW.copy_(kept.data_TW[span], non_blocking=True)
            loaded = torch.cuda.Event()
            loaded.record(self.in_stream)
            return loaded

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class TileReader:
    """Tiles of several kept activations in order, the next one on its way while this one is used.

    Making a reader starts its first fetch, so it can be made well before it is iterated. Tensors it yields are valid
    until the next tile is asked for.
    """

    def __init__(self, transfers: Transfers, kept: Sequence[Kept], spans: Sequence[slice]) -> None:
        self._transfers, self._kept, self._spans = transfers, list(kept), list(spans)
        rows = max(span.stop - span.start for span in self._spans)
        self._staging = [
            [
                torch.empty(rows, k.data_TW.shape[1], dtype=k.data_TW.dtype, device=transfers.device)
                if transfers.is_remote(k)
                else None
                for k in self._kept
            ]
            for _ in range(min(2, len(self._spans)))
        ]
        self._pending = self._fetch(0)

    def _fetch(self, index: int) -> list[tuple[Tensor, torch.cuda.Event | None]]:
        span, fetched = self._spans[index], []
        for kept, staging in zip(self._kept, self._staging[index % 2], strict=True):
            if staging is None:
                fetched.append((kept.data_TW[span], None))
            else:
                tile = staging[: span.stop - span.start]
                fetched.append((tile, self._transfers.load(kept, span, tile)))
        return fetched

    def __iter__(self) -> Iterator[tuple[slice, list[Tensor]]]:
        for index, span in enumerate(self._spans):
            current = self._pending
            if index + 1 < len(self._spans):
                self._pending = self._fetch(index + 1)
            for _, event in current:
                self._transfers.wait(event)
            yield span, [tile for tile, _ in current]
