"""Documents that are no single file: sessions kept as one file an event, and data sets by name."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.archives import MAX_DOCUMENT_BYTES
from tasks.input_files import path_name
from tasks.sessions import session_document
from tasks.sources import Document, SourceError


def store_documents(folder: Path, files: Iterable[Path]) -> Iterator[Document]:
    """An agent's session kept as one file an event: one document of the events, in the order given.

    Raises:
        SourceError: all events together are larger than a document may be.
    """

    def contents() -> Iterator[tuple[str, bytes | OSError]]:
        for file in files:
            try:
                yield file.name, file.read_bytes()
            except OSError as error:
                yield file.name, error

    yield session_document(path_name(folder), contents(), MAX_DOCUMENT_BYTES)


def dataset_documents(name: str) -> Iterator[Document]:
    """Rows of a Hugging Face data set, streamed: `owner/name` or a local folder, with an optional `:split`.

    Raises:
        SourceError: it cannot be loaded.
    """
    from datasets import load_dataset  # slow to import, and rarely wanted

    location, _, split = name.partition(":")
    rows: list[Any] = []
    try:
        for row in load_dataset(location, split=split or "train", streaming=True):
            rows.append(row)
            if len(rows) == 32:
                yield Document(f"hf:{name}", "", "jsonl", rows)
                rows = []
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise SourceError(f"data set cannot be loaded: {error}") from error
    if rows:
        yield Document(f"hf:{name}", "", "jsonl", rows)
