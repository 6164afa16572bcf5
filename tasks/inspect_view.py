"""Showing an inspection: in the terminal, and as one page of HTML that needs nothing else."""

import html
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from schemas.inspection import BranchView, InspectReport, PairView, Segment
from schemas.tables import SPAN_KINDS

STYLES: Final = {
    "prompt": "bright_black",
    "observation": "cyan",
    "reasoning": "magenta",
    "thought": "yellow",
    "action": "green",
    "turn_end": "blue",
}
SCORED: Final = "bold reverse"
FOLD_LINES: Final = 12
"""Texts that are not scored and longer than this are folded in the middle."""

_CONTROL: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def visible(text: str) -> str:
    """Control characters as their pictures, so that a log cannot write to the terminal."""
    return text.translate(_CONTROL)


def fold(text: str, n_lines: int = FOLD_LINES) -> str:
    """Head and tail of a long text, with the number of lines left out between."""
    lines = text.splitlines(keepends=True)
    if len(lines) <= n_lines:
        return text
    head, tail = lines[: n_lines // 2], lines[-(n_lines // 2) :]
    return "".join([*head, f"  … {len(lines) - len(head) - len(tail)} lines …\n", *tail])


def _text(segments: Sequence[Segment], full: bool) -> Text:
    text = Text()
    for segment in segments:
        scored = segment.weight > 0
        shown = visible(segment.text if full or scored else fold(segment.text))
        text.append(shown, style=f"{STYLES[segment.kind]} {SCORED}" if scored else STYLES[segment.kind])
    return text


def _counts(view: BranchView) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("span kind")
    for name in ("tokens", "scored"):
        table.add_column(name, justify="right")
    for kind in SPAN_KINDS:
        table.add_row(
            Text(kind, style=STYLES[kind]),
            f"{view.tokens_by_kind.get(kind, 0):,}",
            f"{view.scored_by_kind.get(kind, 0):,}",
        )
    table.add_row(Text("all", style="bold"), f"{view.n_tokens:,}", f"{view.n_scored:,}")
    return table


def _facts(view: BranchView) -> str:
    share = view.n_scored / view.n_tokens if view.n_tokens else 0.0
    score = "" if view.score is None else f", score {view.score:g}"
    return (
        f"{view.branch_id}  task {view.task_id}  {view.outcome}{score}  {view.split}\n"
        f"{view.n_tokens:,} tokens, {view.n_scored:,} scored ({share:.1%}) in {view.n_turns_scored} turns"
    )


def _branch(view: BranchView, full: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(_facts(view)), _counts(view)]
    if view.refused:
        parts.append(Text(f"would be dropped: {view.refused}", style="bold red"))
    return [*parts, Text(""), _text(view.segments, full)]


def _pair(view: PairView, full: bool) -> list[RenderableType]:
    sides = Table(expand=True, show_lines=False)
    for name in ("chosen", "rejected"):
        sides.add_column(name, ratio=1, overflow="fold")
    both = (view.chosen, view.rejected)
    sides.add_row(*(Group(Text(_facts(side)), _counts(side)) for side in both))
    sides.add_row(*(_text(side.segments, full) for side in both))
    prefix = _text(view.shared_prefix, True) if full else Text(f"{len(view.shared_prefix)} spans folded")
    return [
        Text(f"pair {view.pair_id}  rule {view.rule}"),
        Panel(prefix, title=f"shared prefix: {view.n_shared_prefix:,} tokens", style="bright_black"),
        sides,
    ]


def print_inspection(report: InspectReport, console: Console, *, full: bool = False) -> None:
    """Prints a run, branch or pair with its span kinds in colour; what is scored stands in reverse.

    Args:
        full: do not fold long texts that are not scored.
    """
    console.print(Text(f"{report.path}  row {report.row} of {report.n_rows}  template: {report.template}"))
    parts = _branch(report.branch, full) if report.branch else _pair(report.pair, full) if report.pair else []
    if report.branch and report.branch.outcome == "unknown" and not report.path.endswith(".arrow"):
        console.print(Text("outcome unknown: reports and rewards beside a log are read by `traceforge ingest` only"))
    for part in parts:
        console.print(part, highlight=False)


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.4 ui-monospace, monospace; margin: 0 }}
table {{ border-collapse: collapse; margin: .5rem 0 }} td, th {{ padding: 0 .8rem 0 0; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
.sides {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem }} .sides > div {{ min-width: 0 }}
.prompt {{ color: #777 }} .observation {{ color: #17616e }} .reasoning {{ color: #8a2a8a }}
.thought {{ color: #8a6100 }} .action {{ color: #1d6b1d }} .turn_end {{ color: #2447a8 }}
.scored {{ background: #e6f3d8; font-weight: 600 }} details {{ display: inline }} summary {{ cursor: pointer }}
.refused {{ color: #a01818; font-weight: 600 }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def _html_segments(segments: Sequence[Segment]) -> str:
    parts = []
    for segment in segments:
        scored = segment.weight > 0
        text = html.escape(visible(segment.text))
        title = f"{segment.kind}, message {segment.message}, {segment.n_tokens} tokens, weight {segment.weight:g}"
        if not scored and segment.text.count("\n") > FOLD_LINES:
            text = f"<details><summary>{segment.n_tokens:,} tokens of {segment.kind}</summary>{text}</details>"
        parts.append(f'<span class="{segment.kind}{" scored" if scored else ""}" title="{title}">{text}</span>')
    return f"<pre>{''.join(parts)}</pre>"


def _html_branch(view: BranchView) -> str:
    rows = "".join(
        f'<tr><td class="{kind}">{kind}</td><td>{view.tokens_by_kind.get(kind, 0):,}</td>'
        f"<td>{view.scored_by_kind.get(kind, 0):,}</td></tr>"
        for kind in SPAN_KINDS
    )
    refused = f'<p class="refused">would be dropped: {html.escape(view.refused)}</p>' if view.refused else ""
    return (
        f"<p>{html.escape(_facts(view)).replace(chr(10), '<br>')}</p>{refused}"
        f"<table><tr><th>span kind</th><th>tokens</th><th>scored</th></tr>{rows}</table>{_html_segments(view.segments)}"
    )


def html_page(report: InspectReport) -> str:
    """The inspection as one self-contained page: no scripts, no links, nothing to fetch."""
    if report.pair:
        pair = report.pair
        body = (
            f"<p>pair {pair.pair_id}, rule {pair.rule}</p><details><summary>shared prefix: {pair.n_shared_prefix:,} "
            f"tokens</summary>{_html_segments(pair.shared_prefix)}</details>"
            f'<div class="sides"><div><h2>chosen</h2>{_html_branch(pair.chosen)}</div>'
            f"<div><h2>rejected</h2>{_html_branch(pair.rejected)}</div></div>"
        )
    else:
        body = _html_branch(report.branch) if report.branch else ""
    return _PAGE.format(title=html.escape(f"{report.path}, row {report.row} of {report.n_rows}"), body=body)
