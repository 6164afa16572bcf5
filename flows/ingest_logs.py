"""Log files to a table without a configuration: `traceforge ingest PATH... --out DIR`."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from pydantic import ValidationError

from artifacts.cards import card, summary
from artifacts.store import Store, link_or_copy
from schemas.base import Frozen
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import IngestReport
from tasks.ingest import ingest

Dedupe = Literal["exact", "near", "off"]

_STORE = ".store"
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


def ingest_logs(
    paths: Sequence[str],
    out: Path,
    *,
    source_format: str = "auto",
    redact: bool = True,
    dedupe: str = "exact",
) -> IngestLogsReport:
    """Writes `trajectories.arrow`, the report `ingest.json` and the card `ingest.md` into `out`. What was read is
    remembered in `out/.store`: the next call reads only new and changed files.

    Raises:
        UserError: a path is missing, the format is unknown, no file holds a run, or `out` cannot be written.
    """
    if dedupe not in get_args(Dedupe):
        raise UserError(f"no way to drop repeats is called {dedupe!r}", where="--dedupe", fix="exact, near or off")
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
        raise UserError(str(error.errors()[-1]["msg"]), where="PATH...", fix="give files, folders or globs") from error
    store = Store(out / _STORE)
    done = ingest(config, store)
    payload = Path(done.trajectories.path)
    _put(payload, out / TABLE)
    for folder in (store.root / done.trajectories.kind).iterdir():
        if folder != payload.parent:
            shutil.rmtree(folder)  # the tables of earlier calls
    (out / REPORT).write_text(done.report.model_dump_json(indent=2) + "\n", "utf-8")
    (out / CARD).write_text(card(done).markdown + "\n", "utf-8")
    return IngestLogsReport(
        table=str(out / TABLE), n_rows=done.trajectories.n_rows or 0, summary=summary(done), report=done.report
    )
