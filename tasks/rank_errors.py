"""The error that a group of ranks ended with, from what they left on disk and from how they ended."""

import json
import re
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from artifacts.store import write_atomically
from schemas.errors import StageError, UserError, system_line

PROBE_BYTES = 64 * 2**10


def _write_refused(folder: Path) -> OSError | None:
    """What the system says to a small file in this folder; None: it takes it."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink()
    except OSError as error:
        return error
    return None


def _records(out: Path) -> list[tuple[int, dict[str, Any]]]:
    """The ranks that left an error, and what they left."""
    return [
        (int(path.stem.removeprefix("error-rank")), json.loads(path.read_text()))
        for path in sorted(out.glob("error-rank*.json"))
    ]


def agent_killed(out: Path, exit_code: int) -> StageError:
    """The process between us and the ranks was killed: what they say of it comes second."""
    name = signal.Signals(-exit_code).name
    error = StageError(f"torch.distributed.run was ended by {name} from outside; the ranks were stopped")
    for rank, record in _records(out):
        error.add_note(f"rank {rank}: {record['message']}")
    return error


def root_cause(out: Path, failures: list[tuple[int, int]], exit_code: int, tail: Sequence[str]) -> Exception:
    """The error that made the group fail: a rank's own one before that of ranks that only lost their peer."""
    records = _records(out)
    own = sorted((record["time"], rank, record) for rank, record in records if record["type"] != "PeerLostError")
    if own:
        _, rank, record = own[0]
        if record["user_error"]:
            what, where, fix = record["user_error"]
            return UserError(what, where=where, fix=fix)
        kind = "" if record["type"] == "StageError" else f"{record['type']}: "
        error = StageError(f"rank {rank}: {kind}{record['message']}")
        error.add_note(record["traceback"])
        return error
    recorded = {rank for rank, _ in records}
    killed = [(rank, -code) for rank, code in failures if code < 0 and rank not in recorded]
    if exit_code < 0 and not failures:
        killed.append((0, -exit_code))
    if killed:
        rank, signum = killed[0]
        why = " (killed from outside, or out of memory)" if signum == signal.SIGKILL else ""
        return StageError(f"rank {rank} was ended by {signal.Signals(signum).name}{why}; the other ranks were stopped")
    if records:
        return StageError(f"rank {records[0][0]}: {records[0][1]['message']}")
    said = next((line.partition("error: ")[2] for line in tail if re.match(r"(\[rank\d+\]:)?error: ", line)), None)
    if said is not None:  # a rank that could not leave its error on a full disk
        return StageError(said)
    if refused := _write_refused(out):  # neither what the ranks print nor their errors had a place to go
        return StageError(system_line(refused, out))
    return StageError(f"training ended with status {exit_code}; its last lines:\n" + "\n".join(tail))
