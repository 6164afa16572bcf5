"""Pictures for the cards: SVG as a data URI, drawn without a display.

A data URI in an `<img>` is the one form that both Prefect UIs show. Text stays text in the SVG, which keeps a picture
at a few kilobytes. matplotlib is imported when one is drawn: a process that draws none starts half a second sooner.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE_INCHES = (6.4, 2.6)
INK = "#475569"
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "traceforge",  # equal data, equal bytes
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#cbd5e1",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def bars(counts: Mapping[str, float], *, x_label: str, y_label: str) -> str:
    """A bar for each name, its value on top; a data URI."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(rc=_STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        drawn = axes.bar(list(counts), list(counts.values()), color=COLOURS[0], width=0.6)
        axes.bar_label(drawn, fmt="{:,.4g}", padding=2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.margins(y=0.15)
        if all(float(value).is_integer() for value in counts.values()):
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return _data_uri(figure)


def lines(
    steps: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float | None]]], *, x_label: str = "step"
) -> str:
    """One panel for each y label, two in a row, with one line for each of its series; a data URI.

    Args:
        steps: x values
        panels: y label -> name of a series -> its values; None leaves a gap
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(rc=_STYLE):
        n_rows = (len(panels) + 1) // 2
        figure = Figure(figsize=(SIZE_INCHES[0], SIZE_INCHES[1] * n_rows * 0.8), layout="constrained")
        for index, (label, series) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(n_rows, min(2, len(panels)), index)
            for colour, (name, values) in zip(COLOURS, series.items(), strict=False):
                shown = [float("nan") if value is None else value for value in values]
                axes.plot(steps, shown, color=colour, label=name, marker="o" if len(steps) < 30 else "", markersize=3)
            axes.set_xlabel(x_label)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set_title(label, loc="left", fontsize=9)
            if len(series) > 1:
                axes.legend(frameon=False, fontsize=8)
        return _data_uri(figure)
