"""What NVML saw of the GPUs of a training run: the CSVs that `engine.monitor` writes, and a picture of them."""

import csv
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from artifacts import charts

POINTS = 240
"""Samples of one rank in the picture; longer runs are drawn by the highest value of equal stretches."""


class Sample(NamedTuple):
    """One line of the CSV; a None is an empty cell: this card does not tell."""

    unix_s: float
    gpu: str
    used_bytes: int
    total_bytes: int
    busy_percent: int | None
    power_w: float | None
    celsius: int | None


def _sample_of(fields: list[str]) -> Sample | None:
    """A line of the CSV; None for its head and for lines that are torn."""
    try:
        unix_s, gpu, used, total, busy, power_w, celsius = fields
        return Sample(
            unix_s=float(unix_s),
            gpu=gpu,
            used_bytes=int(used),
            total_bytes=int(total),
            busy_percent=int(busy) if busy else None,
            power_w=float(power_w) if power_w else None,
            celsius=int(celsius) if celsius else None,
        )
    except ValueError:
        return None


def read_samples(file: Path) -> list[Sample]:
    """The samples of one rank, in order of time, without lines that are torn."""
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        return [sample for fields in csv.reader(lines) if (sample := _sample_of(fields)) is not None]


def _column(rows: list[Sample], name: str, scale: float, n_points: int) -> list[float | None]:
    """The column in n_points equal stretches, the highest value of each; None where the card does not tell."""
    found: list[float | None] = []
    for point in range(n_points):
        stretch = rows[point * len(rows) // n_points : (point + 1) * len(rows) // n_points]
        told = [getattr(row, name) / scale for row in stretch if getattr(row, name) is not None]
        found.append(max(told, default=None))
    return found


def gpu_picture(folder: Path) -> str:
    """Memory in use, utilisation and power of every rank's GPU over the run; a data URI, empty without a sample.

    The x axis is the time that was sampled: the hours between a run that was killed and its resumption take no room.
    """
    runs: dict[str, list[Sample]] = {}
    for file in sorted(folder.glob("rank*.csv")):
        if rows := read_samples(file):
            runs[file.stem.replace("rank", "rank ")] = rows
    if not runs:
        return ""
    n_points = min(POINTS, min(len(rows) for rows in runs.values()))
    some = next(iter(runs.values()))
    steps_s = [later.unix_s - row.unix_s for row, later in pairwise(some)]
    sampled_min = len(some) * median(steps_s or [0.0]) / 60
    columns = {
        "memory in use (GiB)": ("used_bytes", 2**30),
        "busy (%)": ("busy_percent", 1),
        "power (W)": ("power_w", 1),
    }
    panels = {
        label: {rank: _column(rows, name, scale, n_points) for rank, rows in runs.items()}
        for label, (name, scale) in columns.items()
        if any(getattr(row, name) is not None for rows in runs.values() for row in rows)
    }
    minutes = [sampled_min * (point + 1) / n_points for point in range(n_points)]
    return charts.lines(minutes, panels, x_label="minutes")
