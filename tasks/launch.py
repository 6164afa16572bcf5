"""Starts a training process group, passes its lines on, and never leaves anything of it behind.

A stage that trains is a process of its own (memory starts from zero, cancelling is a signal). Its working folder lies
under the store and is named by the digest of its spec, so the next call with the same inputs goes on from the last
checkpoint of a run that was killed.
"""

import contextlib
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

import psutil

from artifacts.finished import is_finished, unmark
from artifacts.store import Store, write_atomically
from schemas.errors import StageError
from schemas.reports import Trained, TrainReport
from schemas.spec import TrainSpec, read_spec
from tasks.rank_errors import agent_killed, root_cause

Log = Callable[[str], None]

AFTER_FAILURE_S = 20.0
"""How long the other ranks may take to end once one of them has failed, before they are killed. Left to itself
`torch.distributed.run` gives them 30 s."""

STOP_GRACE_S = 30.0
"""How long a cancelled group may take to save a checkpoint, when its step has ended."""

MAX_STOP_GRACE_S = 900.0
"""How long a cancelled group may take in all, however long its steps are."""

ALLOCATOR = "expandable_segments:True"
"""PyTorch's setting for GPU memory: pieces of any size share one growing range, so none is left too small to use."""

_REPOSITORY = Path(__file__).resolve().parent.parent
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_CLOSING = re.compile(r"Sending process \d+ closing signal")  # a rank has failed, or the agent got a signal itself
_STEP = re.compile(r"\bstep \d+/\d+ ")
_RANK = "[rank"  # how its lines begin, where there are several
_KEPT_LINES = 30
_KEPT_STEPS = 8


def run_spec(
    spec: TrainSpec,
    store: Store,
    *,
    version: int,
    n_processes: int = 1,
    log: Log | None = None,
    timeout_s: float | None = None,
) -> tuple[str, Path]:
    """Runs a spec to its end in its working folder, or goes on with an earlier try of the same spec.

    Args:
        version: of the stage. What another one has begun is not gone on with.

    Returns:
        the text of report.json, and the working folder; `discard` it when what it holds has been stored.

    Raises:
        UserError, StageError: as in `launch`.
    """
    out = store.root / "work" / f"{spec.stage}-v{version}-{spec.digest()[:16]}"
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "spec.json", spec.model_dump_json(indent=2))
    if not is_finished(out, spec.digest()):
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
    unmark(out)
    shutil.rmtree(out)


def launch(spec_path: Path, *, n_processes: int = 1, log: Log | None = None, timeout_s: float | None = None) -> None:
    """Runs `engine.train` on a spec with one or more ranks and returns when it has ended and `report.json` is there.

    Whatever ends this call early (an exception, a cancel, the time-out) ends every rank: first a SIGTERM, on which
    they save at the end of their step, then SIGKILL. They get twice the time of the longest of the latest steps (a
    wish that comes after a step's exchange is heeded at the end of the next) and STOP_GRACE_S, up to MAX_STOP_GRACE_S.

    Args:
        log: called with every line that a rank prints, prefixed by its rank where there are several.

    Raises:
        UserError: a rank found bad input.
        StageError: a rank failed or was killed (its own error, not that of the ranks that waited for it), or the
            time-out passed.
    """
    out, run = spec_path.parent, read_spec(spec_path).digest()
    unmark(out)
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
    group = _Group(process, n_processes)
    try:
        exit_code, failures = _follow(group, tail, log, timeout_s)
    finally:
        group.stop(log)
    if exit_code != 0 or not is_finished(out, run):
        killed = exit_code < 0 and n_processes > 1
        error = agent_killed(out, exit_code) if killed else root_cause(out, failures, exit_code, tail)
        if log is not None and isinstance(error, StageError):
            log(f"failed: {str(error).splitlines()[0]}")  # the stage may be tried again, and this is why
        raise error


def environment_of(own: Mapping[str, str], n_processes: int) -> dict[str, str]:
    """The environment of the ranks: this process's own, completed where it says nothing."""
    threads = max(1, (os.cpu_count() or 1) // n_processes)
    # waiting threads that spin cost twice the CPU time as soon as something else runs on the machine
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    # a service manager may signal torch.distributed.run as well, which would leave the ranks 30 s for their step
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{MAX_STOP_GRACE_S:.0f}"
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


class _Group:
    """A process that was started, and the ranks: that process itself, or the children of `torch.distributed.run`.

    The process is waited for by its Popen alone: as soon as anybody has, its id may be that of a stranger.
    """

    def __init__(self, process: subprocess.Popen[bytes], n_processes: int) -> None:
        self.process, self.n_processes = process, n_processes
        self._ranks: set[psutil.Process] = set()
        self._stepped_at = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=_KEPT_STEPS)

    def look(self) -> None:
        """Remembers the ranks while their agent lives: once it is gone, nothing leads to them any more."""
        if self.lacks_one() and self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(self.process.pid)
                self._ranks.update([started] if self.n_processes == 1 else started.children())

    def lacks_one(self) -> bool:
        """Whether a rank has ended, or has not been seen yet."""
        return len(self._living()) < self.n_processes

    def stepped(self) -> None:
        """A step has ended; the first one is taken for as long as all that came before it."""
        before, self._stepped_at = self._stepped_at, time.monotonic()
        self._steps_s.append(self._stepped_at - before)

    def stop(self, log: Log | None = None) -> None:
        """Ends all of it: the ranks are asked to save and end; what is left after a while is killed."""
        self.look()
        if self.process.stdin is not None:
            self.process.stdin.close()  # a wish to stop, too, and one that reaches a rank which we have not seen
        for rank in self._living():
            _send(rank, signal.SIGTERM)
        if not self._ranks:
            self.process.terminate()
        grace_s = min(MAX_STOP_GRACE_S, STOP_GRACE_S + 2 * max(self._steps_s, default=0.0))
        deadline = time.monotonic() + grace_s
        if log is not None and self._living():
            with contextlib.suppress(Exception):  # whatever becomes of the words, the ranks are ended
                log(f"waiting up to {grace_s:.0f} s for the end of the step and its checkpoint")
        while self._living() and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):  # an agent ends by itself when its ranks have ended
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill_ranks()
        self.process.kill()
        self.process.wait()

    def kill_ranks(self) -> None:
        for rank in self._living():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [rank, *rank.children(recursive=True)]:
                    _send(process, signal.SIGKILL)

    def _living(self) -> list[psutil.Process]:
        return [rank for rank in self._ranks if _lives(rank)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # one that nobody has waited for
    except psutil.NoSuchProcess:
        return False


def _send(target: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        target.send_signal(signum)


def _follow(
    group: _Group, tail: deque[str], log: Log | None, timeout_s: float | None
) -> tuple[int, list[tuple[int, int]]]:
    """Passes lines on until the group ends; returns its exit code and (local rank, exit code) of ranks that failed."""
    process = group.process
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
            group.kill_ranks()  # and not their agent, which says who was the first
            kill_at = None
        group.look()
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line is None:
            return process.wait(), failures
        tail.append(line)
        if _STEP.search(line):
            group.stepped()
        if _CLOSING.search(line) and group.lacks_one():
            kill_at = kill_at or now + AFTER_FAILURE_S
        if found := _FAILED.search(line):
            failures.append((int(found[2]), int(found[1])))
        if log is not None and (group.n_processes == 1 or line.startswith(_RANK)):
            log(line)  # not torch.distributed.run's own: tables and tracebacks of what `root_cause` says in a line
