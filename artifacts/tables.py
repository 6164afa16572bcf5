"""Reading and writing the Arrow tables: record batches out, memory-mapped rows in."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from artifacts.store import DigestedFile
from schemas.errors import ArtifactError
from schemas.refs import Ref
from schemas.tables import TABLES

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_BUFFER_BYTES = 1 << 20

ROWS_PER_BATCH = 64
"""Small enough that a batch of 80K-token rows stays under a few tens of megabytes."""


def buffered(sink: DigestedFile) -> pa.NativeFile:
    """A stream into the file that collects small pieces: Arrow writes a batch in a hundred, most of them small."""
    return pa.BufferedOutputStream(pa.PythonFile(sink, mode="w"), _BUFFER_BYTES)


def write_table(
    path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]], *, rows_per_batch: int = ROWS_PER_BATCH
) -> int:
    """Writes rows as an Arrow IPC stream, the form that `datasets.Dataset.from_file` opens; memory holds one batch.

    Returns:
        the number of rows written.

    Raises:
        pyarrow.ArrowInvalid: a row does not fit the schema.
    """
    iterator, n_rows = iter(rows), 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(iterator, rows_per_batch)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            n_rows += len(batch)
    return n_rows


def write_tables(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], *, rows_per_batch: int = ROWS_PER_BATCH
) -> int:
    """Like `write_table`, for rows that are Arrow already. How they are cut into tables leaves no trace in the file.

    Returns:
        the number of rows written.

    Raises:
        pyarrow.ArrowInvalid: a table has another schema.
    """
    waiting, n_rows = schema.empty_table(), 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            waiting = pa.concat_tables([waiting, table.select(schema.names).replace_schema_metadata(schema.metadata)])
            while waiting.num_rows >= rows_per_batch:
                writer.write_table(waiting.slice(0, rows_per_batch).combine_chunks())
                waiting = waiting.slice(rows_per_batch)
            n_rows += table.num_rows
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks())
    return n_rows


def open_table(source: Ref | Path) -> pa.Table:
    """Memory-maps a table; nothing is read until a column or row is.

    Raises:
        ArtifactError: the file is missing, is no whole Arrow stream, has another schema than this version writes, or is
            not of the reference's kind.
    """
    path = Path(source.path) if isinstance(source, Ref) else source
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - len(_END_OF_STREAM), 0))
            if file.read() != _END_OF_STREAM:  # a stream cut between two batches would read as a shorter table
                raise ArtifactError(f"{path}: not a whole Arrow stream")
        table = pa.ipc.open_stream(pa.memory_map(str(path), "r")).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(f"{path}: not a readable Arrow stream ({error})") from error
    name = (table.schema.metadata or {}).get(b"traceforge.table", b"").decode()
    expected = TABLES.get(name)
    if expected is None or not table.schema.equals(expected, check_metadata=True):
        difference = "" if expected is None else f": {_difference(table.schema, expected)}"
        raise ArtifactError(
            f"{path}: not a table that this version of traceforge writes (found {name or 'no name'!r}{difference})"
        )
    if isinstance(source, Ref) and name != source.kind:
        raise ArtifactError(f"{path}: a table of {name}, expected one of {source.kind}")
    return table


def _difference(found: pa.Schema, expected: pa.Schema) -> str:
    """The first thing in which a table's schema is not the expected one."""
    if missing := [name for name in expected.names if name not in found.names]:
        return f"no column {missing[0]}"
    if unknown := [name for name in found.names if name not in expected.names]:
        return f"unknown column {unknown[0]}"
    if twice := [name for name in expected.names if found.names.count(name) > 1]:
        return f"column {twice[0]} occurs twice"
    for field in expected:
        if not found.field(field.name).equals(field):
            return f"column {field.name} is {found.field(field.name).type}, expected {field.type}"
    if found.names != expected.names:
        return "its columns are in another order"
    return f"its metadata is {found.metadata}, expected {expected.metadata}"


def iter_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries, one batch in memory at a time."""
    for batch in table.to_batches():
        for index in range(batch.num_rows):
            yield batch.slice(index, 1).to_pylist()[0]
