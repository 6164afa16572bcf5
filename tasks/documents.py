"""Documents that are no single file: sessions kept as one file an event, and data sets by name."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.archives import MAX_DOCUMENT_BYTES
from tasks.input_files import path_name
from tasks.sources import Document, SourceError, read_document


def store_documents(folder: Path, files: Iterable[Path]) -> Iterator[Document]:
    """An agent's session kept as one file an event: one document of the events, in the order given.

    Raises:
        SourceError: all events together are larger than a document may be.
    """
    digest, events, problems = hashlib.sha256(), [], []
    n_bytes = n_replaced = 0
    for file in files:
        try:
            data = file.read_bytes()
            digest.update(data)
            event = read_document(data, path_name(file))
        except OSError as error:
            problems.append(f"{file.name}: cannot be read: {error.strerror or error}")
            continue
        except SourceError as error:
            problems.append(f"{file.name}: {error}")
            continue
        events += event.records
        n_replaced += event.n_replaced
        n_bytes += len(data)
        if n_bytes > MAX_DOCUMENT_BYTES:
            raise SourceError(f"a session larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    yield Document(path_name(folder), digest.hexdigest(), "jsonl", events, tuple(problems), n_replaced)


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
