"""Starts a training process group, passes its lines on, and never leaves anything of it behind.

A stage that trains is a process of its own (memory starts from zero, cancelling is a signal). Its working folder lies
under the store and is named by the digest of its spec, so the next call with the same inputs goes on from the last
checkpoint of a run that was killed.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from artifacts.store import Store, write_atomically
from schemas.errors import StageError, UserError
from schemas.reports import Trained, TrainReport
from schemas.spec import TrainSpec

Log = Callable[[str], None]

AFTER_FAILURE_S = 20.0
"""How long the other ranks may take to end once one of them has failed, before they are killed."""

STOP_GRACE_S = 30.0
"""How long a cancelled group may take to save a checkpoint."""

ALLOCATOR = "expandable_segments:True"
"""PyTorch's setting for GPU memory: pieces of any size share one growing range, so none is left too small to use."""

_REPOSITORY = Path(__file__).resolve().parent.parent
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_KEPT_LINES = 30


def run_spec(
    spec: TrainSpec, store: Store, *, n_processes: int = 1, log: Log | None = None, timeout_s: float | None = None
) -> tuple[str, Path]:
    """Runs a spec to its end in its working folder, or goes on with an earlier try of the same spec.

    Returns:
        the text of report.json, and the working folder; `discard` it when what it holds has been stored.

    Raises:
        UserError, StageError: as in `launch`.
    """
    out = store.root / "work" / f"{spec.stage}-{spec.digest()[:16]}"
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "spec.json", spec.model_dump_json(indent=2))
    if not (out / "report.json").is_file():
        launch(out / "spec.json", n_processes=n_processes, log=log, timeout_s=timeout_s)
    return (out / "report.json").read_text(), out


def store_training(report: str, out: Path, store: Store) -> Trained:
    """Moves what a training run left in its working folder into the store, and removes the folder."""
    samples = out / "gpu"
    trained = Trained(
        adapter=store.add(out / "adapter", "adapter"),
        report=TrainReport.model_validate_json(report),
        gpu_samples=store.add(samples, "gpu_samples") if samples.is_dir() else None,
    )
    discard(out)
    return trained


def discard(out: Path) -> None:
    """Removes a finished working folder, checkpoints and all."""
    shutil.rmtree(out)


def launch(spec_path: Path, *, n_processes: int = 1, log: Log | None = None, timeout_s: float | None = None) -> None:
    """Runs `engine.train` on a spec with one or more ranks and returns when `report.json` is there.

    Whatever ends this call early (an exception, a cancel, the time-out) ends every rank: first a SIGTERM, on which
    they save, then SIGKILL.

    Args:
        log: called with every line that a rank prints, prefixed by its rank where there are several.

    Raises:
        UserError: a rank found bad input.
        StageError: a rank failed or was killed (its own error, not that of the ranks that waited for it), or the
            time-out passed.
    """
    out = spec_path.parent
    for stale in out.glob("error-rank*.json"):
        stale.unlink()
    process = subprocess.Popen(
        _command(spec_path, n_processes),
        cwd=_REPOSITORY,
        env=environment_of(os.environ, n_processes),
        stdin=subprocess.PIPE,  # closes when this process dies, which is how the ranks notice
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C at the terminal reaches us alone; we stop the ranks in order
    )
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        exit_code, failures = _follow(process, tail, log, timeout_s)
    finally:
        _stop_tree(process, STOP_GRACE_S if sys.exc_info()[0] is not None else 0.0)
    if exit_code != 0 or not (out / "report.json").is_file():
        raise _root_cause(out, failures, exit_code, tail)


def environment_of(own: Mapping[str, str], n_processes: int) -> dict[str, str]:
    """The environment of the ranks: this process's own, completed where it says nothing."""
    threads = max(1, (os.cpu_count() or 1) // n_processes)
    # waiting threads that spin cost twice the CPU time as soon as something else runs on the machine
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in own:  # its earlier name
        environment["PYTORCH_ALLOC_CONF"] = ALLOCATOR
    return environment | dict(own) | {"HF_HUB_OFFLINE": "1"}  # everything a spec names is a local file


def _command(spec_path: Path, n_processes: int) -> list[str]:
    worker = ["-m", "engine.train", str(spec_path), "--stop-with-parent"]
    if n_processes == 1:
        return [sys.executable, "-u", *worker]
    return [
        *(sys.executable, "-u", "-m", "torch.distributed.run"),
        "--standalone",  # a free rendezvous port, so one that is still taken does not matter
        "--local-addr=127.0.0.1",  # the default, the host's own name, does not resolve on every host
        f"--nproc-per-node={n_processes}",
        "--max-restarts=0",
        "--role=rank",
        "--tee=3",
        f"--log-dir={spec_path.parent / 'logs'}",
        *worker,
    ]


def _follow(
    process: subprocess.Popen[bytes], tail: deque[str], log: Log | None, timeout_s: float | None
) -> tuple[int, list[tuple[int, int]]]:
    """Passes lines on until the group ends; returns its exit code and (local rank, exit code) of ranks that failed."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.decode(errors="replace").rstrip())
        lines.put(None)

    reader = threading.Thread(target=read, name="training-output", daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    kill_at: float | None = None
    failures: list[tuple[int, int]] = []
    while True:
        now = time.monotonic()
        if deadline is not None and now > deadline:
            raise StageError(f"training did not end within {timeout_s:g} s and was stopped")
        if kill_at is not None and now > kill_at:
            _stop_tree(process, 0.0)
            kill_at = None
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line is None:
            return process.wait(), failures
        tail.append(line)
        if log is not None:
            log(line)
        if found := _FAILED.search(line):
            failures.append((int(found[2]), int(found[1])))
            kill_at = kill_at or now + AFTER_FAILURE_S


def _stop_tree(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a process and all it started: SIGTERM to the ranks, then SIGKILL to whatever is left after the grace.

    The process is waited for by its Popen alone: as soon as anybody has, its id may be that of a stranger.
    """
    if process.poll() is not None:
        return
    ranks = psutil.Process(process.pid).children(recursive=True)
    if grace_s > 0:
        deadline = time.monotonic() + grace_s
        for rank in ranks:
            _send(rank, signal.SIGTERM)
        if not ranks:  # the agent in between ends by itself when its ranks have ended
            process.terminate()
        psutil.wait_procs(ranks, timeout=grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    process.kill()
    for rank in ranks:
        _send(rank, signal.SIGKILL)
    process.wait()


def _send(target: psutil.Process, signum: signal.Signals) -> None:
    try:
        target.send_signal(signum)
    except psutil.NoSuchProcess:
        return


def _root_cause(out: Path, failures: list[tuple[int, int]], exit_code: int, tail: deque[str]) -> Exception:
    """The error that made the group fail: a rank's own one before that of ranks that only lost their peer."""
    records: list[tuple[int, dict[str, Any]]] = [
        (int(path.stem.removeprefix("error-rank")), json.loads(path.read_text()))
        for path in out.glob("error-rank*.json")
    ]
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
    return StageError(f"training ended with status {exit_code}; its last lines:\n" + "\n".join(tail))
