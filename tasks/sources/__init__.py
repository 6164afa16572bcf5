"""Readers of agent logs, one module a format. Detection is by content: the first adapter that knows it reads it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from schemas.trajectory import Trajectory
from tasks.content_digest import content_blake3
from tasks.sources import (
    adp,
    aider,
    anthropic_messages,
    atif,
    claude_code,
    codex,
    codex_exec,
    dataset_rows,
    debug_gym,
    gemini_cli,
    inspect_ai,
    langchain,
    mini_swe_agent,
    moatless,
    openai_chat,
    openhands,
    openhands_sdk,
    sharegpt,
    swe_agent,
    tau_bench,
    verifiers,
)
from tasks.sources.adapter import Adapter, Guarded
from tasks.sources.chat import looks_like_chat
from tasks.sources.document import Document, SourceError, read_document
from tasks.sources.plain_values import kind_of

ADAPTERS: tuple[Adapter, ...] = (
    mini_swe_agent.ADAPTER,
    tau_bench.ADAPTER,
    verifiers.ADAPTER,
    swe_agent.ADAPTER,
    dataset_rows.NEBIUS,
    dataset_rows.SWE_GYM,
    dataset_rows.SWE_SMITH,
    atif.ADAPTER,
    adp.ADAPTER,
    debug_gym.ADAPTER,
    inspect_ai.ADAPTER,
    moatless.ADAPTER,
    openhands.EVENTS,
    openhands.ROWS,
    openhands_sdk.EVENTS,
    openhands_sdk.LLM_LOG,
    codex.ADAPTER,
    codex_exec.ADAPTER,
    claude_code.ADAPTER,
    gemini_cli.ADAPTER,
    langchain.ADAPTER,
    sharegpt.ADAPTER,
    aider.ADAPTER,
    anthropic_messages.ADAPTER,
    openai_chat.ADAPTER,
)
"""In the order they are asked: the specific shapes before the general ones."""

BY_NAME = {adapter.name: adapter for adapter in ADAPTERS}


def find_adapter(document: Document, source_format: str = "auto") -> Adapter:
    """The adapter of a document.

    Raises:
        SourceError: no adapter knows it.
        KeyError: `source_format` is no format's name.
    """
    if source_format != "auto":
        return BY_NAME[source_format]
    failed = ""
    for adapter in ADAPTERS:
        try:
            if adapter.knows(document):
                return adapter
        except SourceError as error:  # the others may know it all the same
            failed = failed or f"; {error}"
    raise SourceError(f"{UNKNOWN_FORMAT}{failed}")


UNKNOWN_FORMAT = "no known log format"
_MAX_ODD_RECORDS = 32
"""So many records before the first that an adapter knows are looked past."""


def _objects_only(document: Document) -> tuple[Document, list[str]]:
    """The document without records that are no objects, and what these are. A conversation stays as it is: there each
    would be a turn.
    """
    records = document.records
    odd = [index for index, record in enumerate(records) if not isinstance(record, dict)]
    kept = [record for record in records if isinstance(record, dict)]
    if not odd or not kept or looks_like_chat(kept):
        return document, []
    said = [f"{document.place(index)}: expected an object, found {kind_of(records[index])}" for index in odd]
    return document.only(index for index, record in enumerate(records) if isinstance(record, dict)), said


def _readable_lines(document: Document, adapter: Adapter) -> tuple[Document, list[str]]:
    """The document without the lines that its adapter cannot read, and why it cannot."""
    if adapter.check is None:
        return document, []
    kept, said = [], []
    for index, record in enumerate(document.records):
        try:
            with Guarded(adapter.name):
                adapter.check(record)
            kept.append(index)
        except SourceError as error:
            said.append(f"{document.place(index)}: {error}")
    return (document.only(kept), said) if said and kept else (document, [])


def recognised(document: Document, source_format: str = "auto") -> tuple[Adapter, Document, list[str]]:
    """(the adapter, the document from the first record on that it knows, what is wrong with the records before).

    Raises:
        SourceError: no adapter knows any of the first records.
        KeyError: `source_format` is no format's name.
    """
    document, problems = _objects_only(document)
    try:
        adapter = find_adapter(document, source_format)
        document, unreadable = _readable_lines(document, adapter)
        return adapter, adapter.apart(document) if adapter.apart else document, problems + unreadable
    except SourceError:
        records = document.records
        for start in range(1, min(len(records), _MAX_ODD_RECORDS)):
            rest = document.only(range(start, len(records)))
            rest = replace(rest, kind="jsonl")  # a list of messages is no list of records
            may_begin = (adapter for adapter in ADAPTERS if adapter.by_record or document.kind == "jsonl")
            adapter = next((adapter for adapter in may_begin if _knows(adapter, rest)), None)
            if adapter is not None:
                before = [f"{document.place(index)}: {UNKNOWN_FORMAT}" for index in range(start)]
                return adapter, rest, problems + before
        raise


def _knows(adapter: Adapter, document: Document) -> bool:
    try:
        return adapter.knows(document)
    except SourceError:
        return False


def by_adapter(adapter: Adapter, document: Document) -> Iterator[tuple[Adapter, Document]]:
    """The document in pieces, each with the adapter that knows its records; `adapter` knows the first one. A data set
    can be put together from logs of several formats. Records with the same keys are of the same format.
    """
    records = document.records
    if not adapter.by_record or len(records) < 2 or looks_like_chat(records):
        yield adapter, document
        return
    known = {frozenset(document.first): adapter}

    def reader(index: int) -> Adapter:
        keys = frozenset(records[index]) if isinstance(records[index], dict) else frozenset[str]()
        if keys not in known:
            record = Document(document.path, document.blake3, "json", records[index])
            found = (other for other in ADAPTERS if other.by_record and _knows(other, record))
            known[keys] = next(found, adapter)  # which says what is wrong with it
        return known[keys]

    pieces = [(of_piece, list(indices)) for of_piece, indices in groupby(range(len(records)), reader)]
    for of_piece, indices in pieces:
        yield of_piece, document if len(pieces) == 1 else document.only(indices)


_SHAPED = tuple((adapter, adapter.shape) for adapter in ADAPTERS if adapter.shape is not None)


def load_document(data: bytes, path: str = "", *, blake3: str | None = None, source_format: str = "auto") -> Document:
    """Like `read_document`, without the parts of a log that the adapter of its format does not look at.

    Raises:
        SourceError: as `read_document`.
    """
    blake3 = blake3 or content_blake3(data)
    for adapter, shape in _SHAPED:
        if source_format not in ("auto", adapter.name):
            continue
        document = shape.read(data, path, blake3)
        if document is not None and _knows(adapter, document):
            return document
    return read_document(data, path, blake3=blake3)


def parse(data: bytes, path: str = "", source_format: str = "auto") -> list[Trajectory]:
    """bytes of one file -> its trajectories.

    Raises:
        SourceError: damaged beyond reading, or no known format.
    """
    adapter, document, _ = recognised(read_document(data, path), source_format)
    pieces = by_adapter(adapter, document) if source_format == "auto" else [(adapter, document)]
    return [run for of_piece, piece in pieces for run in of_piece.read_document(piece)]


__all__ = [
    "ADAPTERS",
    "BY_NAME",
    "Adapter",
    "Document",
    "SourceError",
    "by_adapter",
    "find_adapter",
    "load_document",
    "parse",
    "read_document",
    "recognised",
]
