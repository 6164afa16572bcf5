"""How much host memory this process can still get: the machine's, and that of every control group it is in.

Imports no torch. Units: bytes. Control groups: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max,
memory.current) and cgroup-v1/memory.html (memory.limit_in_bytes, memory.usage_in_bytes).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from schemas.errors import StageError

ROOT = Path("/")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostMemoryError(StageError):
    """The host refused memory."""


class HostLimit(NamedTuple):
    """What can still be had, and whose limit that is."""

    available_bytes: int
    by: str


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the control groups that limit this process's memory, own first, with the names of their files."""
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, names = (root / "sys/fs/cgroup/memory", _V1_FILES) if controllers else (root / "sys/fs/cgroup", _V2_FILES)
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder, names
            folder = folder.parent
        yield top, names  # in a container its own group is mounted here, whatever the path says


def _free_in(folder: Path, names: tuple[str, str, str]) -> int | None:
    """Limit less use of one group; page cache that the kernel would give up does not count. None: no limit."""
    limit, usage, cache = names
    try:
        limit_text, used_bytes = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError):  # the root group has no limit, and so no such file
        return None
    if limit_text == "max":
        return None
    return max(0, int(limit_text) - used_bytes + int(statistics.get(cache, 0)))


def host_limits(root: Path = ROOT) -> list[HostLimit]:
    """What the machine leaves, then what each control group of this process does. `root`: where /proc and /sys are."""
    limits = [HostLimit(psutil.virtual_memory().available, "the machine")]
    for folder, names in _groups(root):
        free_bytes = _free_in(folder, names)
        if free_bytes is not None:
            limits.append(HostLimit(free_bytes, f"the control group {folder}"))
    return limits


def tightest(limits: Sequence[HostLimit]) -> HostLimit:
    return min(limits, key=lambda limit: limit.available_bytes)


def locked_limit_bytes() -> int | None:
    """RLIMIT_MEMLOCK of this process; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
