"""Where kept activations live: on the device, or in one pinned host buffer with copies on side streams.

Shapes: T tokens, N tokens of a tile, W features.

PyTorch's own pinned allocator rounds sizes up to a power of two (110 GiB would take 128), so the host buffer is plain
memory registered with CUDA, exactly as large as the ledger says. On a CPU model the same buffer is used, not pinned,
and reading a tile is a view.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.host_memory import HostMemoryError, locked_limit_bytes
from schemas.errors import StageError

_ALIGN_BYTES = 4096


def numbered(device: torch.device, current: Callable[[], int] = torch.cuda.current_device) -> torch.device:
    """The device as its tensors name it: "cuda" is the current one, by its number."""
    return torch.device("cuda", current()) if device.type == "cuda" and device.index is None else device


class HostPool:
    """One registered host buffer, kept between steps and grown when a longer branch needs it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._owner: Callable[[], object | None] = lambda: None
        self._unpin: weakref.finalize | None = None
        self._map: mmap.mmap | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    @property
    def busy(self) -> bool:
        """Whether a branch that still has its backward to come keeps activations here."""
        return self._owner() is not None

    def lend(self, owner: object) -> None:
        """Busy until `release_owner`, or until owner is garbage (a graph that was dropped, a step that failed)."""
        self._owner = weakref.ref(owner)

    def release_owner(self) -> None:
        self._owner = lambda: None

    def reserve(self, n_bytes: int) -> None:
        """Make room for n_bytes and forget what was there. HostMemoryError when the host refuses."""
        self._used_bytes = 0
        if n_bytes <= self.capacity_bytes:
            return
        self.release()
        try:
            self._map = mmap.mmap(-1, n_bytes)
        except OSError as error:
            raise HostMemoryError(f"the host refused {n_bytes / 2**30:.1f} GiB ({error.strerror})") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to pin
        self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        if self.device.type == "cuda":
            self._buffer.fill_(0)  # many threads touch the pages; the driver would do it with one
            try:
                pin(self._buffer, torch.cuda.cudart())
            except HostMemoryError:
                self.release()
                raise
            self._unpin = weakref.finalize(self, _unpin, self._buffer, self.device)
            self._unpin.atexit = False  # the driver does it at exit

    def take(self, n_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A [rows, width] tensor inside the buffer. `reserve` must have made room."""
        n_bytes = n_rows * width * dtype.itemsize
        start = self._used_bytes
        self._used_bytes += slot_bytes(n_bytes)
        if self._used_bytes > self.capacity_bytes:
            raise StageError(f"host buffer of {self.capacity_bytes} bytes is too small for the plan")
        return self._buffer[start : start + n_bytes].view(dtype).view(n_rows, width)

    def release(self) -> None:
        """Unpin and free. Happens by itself when the pool is garbage."""
        if self._unpin is not None:
            self._unpin()
        self._unpin, self._buffer, self._map = None, torch.empty(0, dtype=torch.uint8), None


def pin(buffer: Tensor, runtime: Any) -> None:
    """Registers plain host memory with CUDA (`runtime`: torch.cuda.cudart()). HostMemoryError when it is refused."""
    status = runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(status) == 0:
        return
    limit_bytes = locked_limit_bytes()
    locked = "" if limit_bytes is None else f"; ulimit -l allows {limit_bytes / 2**20:,.0f} MiB to be locked"
    raise HostMemoryError(
        f"the host refused to pin {buffer.numel() / 2**30:.1f} GiB ({runtime.cudaGetErrorString(status)}){locked}"
    )


def _unpin(buffer: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[union-attr]


def slot_bytes(n_bytes: int) -> int:
    """Bytes a tensor takes in the host buffer, alignment included."""
    return -(-n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Kept:
    """A full-length activation [T, W] kept for backward, with the event of its last write."""

    def __init__(self, data_TW: Tensor) -> None:
        self.data_TW = data_TW
        self.written: torch.cuda.Event | None = None

    def reshaped(self, n_rows: int, width: int) -> Kept:
        """As many leading elements of the same memory, with another shape."""
        return Kept(self.data_TW.view(-1)[: n_rows * width].view(n_rows, width))


class Transfers:
    """Copies between the device and kept activations: a stream per direction, and one more each for bulk copies.

    The host issues work far ahead of the GPU, so a copy in must not wait for "everything issued so far": it waits for
    the event that freed its target. A copy out waits for what was issued last, which is what made its source.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.apart = device.type == "cuda"
        """Whether host and device memory are two, so that tiles need buffers to arrive in."""
        streams = [torch.cuda.Stream(device) for _ in range(4)] if device.type == "cuda" else [None] * 4
        self._out_stream, self._in_stream, self._bulk_out_stream, self._bulk_in_stream = streams

    def is_remote(self, kept: Kept | None) -> bool:
        return kept is not None and kept.data_TW.device != self.device

    def mark(self) -> torch.cuda.Event | None:
        """An event after all work issued so far on the current stream."""
        if self._in_stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def write(self, kept: Kept, span: slice, source_NW: Tensor, *, bulk: bool = False) -> torch.cuda.Event | None:
        """Store a tile. A remote copy reads source later: wait for the event before overwriting or freeing source."""
        stream = self._bulk_out_stream if bulk else self._out_stream
        if stream is None or not self.is_remote(kept):
            kept.data_TW[span].copy_(source_NW)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            kept.data_TW[span].copy_(source_NW, non_blocking=True)
            kept.written = torch.cuda.Event()
            kept.written.record(stream)
        return kept.written

    def wait_written(self, kept: Kept | None) -> None:
        """Later work on the current stream starts only when all writes to `kept` so far are done."""
        if kept is not None:
            self.wait(kept.written)

    def load(
        self, kept: Kept, span: slice, out_NW: Tensor, free: torch.cuda.Event | None, *, bulk: bool = False
    ) -> torch.cuda.Event | None:
        """Fetch a tile into out once `free` has passed; wait for the returned event before reading it."""
        stream = self._bulk_in_stream if bulk else self._in_stream
        if stream is None or not self.is_remote(kept):
            out_NW.copy_(kept.data_TW[span])
            return None
        for event in (free, kept.written):
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            out_NW.copy_(kept.data_TW[span], non_blocking=True)
            loaded = torch.cuda.Event()
            loaded.record(stream)
        return loaded

    def bulk_after_tiles(self) -> None:
        """Bulk copies in that are issued from now on start when all other copies in so far are done."""
        if self._bulk_in_stream is not None and self._in_stream is not None:
            self._bulk_in_stream.wait_stream(self._in_stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Later work on the current stream starts only after event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class Staging:
    """Device buffers that tiles from the host arrive in, in turn, each with the event after which it is free."""

    def __init__(self, transfers: Transfers, n_elements: int, dtype: torch.dtype, count: int = 2) -> None:
        self.transfers = transfers
        self.buffers = [torch.empty(n_elements, dtype=dtype, device=transfers.device) for _ in range(count)]
        self.free = [transfers.mark() for _ in range(count)]

    def release(self, index: int) -> None:
        """The buffer may be overwritten once all work issued so far is done."""
        self.free[index % len(self.free)] = self.transfers.mark()


class TileReader:
    """Tiles of several kept activations in order, the next ones on their way while one is used: a buffer each.

    Making a reader starts its first fetches, so it can be made well before it is iterated; iterate to the end. Tensors
    it yields are valid until the next tile is asked for.
    """

    def __init__(self, staging: Staging, kept: Sequence[Kept], spans: Sequence[slice]) -> None:
        self._staging, self._kept, self._spans = staging, list(kept), list(spans)
        self._ahead = len(staging.buffers) - 1
        self._pending = deque(self._fetch(index) for index in range(min(self._ahead, len(self._spans))))

    def _fetch(self, index: int) -> list[tuple[Tensor, torch.cuda.Event | None]]:
        transfers, span, fetched, start = self._staging.transfers, self._spans[index], [], 0
        slot = index % len(self._staging.buffers)
        for kept in self._kept:
            if not transfers.is_remote(kept):
                fetched.append((kept.data_TW[span], None))
                continue
            rows, width = span.stop - span.start, kept.data_TW.shape[1]
            tile = self._staging.buffers[slot][start : start + rows * width].view(rows, width)
            start += rows * width
            fetched.append((tile, transfers.load(kept, span, tile, self._staging.free[slot])))
        return fetched

    def __iter__(self) -> Iterator[tuple[slice, list[Tensor]]]:
        for index, span in enumerate(self._spans):
            current = self._pending.popleft()
            if index + self._ahead < len(self._spans):
                self._pending.append(self._fetch(index + self._ahead))
            for _, event in current:
                self._staging.transfers.wait(event)
            yield span, [tile for tile, _ in current]
            self._staging.release(index)
