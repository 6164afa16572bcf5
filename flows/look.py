"""Looking at runs from outside the pipeline: `traceforge inspect` and `traceforge export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from artifacts.store import Store
from schemas.base import Frozen
from schemas.config import RunConfig
from schemas.errors import ArtifactError, UserError
from schemas.inspection import InspectReport
from tasks.export import Format, export
from tasks.inspect_view import html_page, print_inspection


def _require_file(path: Path, fix: str) -> None:
    if path.is_dir():
        raise UserError("a folder, not a file", where=path, fix=fix)
    if path.exists() and not path.is_file():
        raise UserError("a pipe, socket or device, not a regular file", where=path, fix=fix)
    if not path.exists():
        raise UserError("no such file", where=path, fix=fix)


def _not_itself(read: Path, written: Path, option: str) -> None:
    if written.exists() and written.samefile(read):
        raise UserError("it would overwrite what is read", where=written, fix=f"give {option} another file")


def look(
    file: Path, config: RunConfig, *, row: int = 0, branches: Sequence[Path] = (), html: Path | None = None
) -> InspectReport:
    """Reads one run, branch or pair as the configuration's render section would; writes the page if asked for.

    Raises:
        UserError: the file or the model cannot be read, there is no such row, or the page cannot be written.
    """
    from tasks.inspect import inspect_file  # these load transformers, which an export does not need
    from tasks.model import prepare_model

    _require_file(file, "give a log file, or a trajectories, branches or pairs table")
    model = prepare_model(config.model, Store(config.store)).model
    report = inspect_file(
        file,
        model,
        config.render,
        row=row,
        chat_template=config.model.chat_template,
        branches=branches,
        redact=config.source.redact,
    )
    if html is not None:
        _not_itself(file, html, "--html")
        try:
            html.write_text(html_page(report), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=html, fix="give --html a file") from error
    return report


class ExportReport(Frozen):
    out: str
    format: str
    n_runs: int


def export_runs(table: Path, out: Path, target: str) -> ExportReport:
    """Writes every run of a table in another format.

    Raises:
        UserError: no such format, the table cannot be read, or `out` is the table, a folder where the format writes a
            file (or the other way round), or a folder with something in it.
        OSError: `out` cannot be written.
    """
    if target not in get_args(Format):
        raise UserError(f"no format {target!r}", where="--format", fix=f"one of {', '.join(get_args(Format))}")
    _require_file(table, "give a trajectories table, see: traceforge artifacts list")
    _not_itself(table, out, "--out")
    if out.exists() and out.is_dir() != (target == "atif"):
        wanted = "a folder for atif" if target == "atif" else "a file"
        raise UserError(f"{'a folder' if out.is_dir() else 'a file'} lies there", where=out, fix=f"give --out {wanted}")
    if out.is_dir() and any(out.iterdir()):
        raise UserError("a folder with something in it", where=out, fix="give --out a new or empty folder")
    try:
        n_runs = export(table, out, cast("Format", target))
    except ArtifactError as error:
        raise UserError(str(error)) from error
    return ExportReport(out=str(out), format=target, n_runs=n_runs)


def print_to_stdout(report: InspectReport, *, full: bool) -> None:
    """In colour on a terminal, plain text in a pipe."""
    print_inspection(report, Console(), full=full)
