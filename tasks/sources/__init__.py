"""Readers of agent logs, one module a format. Detection is by content: the first adapter that knows it reads it."""

from schemas.trajectory import Trajectory
from tasks.content_digest import content_blake3
from tasks.sources import (
    adp,
    aider,
    anthropic_messages,
    atif,
    claude_code,
    codex,
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
from tasks.sources.base import Adapter
from tasks.sources.document import Document, SourceError, read_document

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
    codex.EXEC,
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
    for adapter in ADAPTERS:
        if adapter.detect(document):
            return adapter
    raise SourceError("no known log format")


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
        if document is not None and adapter.detect(document):
            return document
    return read_document(data, path, blake3=blake3)


def parse(data: bytes, path: str = "", source_format: str = "auto") -> list[Trajectory]:
    """bytes of one file -> its trajectories.

    Raises:
        SourceError: damaged beyond reading, or no known format.
    """
    document = read_document(data, path)
    return find_adapter(document, source_format).read_document(document)


__all__ = [
    "ADAPTERS",
    "BY_NAME",
    "Adapter",
    "Document",
    "SourceError",
    "find_adapter",
    "load_document",
    "parse",
    "read_document",
]
