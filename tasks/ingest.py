"""Ingestion: log files of any supported agent -> `trajectories.arrow` and a report.

Two steps. Files that are new or changed are read, redacted and appended to segments that a catalog knows. Then the
table is put together from the segments, file by file in order: outcomes joined from side files, repeats left out. So
the table is the same whatever was read on which night, and memory does not grow with the number of files.
Nothing is left out in silence: what cannot be read is quarantined with its reason, and the rest goes on.
"""

import gc
import hashlib
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from artifacts.store import DigestedFile, Store, link_or_copy
from artifacts.tables import buffered
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Dropped, Ingested
from schemas.tables import TRAJECTORIES, TRAJECTORY_SCHEMA_VERSION
from schemas.trajectory import Outcome
from tasks.catalog import Catalog, delete_catalog, open_catalog
from tasks.dedupe import near_duplicates, signature
from tasks.ingest_report import ingest_report
from tasks.input_files import UNREAD, InputFile, delete_digests, files_digest, find_files, open_digests
from tasks.memory_files import is_damage
from tasks.read_logs import SegmentWriter
from tasks.segments import ROWS_PER_BATCH, DamagedSegmentError, Place, SegmentReader
from tasks.sources import BY_NAME
from tasks.sources.base import digest
from tasks.sources.side_files import SideFact, SideIndex

STAGE_VERSION = 9

_FILES_AT_ONCE = 32
"""So many are looked up before the first of them is read: small steps between large ones find the caches emptied, and
take three times as long.
"""

Progress = Callable[[int], None]
"""Called with the number of files done so far."""


def source_digest(config: SourceConfig, store: Path | None = None) -> str:
    """sha256 over the input files' paths and contents, for the stage's cache key. With the folder of a store, a file's
    digest is remembered there: it is not computed again while the file is unchanged, nor by `ingest`.

    Raises:
        UserError: a path is missing or an empty folder.
    """
    folder = None if store is None else _memory_folder(store)
    try:
        with open_digests(folder) as digests:
            return files_digest(find_files(config.paths), digests)
    except sqlite3.DatabaseError as error:
        if folder is None or not is_damage(error):
            raise
        delete_digests(folder)
        return source_digest(config, store)


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
    index, joined = SideIndex(facts, ((run.task_id, run.source_path) for _, run in catalog.kept())), []
    for place, run in catalog.kept():
        before = (run.status, run.source, run.score, run.exit_status)
        known = Outcome.model_validate({"status": run.status, "source": run.source, "score": run.score})
        outcome, run.exit_status = index.join(run.task_id, run.source_path, known, run.exit_status)
        run.status, run.source, run.score = outcome.status, outcome.source, outcome.score
        if (run.status, run.source, run.score, run.exit_status) != before:
            joined.append((place, run))
    catalog.join(joined)


def _near_repeats(catalog: Catalog, reader: SegmentReader) -> list[tuple[int, str, str]]:
    """Near-duplicates within one task and outcome, so memory holds the signatures of one such group at a time."""
    repeats: list[tuple[int, str, str]] = []
    for _, of_task in groupby(catalog.kept(by_task=True), key=lambda placed: (placed[1].task_id, placed[1].status)):
        group = list(of_task)
        if len(group) < 2:
            continue
        rows = (reader.rows(run.segment, run.row, 1).to_pylist()[0] for _, run in group)
        signatures = [signature(row["messages"]) for row in rows]
        for repeat, first in near_duplicates(signatures):
            (place, run), (_, kept) = group[repeat], group[first]
            repeats.append((place, run.source_path, kept.source_path))
    return repeats


_OUTCOME_UNKNOWN = "equal runs with contradicting outcomes, unknown now: "


def _drop_repeats(catalog: Catalog, reader: SegmentReader, config: SourceConfig) -> list[Dropped]:
    if config.dedupe == "off":
        return []
    contradicted = catalog.drop_contradicted_outcomes()
    same = catalog.repeats()
    catalog.drop(place for place, _, _ in same)
    dropped = [
        Dropped(what=path, reason=f"{_OUTCOME_UNKNOWN if place in contradicted else ''}repeats {kept_path}")
        for place, path, kept_path in same
    ]
    if config.dedupe == "near":
        near = _near_repeats(catalog, reader)
        catalog.drop(place for place, _, _ in near)
        dropped += [Dropped(what=path, reason=f"nearly repeats {kept_path}") for _, path, kept_path in near]
    return dropped


def _plan(catalog: Catalog) -> str:
    """Digest of where the table's rows lie and what is joined to them: equal plans make equal tables."""
    plan = hashlib.sha256()
    for place in catalog.places():
        plan.update(repr(tuple(place)).encode("utf-8", "surrogatepass"))
    return plan.hexdigest()


def _batches(catalog: Catalog) -> Iterator[list[Place]]:
    places = catalog.places()
    while batch := list(islice(places, ROWS_PER_BATCH)):
        yield batch


def _put_together(folder: Path, catalog: Catalog, reader: SegmentReader, path: Path) -> tuple[int, str]:
    """(number of rows, sha256) of the table it writes to `path`. Where a segment is the table already, as after a first
    night with nothing to join and nothing to drop, the file gets a second name: the rows are written only once.
    """
    segment = catalog.finished_segment()
    if segment is not None:
        reader.verify(segment.name)
        link_or_copy(folder / segment.name, path)
        return segment.n_rows, segment.sha256
    n_rows = 0
    with closing(DigestedFile(path)) as sink:
        with buffered(sink) as stream, pa.ipc.new_stream(stream, TRAJECTORIES) as writer:
            for batch in reader.batches(_batches(catalog)):
                writer.write_batch(batch)
                n_rows += batch.num_rows
        return n_rows, sink.sha256()


def _table(folder: Path, catalog: Catalog, reader: SegmentReader, store: Store, staging: Path) -> Ref | None:
    """The table of the runs that stay, in the store; None when there are none."""
    path, plan = staging / "trajectories.arrow", _plan(catalog)
    known = catalog.known_table(plan)
    if known is not None:
        n_rows, sha256 = known
        ref = store.find("trajectories", path.name, sha256, n_rows=n_rows, schema_version=TRAJECTORY_SCHEMA_VERSION)
        if ref is not None:
            return ref
    n_rows, sha256 = _put_together(folder, catalog, reader, path)
    if not n_rows:
        return None
    catalog.put_table(plan, n_rows, sha256)
    return store.add(path, "trajectories", n_rows=n_rows, schema_version=TRAJECTORY_SCHEMA_VERSION, sha256=sha256)


def _memory_folder(store: Path) -> Path:
    """Where this version remembers what it has read: what another one has read is no help to it."""
    return store / "ingested" / f"v{STAGE_VERSION}.{TRAJECTORY_SCHEMA_VERSION}"


def _catalog_folder(config: SourceConfig, store: Store) -> Path:
    """What changes the rows of an unchanged file has a catalog of its own."""
    key = digest(config.format, str(config.redact))
    return _memory_folder(store.root) / key[:16]


def _forget_others(folder: Path) -> None:
    """What lies beside `folder`: rows read by other rules."""
    for other in folder.parent.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Parsed documents are large trees without cycles: the cyclic collector walks them for nothing, at a sixth of the
    time. Reference counting frees them all the same; what exceptions leave behind is collected now and then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _ingest(config: SourceConfig, store: Store, folder: Path, catalog: Catalog, progress: Progress | None) -> Ingested:
    """One go. Raises, beyond `ingest`, DamagedSegmentError."""
    counts = Counter[str]()

    def file_done() -> None:
        counts["files"] += 1
        if progress is not None:
            progress(counts["files"])

    def changed_files() -> Iterator[InputFile]:
        found = find_files(config.paths)
        while files := list(islice(found, _FILES_AT_ONCE)):
            reused = [catalog.want(file) for file in files]
            for file, is_reused in zip(files, reused, strict=True):
                if is_reused:
                    counts["reused"] += 1
                    file_done()
                else:
                    yield file

    with open_digests(_memory_folder(store.root)) as digests, _collector_paused():
        writer = SegmentWriter(folder, config, catalog, digests, file_done)
        writer.write(changed_files())
    catalog.forget_missing()
    _join_outcomes(catalog)
    reader = SegmentReader(folder, catalog.segments(), verified=[writer.name])
    dropped = _drop_repeats(catalog, reader, config)
    with store.staging() as staging:
        ref = _table(folder, catalog, reader, store, staging)
        listing = staging / "left_out.jsonl"
        report = ingest_report(catalog, config, counts["files"], counts["reused"], dropped, listing)
        if ref is None:
            reasons = Counter(dropped.reason for dropped in report.quarantined).most_common(1)
            raise UserError(
                f"no run found in {report.n_files} files" + (f"; most often: {reasons[0][0]}" if reasons else ""),
                where=", ".join(config.paths),
                fix="run as a user who may read them"
                if reasons and reasons[0][0].startswith(UNREAD)
                else "see docs/FORMATS.md for the formats that are read",
            )
        left_out = folder / f"left_out-{ref.sha256[:16]}.jsonl"
        os.replace(listing, left_out)
    for segment in catalog.mostly_dead_segments():
        catalog.forget_segment(segment)
    for stale in {file.name for file in folder.glob("*.arrow")} - catalog.segments().keys():
        (folder / stale).unlink()
    return Ingested(trajectories=ref, report=report.model_copy(update={"left_out": str(left_out)}))


def ingest(config: SourceConfig, store: Store, *, only: bool = False, progress: Progress | None = None) -> Ingested:
    """Reads what is new under `config.paths` and writes one table of all its runs into the store. What other versions
    have read is deleted there; `only`: also what was read for another format, or with or without redaction.

    Raises:
        UserError: a path is missing, a folder is empty, the format is unknown, or no file holds a run.
    """
    if config.format != "auto" and config.format not in BY_NAME:
        raise UserError(
            f"unknown log format {config.format!r}", where="source.format", fix=f"auto or one of {', '.join(BY_NAME)}"
        )
    folder, n_rebuilt = _catalog_folder(config, store), 0
    while True:
        try:
            with open_catalog(folder) as catalog:
                try:
                    done = _ingest(config, store, folder, catalog, progress)
                except DamagedSegmentError as damaged:
                    catalog.forget_segment(damaged.segment)  # its files are read anew
                    continue
            break
        except sqlite3.DatabaseError as error:
            if n_rebuilt or not is_damage(error):
                raise
            n_rebuilt += 1
            delete_catalog(folder)
            delete_digests(folder.parent)
    _forget_others(folder.parent)
    if only:
        _forget_others(folder)
    return done
