"""What the terminal shows of a run: a line for each stage while it goes on, and a table at the end. All on stderr."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from artifacts.gc import StoredPayload
from schemas.requests import StageName
from schemas.runs import RunReport, StageRun

_STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red"}


def _line(run: StageRun) -> Text:
    return Text.assemble(
        (f"{run.stage:<9}", "bold"), (f"{run.outcome:<7}", _STYLES[run.outcome]), f"{run.wall_s:7.1f} s  ", run.summary
    )


class Display:
    """Observes a run for the terminal: live on a terminal, one plain line an event elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: StageName | None = None
        self._start_s = 0.0
        self._done = (0, 0)
        self._last_log = ""
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        if self._stage is None:
            return Text("starting", style="dim")
        done, total = self._done
        share = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
        self._spinner.update(text=f"{self._stage:<9}{time.monotonic() - self._start_s:5.0f} s  {share}")
        return Group(self._spinner, Text(self._last_log, style="dim", overflow="ellipsis", no_wrap=True))

    def started(self, stage: StageName) -> None:
        self._stage, self._start_s, self._done, self._last_log = stage, time.monotonic(), (0, 0), ""

    def progressed(self, stage: StageName, done: int, total: int) -> None:
        self._done = (done, total)

    def logged(self, stage: StageName, line: str) -> None:
        self._last_log = line
        if not self._console.is_terminal:
            self._console.print(f"{stage}: {line}", highlight=False, markup=False, soft_wrap=True)

    def finished(self, run: StageRun) -> None:
        self._stage = None
        self._console.print(_line(run), highlight=False, soft_wrap=not self._console.is_terminal)


def final_table(report: RunReport) -> Text:
    """Stages, cached or run, seconds, where their artifacts lie: a path a line, never folded, so it can be copied."""
    text = Text(f"\n{report.name}: {report.status} in {report.wall_s:.1f} s\n", style="bold")
    text.append(f"{'stage':<10}{'':<8}{'seconds':>9}  artifacts\n", style="dim")
    here = Path.cwd()
    for run in report.stages:
        paths = [Path(ref.path) for ref in run.refs]
        shown = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths] or [""]
        text.append(f"{run.stage:<10}")
        text.append(f"{run.outcome:<8}", style=_STYLES[run.outcome])
        text.append(f"{run.wall_s:>9.1f}  " + f"\n{'':<29}".join(shown) + "\n", style="not bold")
    return text


def payload_table(payloads: Sequence[StoredPayload]) -> str:
    """One line a payload: digest, kind, size, what refers to it."""
    lines = []
    for payload in payloads:
        held_by = ", ".join((*payload.aliases, *payload.runs[-1:])) or "nothing"
        state = "" if payload.state == "unchecked" else f"{payload.state:<9}"
        size = f"{payload.n_bytes / 2**20:10,.2f} MiB"
        lines.append(
            f"{payload.sha256_prefix}  {state}{payload.kind:<16}{size}  {Path(payload.path).name}  ({held_by})"
        )
    return "\n".join(lines)
