"""A picture of what NVML saw of the GPUs of a training run, from the CSVs that `engine.monitor` wrote."""

import csv
from itertools import pairwise
from pathlib import Path
from statistics import median

from artifacts import charts

POINTS = 240
"""Samples of one rank in the picture; longer runs are drawn by the highest value of equal stretches."""


def _column(rows: list[dict[str, str]], name: str, scale: float, n_points: int) -> list[float | None]:
    """The column in n_points equal stretches, the highest value of each; None where the card does not tell."""
    found: list[float | None] = []
    for point in range(n_points):
        stretch = rows[point * len(rows) // n_points : (point + 1) * len(rows) // n_points]
        found.append(max((float(row[name]) / scale for row in stretch if row[name]), default=None))
    return found


def gpu_picture(folder: Path) -> str:
    """Memory in use, utilisation and power of every rank's GPU over the run; a data URI, empty without a sample.

    The x axis is the time that was sampled: the hours between a run that was killed and its resumption take no room.
    """
    runs: dict[str, list[dict[str, str]]] = {}
    for file in sorted(folder.glob("rank*.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if None not in row.values()]
        if rows:
            runs[file.stem.replace("rank", "rank ")] = rows
    if not runs:
        return ""
    n_points = min(POINTS, min(len(rows) for rows in runs.values()))
    some = next(iter(runs.values()))
    steps_s = [float(later["unix_s"]) - float(row["unix_s"]) for row, later in pairwise(some)]
    sampled_min = len(some) * median(steps_s or [0.0]) / 60
    columns = {
        "memory in use (GiB)": ("used_bytes", 2**30),
        "busy (%)": ("busy_percent", 1),
        "power (W)": ("power_w", 1),
    }
    panels = {
        label: {rank: _column(rows, name, scale, n_points) for rank, rows in runs.items()}
        for label, (name, scale) in columns.items()
        if any(row[name] for rows in runs.values() for row in rows)
    }
    minutes = [sampled_min * (point + 1) / n_points for point in range(n_points)]
    return charts.lines(minutes, panels, x_label="minutes")
