"""Ingestion: log files of any supported agent -> `trajectories.arrow` and a report.

Nothing is left out in silence: what cannot be read is quarantined with its reason and the rest goes on.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.store import Store
from artifacts.tables import write_table
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import Dropped, Ingested, IngestReport
from schemas.tables import TRAJECTORIES, TRAJECTORY_SCHEMA_VERSION
from schemas.trajectory import Trajectory
from tasks.input_files import InputFile, files_digest, find_files
from tasks.sources import BY_NAME, Document, SourceError, find_adapter, read_document
from tasks.sources.side_files import SideFact, SideIndex, read_side_file

STAGE_VERSION = 1

Progress = Callable[[int], None]
"""Called with the number of files done so far."""


def source_digest(config: SourceConfig) -> str:
    """sha256 over the input files' paths and contents, for the stage's cache key.

    Raises:
        UserError: a path is missing or an empty folder.
    """
    return files_digest(find_files(config.paths))


@dataclass
class _Tally:
    """What the report counts, gathered while rows stream past."""

    n_files: int = 0
    n_side_files: int = 0
    n_trajectories: int = 0
    n_turns: int = 0
    by_format: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_exit_status: Counter[str] = field(default_factory=Counter)
    quarantined: list[Dropped] = field(default_factory=list)

    def count(self, trajectory: Trajectory) -> None:
        self.n_trajectories += 1
        self.n_turns += trajectory.n_turns
        self.by_format[trajectory.source_format] += 1
        self.by_outcome[trajectory.outcome.status] += 1
        if trajectory.exit_status:
            self.by_exit_status[trajectory.exit_status] += 1


def _read(file: InputFile) -> Document:
    if file.problem:
        raise SourceError(file.problem)
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}") from error
    return read_document(data, file.path.as_posix())


_SIDE_FILE_LIMIT_BYTES = 16 << 20


def _side_facts(files: list[InputFile]) -> dict[Path, list[SideFact]]:
    """Side files first, since a run may be read before the report that speaks of it."""
    found: dict[Path, list[SideFact]] = {}
    for file in files:
        if file.size_bytes > _SIDE_FILE_LIMIT_BYTES:
            continue
        try:
            facts = read_side_file(_read(file))
        except SourceError:
            continue  # told when the file's turn comes
        if facts is not None:
            found[file.path] = facts
    return found


def _with_run(trajectory: Trajectory) -> Trajectory:
    """Where the log names no run, the folder that holds the run's files does."""
    if trajectory.run_id is not None:
        return trajectory
    folder = Path(trajectory.source_path).parent
    if folder.name.startswith(trajectory.task_id):
        folder = folder.parent
    return trajectory.model_copy(update={"run_id": folder.name or None})


def _trajectories(
    files: list[InputFile],
    side: dict[Path, list[SideFact]],
    source_format: str,
    tally: _Tally,
    progress: Progress | None,
) -> Iterator[Trajectory]:
    index = SideIndex(fact for facts in side.values() for fact in facts)
    for file in files:
        tally.n_files += 1
        if file.path in side:
            tally.n_side_files += 1
        else:
            try:
                document = _read(file)
                for trajectory in find_adapter(document, source_format).read_document(document):
                    yield index.join(_with_run(trajectory))
            except SourceError as error:
                tally.quarantined.append(Dropped(what=file.path.as_posix(), reason=str(error)))
        if progress is not None:
            progress(tally.n_files)


def _rows(trajectories: Iterator[Trajectory], tally: _Tally) -> Iterator[dict[str, Any]]:
    for trajectory in trajectories:
        tally.count(trajectory)
        yield trajectory.model_dump()


def ingest(config: SourceConfig, store: Store, *, progress: Progress | None = None) -> Ingested:
    """Reads every file of `config.paths` into one table in the store.

    Raises:
        UserError: a path is missing, a folder is empty, the format is unknown, or no file holds a run.
    """
    if config.format != "auto" and config.format not in BY_NAME:
        raise UserError(
            f"unknown log format {config.format!r}", where="source.format", fix=f"auto or one of {', '.join(BY_NAME)}"
        )
    files = list(find_files(config.paths))
    tally = _Tally()
    with store.staging() as folder:
        path = folder / "trajectories.arrow"
        found = _trajectories(files, _side_facts(files), config.format, tally, progress)
        n_rows = write_table(path, TRAJECTORIES, _rows(found, tally))
        if not n_rows:
            reasons = Counter(dropped.reason for dropped in tally.quarantined).most_common(1)
            raise UserError(
                f"no run found in {tally.n_files} files" + (f"; most often: {reasons[0][0]}" if reasons else ""),
                where=", ".join(config.paths),
                fix="see docs/FORMATS.md for the formats that are read",
            )
        ref = store.add(path, "trajectories", n_rows=n_rows, schema_version=TRAJECTORY_SCHEMA_VERSION)
    return Ingested(
        trajectories=ref,
        report=IngestReport(
            n_files=tally.n_files,
            n_trajectories=tally.n_trajectories,
            n_turns=tally.n_turns,
            by_format=dict(tally.by_format),
            by_outcome=dict(tally.by_outcome),
            by_exit_status=dict(tally.by_exit_status),
            redact=config.redact,
            quarantined=tuple(tally.quarantined),
        ),
    )
