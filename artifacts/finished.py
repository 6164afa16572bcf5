"""The mark of a working folder whose stage has ended: written last, and valid while what it speaks of is unchanged."""

import contextlib
import json
from pathlib import Path

from artifacts.store import payload_digest, write_atomically

_MARK = "finished.json"


def _contents(out: Path) -> dict[str, str | None]:
    """Digests of the report and of the adapter; None for what is not there."""
    paths = {name: out / name for name in ("report.json", "adapter")}
    return {name: payload_digest(path)[0] if path.exists() else None for name, path in paths.items()}


def mark_finished(out: Path) -> None:
    """Call it when the report, and the adapter of a stage that trains, have been written."""
    write_atomically(out / _MARK, json.dumps(_contents(out)))


def is_finished(out: Path) -> bool:
    """Whether the stage has ended, and its report and adapter are what it left."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / _MARK).read_text()) == _contents(out)
    return False


def unmark(out: Path) -> None:
    """Before the folder is worked in or removed: should that be cut short, it counts as not finished."""
    (out / _MARK).unlink(missing_ok=True)
