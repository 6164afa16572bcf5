"""Documents of rows: Parquet files, and Hugging Face data sets by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tasks.containers import one_line
from tasks.content_digest import file_blake3
from tasks.input_files import path_name
from tasks.sources import Document, SourceError
from tasks.sources.plain_values import plain

_ROWS = 32
"""In one document, so that few are in memory at a time."""


def parquet_documents(file: Path, blake3: str | None) -> Iterator[Document]:
    """Rows of a Parquet file; `blake3` is the file's, where it is known.

    Raises:
        SourceError: a time zone that is not known.
        pyarrow.ArrowException, OSError: damaged.
    """
    blake3 = blake3 or file_blake3(file)
    n_rows = 0
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=_ROWS):
            try:
                rows = plain(batch.to_pylist(maps_as_pydicts="lossy"))
            except LookupError as error:  # of the time zone
                raise SourceError(f"a time zone that is not known: {one_line(error)}") from error
            yield Document(path_name(file), blake3, "jsonl", rows, numbers=range(n_rows + 1, n_rows + len(rows) + 1))
            n_rows += len(rows)


_DAMAGE = (OSError, ValueError, TypeError, LookupError, RuntimeError, pa.ArrowException, yaml.YAMLError)
"""What loading a damaged data set raises: its files, the front matter of its card, its columns, its time zones."""


def dataset_documents(name: str) -> Iterator[Document]:
    """Rows of a Hugging Face data set, streamed: `owner/name` or a local folder, with an optional `:split`.

    Raises:
        SourceError: it cannot be loaded, or not to its end; rows given before that are good.
    """
    from datasets import exceptions, load_dataset  # slow to import, and rarely wanted

    location, _, split = name.partition(":")
    rows: list[Any] = []
    n_rows = 0
    problem = None

    def document() -> Document:
        return Document(f"hf:{name}", "", "jsonl", rows, numbers=range(n_rows - len(rows) + 1, n_rows + 1))

    try:
        for row in load_dataset(location, split=split or "train", streaming=True):
            rows.append(plain(row))
            n_rows += 1
            if len(rows) == _ROWS:
                yield document()
                rows = []
    except (*_DAMAGE, exceptions.DatasetsError) as error:
        problem = f"data set cannot be loaded: {type(error).__name__}: {one_line(error)}"
    if rows:
        yield document()
    if problem:
        raise SourceError(problem)
