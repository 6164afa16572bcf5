"""Log files to a table without a configuration: `traceforge ingest PATH... --out DIR`."""

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from pydantic import ValidationError

from artifacts.cards import card
from artifacts.locks import alone
from artifacts.store import Store, link_or_copy, write_atomically
from artifacts.summaries import summary
from schemas.base import Frozen
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import IngestReport
from tasks.ingest import ingest

Dedupe = Literal["exact", "near", "off"]

_STORE = ".store"
_OPTIONS = {"paths": ("PATH...", "give files, folders or globs"), "format": ("--format", "auto, or a format's name")}
TABLE, REPORT, CARD = "trajectories.arrow", "ingest.json", "ingest.md"


class IngestLogsReport(Frozen):
    """What lies in the output folder afterwards."""

    table: str
    n_rows: int
    summary: str
    report: IngestReport

    def text(self) -> str:
        return f"{self.summary}: {self.table}"


def _put(source: Path, target: Path) -> None:
    """The same bytes at `target`, which a reader sees whole or not at all; a second name where the disk allows it."""
    temporary = target.with_name(f".{target.name}.new")
    temporary.unlink(missing_ok=True)
    link_or_copy(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # still there if both were names of one file


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What the system refuses to write often comes without a path; here it can only lie in this folder."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        error.add_note(str(folder))
        raise


def ingest_logs(
    paths: Sequence[str],
    out: Path,
    *,
    source_format: str = "auto",
    redact: bool = True,
    dedupe: str = "exact",
) -> IngestLogsReport:
    """Writes `trajectories.arrow`, the report `ingest.json` and the card `ingest.md` into `out`. What was read is
    remembered in `out/.store`: the next call reads only new and changed files. Calls into one folder take turns.

    Raises:
        UserError: a path is missing, the format is unknown, no file holds a run, or `out` cannot be written.
        OSError, sqlite3.OperationalError: a full disk and the like; a note names `out`.
    """
    if dedupe not in get_args(Dedupe):
        raise UserError(f"no way to drop repeats is called {dedupe!r}", where="--dedupe", fix="exact, near or off")
    if not all(path.strip() for path in paths):
        raise UserError("an empty path", where="PATH...", fix="give files, folders or globs")
    if out.exists() and not out.is_dir():
        raise UserError("not a folder", where=out, fix="give --out a new folder, or an earlier output")
    inside = [path for path in paths if out.absolute().is_relative_to(Path(path).expanduser().absolute())]
    if inside:
        raise UserError(
            "the output folder lies among the logs", where=out, fix=f"give --out a folder outside {inside[0]}"
        )
    try:
        config = SourceConfig(paths=tuple(paths), format=source_format, redact=redact, dedupe=cast("Dedupe", dedupe))
    except ValidationError as error:
        problem = error.errors()[0]
        where, fix = _OPTIONS[str(problem["loc"][0])]
        raise UserError(str(problem["msg"]), where=where, fix=fix) from error
    with _naming(out):
        store = Store(out / _STORE)
        with alone(store.root / "ingest.lock"):
            return _ingest_into(out, config, store)


def _ingest_into(out: Path, config: SourceConfig, store: Store) -> IngestLogsReport:
    store.clear_staging()  # of calls that were killed: here is no other
    done = ingest(config, store, only=True)
    payload = Path(done.trajectories.path)
    _put(payload, out / TABLE)
    for folder in (store.root / done.trajectories.kind).iterdir():
        if folder != payload.parent:
            shutil.rmtree(folder)  # the tables of earlier calls
    write_atomically(out / REPORT, done.report.model_dump_json(indent=2) + "\n")
    write_atomically(out / CARD, card(done).markdown + "\n")
    return IngestLogsReport(
        table=str(out / TABLE), n_rows=done.trajectories.n_rows or 0, summary=summary(done), report=done.report
    )
