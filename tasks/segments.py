"""Rows of runs as they were read: segments, Arrow streams written once, one a night, and mapped when needed."""

import mmap
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from artifacts.store import file_sha256
from schemas.errors import ArtifactError
from schemas.tables import TRAJECTORIES
from tasks.columns import outcome_column

ROWS_PER_BATCH = 16
_MAX_OPEN = 8
_MAPPED_BYTES = 64 << 20


@dataclass(frozen=True)
class Segment:
    """A segment as the catalog knows it."""

    name: str
    n_rows: int
    n_bytes: int
    """What lies beyond was written by a night that was interrupted, and belongs to nobody."""
    sha256: str
    """Of the finished stream; empty while it is not finished."""


class Place(NamedTuple):
    """Where a run's row lies, and what the table says of the run in place of what the row says."""

    segment: str
    row: int
    status: str
    source: str
    score: float | None
    exit_status: str | None


class DamagedSegmentError(ArtifactError):
    """A segment that is gone or altered."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"{segment}: {reason}")
        self.segment = segment


@dataclass(frozen=True)
class _Mapped:
    pages: mmap.mmap
    table: pa.Table
    whole: Mapping[tuple[int, int], pa.RecordBatch]
    """Batches as they were written, by their first row and number of rows."""


def _map(folder: Path, segment: Segment) -> _Mapped:
    try:
        with (folder / segment.name).open("rb") as file:
            pages = mmap.mmap(file.fileno(), segment.n_bytes, access=mmap.ACCESS_READ)
        table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(pages))).read_all()
    except (OSError, ValueError) as error:  # pa.ArrowInvalid is a ValueError
        raise DamagedSegmentError(segment.name, str(error)) from error
    if table.num_rows != segment.n_rows:
        raise DamagedSegmentError(segment.name, f"{table.num_rows} rows, where there were {segment.n_rows}")
    whole, first = {}, 0
    for batch in table.to_batches():
        whole[first, batch.num_rows] = batch
        first += batch.num_rows
    return _Mapped(pages, table, whole)


class SegmentReader:
    """Rows out of segments. `verified`: the ones that need not be checked before they are first used.

    Raises:
        DamagedSegmentError: (from every method) a segment is gone or altered.
    """

    def __init__(self, folder: Path, segments: Mapping[str, Segment], verified: Iterable[str] = ()) -> None:
        self._folder, self._segments, self._verified = folder, segments, set(verified)
        self._open: OrderedDict[str, _Mapped] = OrderedDict()
        self._n_read = 0

    def verify(self, name: str) -> None:
        """Checks a segment, once; one that was not finished cannot be checked."""
        if name in self._verified:
            return
        segment = self._segments[name]
        try:
            if segment.sha256 and file_sha256(self._folder / name) != segment.sha256:
                raise DamagedSegmentError(name, "altered")
        except OSError as error:
            raise DamagedSegmentError(name, str(error)) from error
        self._verified.add(name)

    def _mapped(self, name: str) -> _Mapped:
        self.verify(name)
        if name not in self._open:
            self._open[name] = _map(self._folder, self._segments[name])
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def _let_go(self, n_bytes: int) -> None:
        """Mapped pages count as this process's memory: what was read is unmapped, and stays in the page cache."""
        self._n_read += n_bytes
        if self._n_read >= _MAPPED_BYTES:
            self._n_read = 0
            for mapped in self._open.values():
                mapped.pages.madvise(mmap.MADV_DONTNEED)

    def rows(self, segment: str, first: int, n_rows: int) -> pa.Table:
        """Rows [first, first + n_rows) of a segment, copied."""
        # slice before anything else: `take` on the whole table would copy all of it
        rows = self._mapped(segment).table.slice(first, n_rows).combine_chunks()
        self._let_go(rows.nbytes)
        return rows

    def _gathered(self, places: list[Place]) -> pa.RecordBatch:
        pieces = []
        for (segment, _), group in groupby(
            enumerate(places), key=lambda pair: (pair[1].segment, pair[1].row - pair[0])
        ):
            first, *others = [place for _, place in group]
            whole = self._mapped(segment).whole.get((first.row, 1 + len(others)))
            if whole is not None and whole.num_rows == len(places):
                return whole  # written as it is mapped
            pieces.append(self.rows(segment, first.row, 1 + len(others)))
        together = pa.concat_tables(pieces).combine_chunks()
        return together.take(list(range(len(places)))).to_batches()[0]

    def batches(self, batches: Iterator[list[Place]]) -> Iterator[pa.RecordBatch]:
        """A batch of the table for each list: the same bytes whichever segments the rows lie in."""
        for places in batches:
            gathered = self._gathered(places)
            joined = {
                "outcome": outcome_column([(place.status, place.source, place.score) for place in places]),
                "exit_status": pa.array([place.exit_status for place in places], pa.large_string()),
            }
            columns = [joined.get(name, gathered.column(name)) for name in TRAJECTORIES.names]
            yield pa.RecordBatch.from_arrays(columns, schema=TRAJECTORIES)
            self._let_go(gathered.nbytes)
