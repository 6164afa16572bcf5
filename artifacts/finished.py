"""The mark of a working folder whose stage has ended: written last, and valid while what it speaks of is unchanged."""

import contextlib
import json
from pathlib import Path

from artifacts.store import payload_digest, write_atomically

_MARK = "finished.json"


def _contents(out: Path, run: str) -> dict[str, str | None]:
    """Digests of the spec, the report and the adapter; None for what is not there."""
    paths = {name: out / name for name in ("report.json", "adapter")}
    left = {name: payload_digest(path)[0] if path.exists() else None for name, path in paths.items()}
    return {"spec": run} | left


def mark_finished(out: Path, run: str) -> None:
    """Call it when the report, and the adapter of a stage that trains, have been written.

    Args:
        run: digest of the spec that they are of, as it was read: the file may have been edited since.
    """
    write_atomically(out / _MARK, json.dumps(_contents(out, run)))


def is_finished(out: Path, run: str) -> bool:
    """Whether the stage of this spec has ended, and its report and adapter are what it left.

    Args:
        run: digest of the spec. The mark of another one, or of none, does not count.
    """
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / _MARK).read_text()) == _contents(out, run)
    return False


def unmark(out: Path) -> None:
    """Before the folder is worked in or removed: should that be cut short, it counts as not finished."""
    (out / _MARK).unlink(missing_ok=True)
