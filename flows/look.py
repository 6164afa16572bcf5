"""`traceforge inspect`: the model's tokenizer made ready, one run looked at, shown on stdout or as a page."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from artifacts.store import Store
from schemas.config import RunConfig
from schemas.inspection import InspectReport
from tasks.inspect import inspect_file
from tasks.inspect_view import html_page, print_inspection
from tasks.model import prepare_model


def look(
    file: Path, config: RunConfig, *, row: int = 0, branches: Sequence[Path] = (), html: Path | None = None
) -> InspectReport:
    """Reads one run, branch or pair as the configuration's render section would; writes the page if asked for.

    Raises:
        UserError: the file or the model cannot be read, or there is no such row.
    """
    model = prepare_model(config.model, Store(config.store)).model
    report = inspect_file(
        file, model, config.render, row=row, chat_template=config.model.chat_template, branches=branches
    )
    if html is not None:
        html.write_text(html_page(report), encoding="utf-8")
    return report


def print_to_stdout(report: InspectReport, *, full: bool) -> None:
    """In colour on a terminal, plain text in a pipe."""
    print_inspection(report, Console(), full=full)
