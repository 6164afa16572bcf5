"""Documents that are no single file: sessions kept as one file an event."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.archives import MAX_DOCUMENT_BYTES
from tasks.input_files import path_name
from tasks.sessions import session_document
from tasks.sources import Document


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
