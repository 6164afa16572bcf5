"""Reading half of ingestion: files -> runs, redacted, in segments that the catalog knows."""

import gc
import posixpath
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from itertools import islice
from pathlib import Path

import pyarrow as pa
from msgspec.structs import replace

from artifacts.store import DigestedFile
from artifacts.tables import buffered
from schemas.config import SourceConfig
from schemas.tables import TRAJECTORIES
from tasks.archives import file_documents
from tasks.catalog import Catalog
from tasks.catalog_rows import FileNotes, RunEntry
from tasks.columns import record_batch
from tasks.containers import ReadError, Unreadable
from tasks.documents import store_documents
from tasks.input_files import DigestBook, InputFile, unreadable
from tasks.redact import Redactor, redact
from tasks.row_documents import dataset_documents
from tasks.segments import ROWS_PER_BATCH, Segment
from tasks.sources import Adapter, Document, SourceError, by_adapter, recognised
from tasks.sources.adapter import Guarded
from tasks.sources.base import digest
from tasks.sources.draft import Run
from tasks.sources.side_files import SideFact, read_side_file

_REASON_CHARS = 300
_RECORDED_RUNS = 4096
_RECORDED_CHARS = 64 << 20
"""After so many the catalog is brought up to date: an interrupted night loses no more."""


@dataclass
class _Read:
    """What one file gives, gathered document by document."""

    digest: str | None = None
    """Of a file that was changed a moment ago: before it was read."""
    was_read: bool = True
    """Whether the system gave its bytes."""
    facts: list[SideFact] = field(default_factory=list)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    redactions: Counter[str] = field(default_factory=Counter)
    n_replaced: int = 0
    entries: list[RunEntry] = field(default_factory=list)
    openings: list[tuple[str, int]] = field(default_factory=list)

    def notes(self, config: SourceConfig) -> FileNotes:
        facts = [
            {**asdict(fact), "outcome": fact.outcome.model_dump() if fact.outcome else None} for fact in self.facts
        ]
        quarantined = [(what, _told(reason, config)) for what, reason in self.quarantined]
        damaged = [(what, _told(reason, config)) for what, reason in self.damaged]
        return FileNotes(facts, quarantined, damaged, dict(self.redactions), self.n_replaced)


def _told(reason: str, config: SourceConfig) -> str:
    """The reason, which may quote the log, as it may be written down: redacted first and cut then, since no pattern
    knows half a token. The paths beside it stay: they are for finding the files.
    """
    told = Redactor().text(reason) if config.redact else reason
    return told if len(told) <= _REASON_CHARS else f"{told[:_REASON_CHARS]}…"


def _read_records(adapter: Adapter, document: Document, read: _Read) -> Iterator[Run]:
    """The document's runs. Where every record is a run of its own, a bad one costs only itself."""
    try:
        yield from adapter.read_runs(document)
        return
    except SourceError as error:
        if not adapter.by_record or len(document.records) < 2:
            raise
        first_error = str(error)  # the error itself would hold this frame, and the document
    n_good = 0
    for index, record in enumerate(document.records):
        try:
            runs = adapter.read_runs(Document(document.path, document.blake3, "json", record))
        except SourceError as error:
            read.damaged.append((document.path, f"{document.place(index)}: {error}"))
            continue
        n_good += len(runs)
        yield from runs
    if not n_good:
        raise SourceError(first_error)


def _piece_runs(adapter: Adapter, piece: Document, read: _Read, *, alone: bool) -> Iterator[Run]:
    """The runs of a piece of a document; a bad piece costs only itself, unless it is the whole."""
    try:
        yield from _read_records(adapter, piece, read)
    except SourceError as error:
        if alone:
            raise
        if len(piece.records) == 1:  # of several, each was told
            read.damaged.append((piece.path, f"{piece.place(0)}: {error}"))


def _with_run(run: Run) -> Run:
    """Where the log names no run, the folder that holds the run's files does."""
    if run.run_id is not None:
        return run
    folder = posixpath.dirname(run.source_path)
    if posixpath.basename(folder).startswith(run.task_id):
        folder = posixpath.dirname(folder)
    return replace(run, run_id=posixpath.basename(folder) or None)


def _document_runs(document: Document, config: SourceConfig, read: _Read) -> Iterator[tuple[Adapter, Run, Run]]:
    """(adapter, the run as it is written, the run under its own names: side files are joined by these)."""
    read.damaged += [(document.path, problem) for problem in document.problems]
    read.n_replaced += document.n_replaced
    if not document.value and document.problems:
        return
    try:
        with Guarded("side file"):
            facts = read_side_file(document)
        if facts is not None:
            read.facts += facts
            if not facts:
                read.facts.append(SideFact(document.path, "", None))  # recognised, with nothing to join
            return
        adapter, document, problems = recognised(document, config.format)
        read.damaged += [(document.path, problem) for problem in problems]
        pieces = list(by_adapter(adapter, document)) if config.format == "auto" else [(adapter, document)]
        for of_piece, piece in pieces:
            for run in _piece_runs(of_piece, piece, read, alone=len(pieces) == 1):
                named = run = _with_run(run)
                if config.redact:
                    run, counts = redact(run)
                    read.redactions.update(counts)
                yield of_piece, run, named
    except SourceError as error:
        read.quarantined.append((document.path, str(error)))


def _documents(file: InputFile, config: SourceConfig, blake3: str | None) -> Iterator[Document | Unreadable]:
    if file.dataset:
        return dataset_documents(file.dataset)
    if file.events:
        return store_documents(file.path, file.events)
    return file_documents(file.path, config.format, blake3)


def _file_runs(
    file: InputFile, config: SourceConfig, read: _Read, blake3: str | None
) -> Iterator[tuple[Adapter, Run, Run]]:
    if file.problem:
        read.quarantined.append((file.name, file.problem))
        return
    try:
        for document in _documents(file, config, blake3):
            if isinstance(document, Unreadable):
                read.quarantined.append((document.path, document.reason))
            else:
                yield from _document_runs(document, config, read)
            del document  # not held while the next one is parsed
    except SourceError as error:
        read.was_read = not isinstance(error, ReadError)
        read.quarantined.append((file.name, str(error)))


def file_runs(path: Path, *, redact: bool = True) -> Iterator[Run]:
    """The runs of one file, whatever holds them, as ingestion would write them.

    Raises:
        SourceError: there is none; the reason is that of the first thing that was left out.
    """
    read, n_runs, config = _Read(), 0, SourceConfig(paths=(str(path),), redact=redact)
    for _, run, _ in _file_runs(InputFile(path), config, read, None):
        n_runs += 1
        yield run
    if not n_runs:
        notes = read.notes(config)
        raise SourceError(next((reason for _, reason in notes.quarantined + notes.damaged), "the file holds no run"))


def _chain(run: Run) -> list[str]:
    """Digest of each opening of the run: after its first message, its second, ..."""
    links = [""]
    for message in run.messages:
        links.append(digest(links[-1], message.role, message.content, repr(message.tool_calls)))
    return links[1:]


def _entry(file: InputFile, segment: str, row: int, read: _Read, adapter: Adapter, run: Run, named: Run) -> RunEntry:
    chain = _chain(run) if adapter.snapshots else [None]
    read.openings += [(link, len(read.entries)) for link in chain[:-1] if link is not None]
    messages = run.messages
    calls = [call for message in messages for call in message.tool_calls]
    call_ids = {call.call_id for call in calls}
    answered = [message.tool_call_id for message in messages if message.tool_call_id is not None]
    n_chars = sum([len(message.content) for message in messages]) + sum([len(call.arguments) for call in calls])
    n_chars += sum([len(message.reasoning) for message in messages if message.reasoning])
    return RunEntry(
        file=file.name,
        seq=len(read.entries),
        segment=segment,
        row=row,
        trajectory_id=run.trajectory_id,
        task_id=named.task_id,
        source_path=named.source_path,
        source_format=run.source_format,
        status=run.outcome.status,
        source=run.outcome.source,
        score=run.outcome.score,
        exit_status=run.exit_status,
        n_messages=len(messages),
        n_turns=[message.author for message in messages if message.role == "assistant"].count("policy"),
        n_calls=len(calls) + sum([len(message.action_spans) for message in messages]),
        n_observations=[message.author for message in messages].count("environment"),
        n_unpaired=sum([call_id not in call_ids for call_id in answered]),
        n_chars=n_chars,
        tail=chain[-1],
    )


def _new_digest(file: InputFile) -> tuple[InputFile, str | None]:
    """(the file, its digest if it was changed a moment ago); one that cannot be read for it has a problem."""
    if file.is_settled or file.problem:
        return file, None
    try:
        return file, file.digest()
    except OSError as error:
        return changed(file, problem=unreadable(error)), None


class SegmentWriter:
    """Reads files one after another into one segment, and records each in the catalog once its rows are safe."""

    def __init__(
        self, folder: Path, config: SourceConfig, catalog: Catalog, digests: DigestBook, done: Callable[[], None]
    ) -> None:
        self.folder, self.config, self.catalog, self.digests, self.done = folder, config, catalog, digests, done
        self.name = f"{uuid.uuid4().hex}.arrow"
        self._n_read = self._n_written = self._n_recorded = self._n_chars = 0
        self._finished: deque[tuple[int, InputFile, _Read]] = deque()
        """Files that were read whole, with the number of rows by then, and are not in the catalog yet."""

    def _runs(self, files: Iterator[InputFile]) -> Iterator[Run]:
        for file in files:
            file, new_digest = _new_digest(file)
            read = _Read(new_digest, was_read=not file.problem)
            for adapter, run, named in _file_runs(file, self.config, read, self.digests.known(file)):
                entry = _entry(file, self.name, self._n_read, read, adapter, run, named)
                read.entries.append(entry)
                self._n_read += 1
                self._n_chars += entry.n_chars
                yield run
            self._finished.append((self._n_read, file, read))
            self.done()

    def _record(self, n_bytes: int, sha256: str = "") -> None:
        """Files whose rows lie in the first `n_bytes` of the segment are not read again after an interruption."""
        while self._finished and self._finished[0][0] <= self._n_written:
            _, file, read = self._finished.popleft()
            self.catalog.put(file, read.digest, read.notes(self.config), read.entries, read.openings, read.was_read)
        if self._n_written:
            self.catalog.put_segment(Segment(self.name, self._n_written, n_bytes, sha256))
        self.catalog.commit()
        self._n_recorded, self._n_chars = self._n_written, 0
        gc.collect(0)  # what is new since the last time

    def write(self, files: Iterator[InputFile]) -> None:
        path = self.folder / self.name
        with closing(DigestedFile(path)) as sink:
            with buffered(sink) as stream, pa.ipc.new_stream(stream, TRAJECTORIES) as writer:
                runs = self._runs(files)
                while batch := list(islice(runs, ROWS_PER_BATCH)):
                    writer.write_batch(record_batch(batch))
                    self._n_written += len(batch)
                    if self._n_chars >= _RECORDED_CHARS or self._n_written - self._n_recorded >= _RECORDED_RUNS:
                        stream.flush()
                        self._record(sink.n_bytes)
            self._record(sink.n_bytes, sink.sha256())
        if not self._n_written:
            path.unlink()
