"""Ingestion: log files of any supported agent -> `trajectories.arrow` and a report.

Two steps. Files that are new or changed are read, redacted and appended to segments that a catalog knows. Then the
table is put together from the segments, file by file in order: outcomes joined from side files, repeats left out. So
the table is the same whatever was read on which night, and memory does not grow with the number of files.
Nothing is left out in silence: what cannot be read is quarantined with its reason, and the rest goes on.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from artifacts.store import DigestedFile, Store
from artifacts.tables import open_table
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import Dropped, Ingested
from schemas.tables import TRAJECTORIES, TRAJECTORY_SCHEMA_VERSION
from schemas.trajectory import Outcome
from tasks.catalog import Catalog, RunEntry, open_catalog
from tasks.columns import outcome_column
from tasks.dedupe import near_duplicates, signature
from tasks.ingest_report import ingest_report
from tasks.input_files import InputFile, files_digest, find_files, open_digests
from tasks.read_logs import ROWS_PER_BATCH, SegmentWriter
from tasks.sources import BY_NAME
from tasks.sources.base import digest
from tasks.sources.side_files import SideFact, SideIndex

STAGE_VERSION = 3
_INGESTED = "ingested"

Progress = Callable[[int], None]
"""Called with the number of files done so far."""


def source_digest(config: SourceConfig, store: Path | None = None) -> str:
    """sha256 over the input files' paths and contents, for the stage's cache key. With the folder of a store, a file's
    digest is remembered there: it is not computed again while the file is unchanged, nor by `ingest`.

    Raises:
        UserError: a path is missing or an empty folder.
    """
    with open_digests(None if store is None else store / _INGESTED) as digests:
        return files_digest(find_files(config.paths), digests)


# putting the table together -------------------------------------------------------------------------------------


def _join_outcomes(catalog: Catalog) -> None:
    facts = []
    for notes in catalog.notes():
        for fact in notes.facts:
            outcome = fact.pop("outcome")
            facts.append(SideFact(**fact, outcome=Outcome.model_validate(outcome) if outcome else None))  # pyright: ignore
    catalog.keep_all()
    if not facts:
        return
    index, joined = SideIndex(facts), []
    for place, run in catalog.kept():
        before = (run.status, run.source, run.score, run.exit_status)
        known = Outcome.model_validate({"status": run.status, "source": run.source, "score": run.score})
        outcome, run.exit_status = index.join(run.task_id, run.source_path, known, run.exit_status)
        run.status, run.source, run.score = outcome.status, outcome.source, outcome.score
        if (run.status, run.source, run.score, run.exit_status) != before:
            joined.append((place, run))
    catalog.join(joined)


def _near_repeats(folder: Path, catalog: Catalog) -> list[tuple[int, str, str]]:
    """Near-duplicates within one task and outcome, so memory holds the signatures of one such group at a time."""
    segments = _Segments(folder)
    repeats: list[tuple[int, str, str]] = []
    for _, of_task in groupby(catalog.kept(by_task=True), key=lambda placed: (placed[1].task_id, placed[1].status)):
        group = list(of_task)
        if len(group) < 2:
            continue
        rows = (segments.rows(run.segment, run.row, 1).to_pylist()[0] for _, run in group)
        signatures = [signature(row["messages"]) for row in rows]
        for repeat, first in near_duplicates(signatures):
            (place, run), (_, kept) = group[repeat], group[first]
            repeats.append((place, run.source_path, kept.source_path))
    return repeats


def _drop_repeats(folder: Path, catalog: Catalog, config: SourceConfig) -> list[Dropped]:
    if config.dedupe == "off":
        return []
    same = catalog.repeats()
    catalog.drop(place for place, _, _ in same)
    dropped = [Dropped(what=path, reason=f"repeats {kept_path}") for _, path, kept_path in same]
    if config.dedupe == "near":
        near = _near_repeats(folder, catalog)
        catalog.drop(place for place, _, _ in near)
        dropped += [Dropped(what=path, reason=f"nearly repeats {kept_path}") for _, path, kept_path in near]
    return dropped


def _with_joined(batch: pa.RecordBatch, runs: list[RunEntry]) -> pa.RecordBatch:
    """The batch with joined outcomes and exit statuses; everything else is passed on unread."""
    columns = {
        "outcome": outcome_column([(run.status, run.source, run.score) for run in runs]),
        "exit_status": pa.array([run.exit_status for run in runs], pa.large_string()),
    }
    arrays = [columns.get(name, batch.column(name)) for name in TRAJECTORIES.names]
    return pa.RecordBatch.from_arrays(arrays, schema=TRAJECTORIES)


def _batches(catalog: Catalog) -> Iterator[list[RunEntry]]:
    runs = (run for _, run in catalog.kept())
    while batch := list(islice(runs, ROWS_PER_BATCH)):
        yield batch


class _Segments:
    """Rows out of segments, one segment mapped at a time: mapped pages count as memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name, self._table = "", TRAJECTORIES.empty_table()
        self._whole: dict[tuple[int, int], pa.RecordBatch] = {}

    def _open(self, segment: str) -> None:
        if segment == self._name:
            return
        self._name, self._table = segment, open_table(self._folder / segment)
        self._whole, first = {}, 0
        for batch in self._table.to_batches():
            self._whole[first, batch.num_rows] = batch
            first += batch.num_rows

    def rows(self, segment: str, first: int, n_rows: int) -> pa.Table:
        """Rows [first, first + n_rows) of a segment, copied."""
        self._open(segment)
        # slice before anything else: `take` on the whole table would copy all of it
        return self._table.slice(first, n_rows).combine_chunks()

    def batch(self, runs: list[RunEntry]) -> pa.RecordBatch:
        """The rows of the runs, in their order; the same bytes whichever segments they lie in."""
        groups = groupby(enumerate(runs), key=lambda pair: (pair[1].segment, pair[1].row - pair[0]))
        pieces = []
        for (segment, _), group in groups:
            first, *others = [run for _, run in group]
            n_rows = 1 + len(others)
            self._open(segment)
            if n_rows == len(runs) and (first.row, n_rows) in self._whole:
                return self._whole[first.row, n_rows]  # written as it is mapped
            pieces.append(self.rows(segment, first.row, n_rows))
        whole = pa.concat_tables(pieces).combine_chunks()
        return whole.take(list(range(len(runs)))).to_batches()[0]


def _assemble(folder: Path, catalog: Catalog, path: Path) -> tuple[int, str]:
    """(number of rows, sha256) of the table it writes."""
    n_rows = 0
    segments = _Segments(folder)
    with closing(DigestedFile(path)) as sink:
        with pa.ipc.new_stream(sink, TRAJECTORIES) as writer:
            for runs in _batches(catalog):
                writer.write_batch(_with_joined(segments.batch(runs), runs))
                n_rows += len(runs)
        return n_rows, sink.sha256()


def _catalog_folder(config: SourceConfig, store: Store) -> Path:
    """What changes the rows of an unchanged file has a catalog of its own."""
    key = digest(f"{STAGE_VERSION}/{TRAJECTORY_SCHEMA_VERSION}", config.format, str(config.redact))
    return store.root / _INGESTED / key[:16]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Parsed documents are large trees without cycles: the cyclic collector walks them for nothing, at a sixth of the
    time. Reference counting frees them all the same; what exceptions leave behind is collected once a segment.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ingest(config: SourceConfig, store: Store, *, progress: Progress | None = None) -> Ingested:
    """Reads what is new under `config.paths` and writes one table of all its runs into the store.

    Raises:
        UserError: a path is missing, a folder is empty, the format is unknown, or no file holds a run.
    """
    if config.format != "auto" and config.format not in BY_NAME:
        raise UserError(
            f"unknown log format {config.format!r}", where="source.format", fix=f"auto or one of {', '.join(BY_NAME)}"
        )
    counts = Counter[str]()

    def file_done() -> None:
        counts["files"] += 1
        if progress is not None:
            progress(counts["files"])

    def changed_files(catalog: Catalog) -> Iterator[InputFile]:
        for file in find_files(config.paths):
            if catalog.want(file):
                counts["reused"] += 1
                file_done()
            else:
                yield file

    folder = _catalog_folder(config, store)
    with (
        open_digests(store.root / _INGESTED) as digests,
        open_catalog(folder) as catalog,
        store.staging() as staging,
    ):
        files = changed_files(catalog)
        writer = SegmentWriter(folder, config, catalog, digests, file_done)
        with _collector_paused():
            while writer.write(files):
                gc.collect(0)  # what is new since the last time
        catalog.forget_missing()
        _join_outcomes(catalog)
        dropped = _drop_repeats(folder, catalog, config)
        path = staging / "trajectories.arrow"
        n_rows, sha256 = _assemble(folder, catalog, path)
        report = ingest_report(catalog, config, counts["files"], counts["reused"], dropped, staging / "left_out.jsonl")
        if not n_rows:
            reasons = Counter(dropped.reason for dropped in report.quarantined).most_common(1)
            raise UserError(
                f"no run found in {report.n_files} files" + (f"; most often: {reasons[0][0]}" if reasons else ""),
                where=", ".join(config.paths),
                fix="see docs/FORMATS.md for the formats that are read",
            )
        for stale in {file.name for file in folder.glob("*.arrow")} - catalog.segments():
            (folder / stale).unlink()
        ref = store.add(path, "trajectories", n_rows=n_rows, schema_version=TRAJECTORY_SCHEMA_VERSION, sha256=sha256)
        listing = folder / f"left_out-{ref.sha256[:16]}.jsonl"
        os.replace(staging / "left_out.jsonl", listing)
    return Ingested(trajectories=ref, report=report.model_copy(update={"left_out": str(listing)}))
