"""The process of one training stage: reads a spec, does the work, writes report.json beside it.

    python -m engine.train spec.json                                                           one process
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m engine.train spec.json  one branch a rank

Exit status 0 means `report.json` is there, and `finished.json` says that it is whole. Otherwise `error-rank<r>.json`
holds that rank's own error. SIGTERM, or Ctrl-C, saves a checkpoint at the next step and ends; the next start with the
same spec goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from artifacts.finished import mark_finished, unmark
from artifacts.store import write_atomically
from schemas.errors import StageError, UserError, system_line
from schemas.spec import TrainSpec, read_spec

if TYPE_CHECKING:
    from engine.group import Group, Launch
    from engine.session import Stop
    from schemas.reports import EvalReport, TrainReport


LOCK_WAIT_S = 900.0
"""How long the ranks of an earlier start may take to end their step and save: a step of a long pair takes minutes."""

ORPHAN_S = 900.0
"""How long a rank goes on after its launcher died, which is as long as a launcher that lives would have given it."""


class ErrorRecord:
    """Context that leaves an error on disk before it ends the process, so that the launcher shows it and not its echo.

    An error that is meant for the user ends it with one line; any other, which is ours to mend, with its traceback.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> ErrorRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or error is None:
            return
        steps = "".join(traceback.format_exception(kind, error, trace))
        if isinstance(error, KeyboardInterrupt):
            kind, error = StageError, StageError("ended by a second Ctrl-C; what was saved before is whole")
        if isinstance(error, OSError):  # a full disk, a folder that is read only: the system's refusal, not a fault
            place = error.filename2 or error.filename or self.path.parent
            kind, error = StageError, StageError(system_line(error, place))
        if isinstance(error, MemoryError):
            kind, error = StageError, StageError("host memory ran out (free some, or raise the limit: ulimit -v)")
        record = {
            "time": time.time(),
            "type": kind.__name__,
            "message": str(error),
            "user_error": [error.what, error.where, error.fix] if isinstance(error, UserError) else None,
            "traceback": steps,
        }
        with contextlib.suppress(OSError):  # where it cannot be written either, the line below has to do
            if self.path.parent.is_dir():
                write_atomically(self.path, json.dumps(record))
        if isinstance(error, (UserError, StageError)):
            sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")  # in one piece, as other ranks write there too
            raise SystemExit(2 if isinstance(error, UserError) else 1)


def _end_on_signal() -> None:
    """While nothing is there to be saved: imports take seconds, and may catch whatever a handler raises.

    It leaves no record: a rank that is ended because another one has failed is not the one to be shown.
    """

    def end(signum: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"error: stopped on request before training began\n")
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _stop_on_signal(stop: Stop) -> None:
    def wish(signum: int, frame: object) -> None:
        stop.wanted = True
        with contextlib.suppress(OSError):  # not `print`: the signal may have come in the middle of another one
            os.write(1, b"asked to stop: saving at the end of this step\n")

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends it at once

    signal.signal(signal.SIGTERM, wish)
    signal.signal(signal.SIGINT, wish)


def _stop_with_parent(stop: Stop) -> None:
    """Stops when standard input closes: its other end is held by the launcher, so it closes when that dies.

    A rank that waits for one that hangs would never come to its stop, and nobody is left to end it: it ends itself, and
    `torch.distributed.run` then kills the one that hangs.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.wanted = True
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=wait, name="stop-with-parent", daemon=True).start()


def error_file(out: Path, rank: int) -> Path:
    """Where a rank leaves the error that it ended with."""
    return out / f"error-rank{rank}.json"


def _lock(out: Path, rank: int, stop: Stop) -> None:
    """Makes this process the only one of its rank in the working folder, until it has ended.

    A rank that is still in its last step, after its launcher died, is waited for: it holds the memory that this one is
    about to measure. The lock is never given back by hand, so that whoever gets it finds that memory free.

    Raises:
        UserError: another process trains in this folder.
        StageError: asked to stop while waiting.
    """
    descriptor = os.open(out / f"lock-rank{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    waits = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            error_file(out, rank).unlink(missing_ok=True)  # what an earlier rank, ended only now, has to say is its own
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise UserError("another process is training this very run", where=out, fix="wait for it") from error
            if stop.wanted:
                raise StageError("stopped on request while waiting for an earlier start of this run") from error
            if not waits:
                waits = True
                print(
                    f"rank {rank} of an earlier start of this run is still there: waiting up to {LOCK_WAIT_S:g} s for "
                    f"its step to end, in {out}",
                    flush=True,
                )
            time.sleep(0.5)


def _check_sections(spec: TrainSpec, path: Path) -> None:
    """Raises a UserError where a section that the stage reads is not given."""
    for name in (spec.stage, "lora") if spec.stage == "sft" else (spec.stage,):
        if getattr(spec, name) is None:
            raise UserError(
                f"stage {spec.stage} needs {name}, which is not given", where=path, fix="add it; {} takes every default"
            )


def _check_n_ranks(spec: TrainSpec, path: Path) -> None:
    """Only pairs are dealt to ranks; in another stage each would do all of the work.

    Raises:
        UserError: several ranks were started for such a stage.
    """
    n_ranks = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if spec.stage != "simpo" and n_ranks > 1:
        raise UserError(
            f"stage {spec.stage} is the work of one process, and {n_ranks} were started",
            where=path,
            fix="start it without torch.distributed.run",
        )


def _see_one_device() -> None:
    """One device a rank, decided before CUDA starts: a Trainer that sees several would use DataParallel.

    Raises:
        UserError: CUDA_VISIBLE_DEVICES shows several, and fewer than there are ranks.
    """
    local_rank, shown = os.environ.get("LOCAL_RANK"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if local_rank is None or (shown is not None and "," not in shown):
        return
    devices = shown.split(",") if shown is not None else None
    if devices is not None and int(local_rank) >= len(devices):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES shows {len(devices)} GPUs, and rank {local_rank} needs one of its own",
            where="simpo.n_processes",
            fix="set it to the number of GPUs",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(local_rank)] if devices is not None else local_rank


def be_deterministic() -> None:
    """Before CUDA starts: kernels that add in a fixed order, or an error where PyTorch has none."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what PyTorch asks for before it takes cuBLAS for deterministic
    import torch

    torch.use_deterministic_algorithms(True)
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False  # it costs a pass; nothing here reads what it has not written


def _run(spec: TrainSpec, launch: Launch, out: Path, stop: Stop) -> TrainReport | EvalReport:
    import transformers

    from engine.group import check_devices, check_spec, group_of, leave
    from engine.inputs import verify_inputs
    from engine.loading import pick_device
    from engine.monitor import device_uuid, gpu_uses, load_nvml, monitor_of
    from engine.scorers import hold_device

    transformers.logging.set_verbosity_error()  # it warns that ranks exist which its Trainer is not told of
    transformers.logging.disable_progress_bar()
    _lock(out, launch.rank, stop)
    verify_inputs(spec)
    group = group_of(launch, pick_device())  # a stage loads its model first and joins the others then
    check_spec(group, spec.digest())
    check_devices(group, device_uuid(group.device) if group.device.type == "cuda" else None)
    hold_device(spec.base, group.device)
    if launch.rank == 0:
        unmark(out)
    with monitor_of(out, launch.rank, group.device, load_nvml()) as monitor:
        report = _stage(spec, group, out, stop)
    leave(group)
    seen = {"settings": report.settings | {"gpu_monitor": monitor.status}, "gpus": gpu_uses(out)}
    return report.model_copy(update=seen)


def _stage(spec: TrainSpec, group: Group, out: Path, stop: Stop) -> TrainReport | EvalReport:
    """Runs the spec's stage; only that stage's own module is imported, since each takes seconds."""
    work: Callable[[], TrainReport | EvalReport]
    if spec.stage == "sft" and spec.sft is not None:
        from engine import sft

        work = partial(sft.train, spec, spec.sft, group, out, stop)
    elif spec.stage == "simpo" and spec.simpo is not None:
        from engine import preference

        work = partial(preference.train, spec, spec.simpo, group, out, stop)
    else:
        from engine import evaluate

        assert spec.evaluate is not None  # `_check_sections` has seen to it
        work = partial(evaluate.evaluate, spec, spec.evaluate, group)
    gc.freeze()  # what the imports made lives to the end: it is not looked through again, at the end neither
    gc.enable()
    return work()


def main() -> None:
    _end_on_signal()
    gc.disable()  # until `_stage` has imported all: collecting meanwhile took a third of a short run's CPU time
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, help="a TrainSpec as JSON; results are written to its folder")
    parser.add_argument("--stop-with-parent", action="store_true", help="stop when standard input closes")
    options = parser.parse_args()
    out = options.spec.resolve().parent

    with ErrorRecord(error_file(out, int(os.environ.get("RANK", "0")))):
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import warns of a CPU kernel it lacks
        spec = read_spec(options.spec)
        _check_sections(spec, options.spec)
        _check_n_ranks(spec, options.spec)
        _see_one_device()
        if spec.base.backend == "unsloth" and importlib.util.find_spec("unsloth") is not None:
            importlib.import_module("unsloth")  # it replaces parts of transformers and peft, so it comes before them
        if spec.base.deterministic:
            be_deterministic()
        from engine.group import take_launch
        from engine.session import Stop

        launch = take_launch()
        stop = Stop()
        _stop_on_signal(stop)
        if options.stop_with_parent:
            _stop_with_parent(stop)
        report = _run(spec, launch, out, stop)
        if launch.rank == 0:
            write_atomically(out / "report.json", report.model_dump_json(indent=2))
            mark_finished(out, spec.digest())


if __name__ == "__main__":
    main()
