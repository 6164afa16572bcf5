"""The process of a training stage before it trains: its lock, and how it takes a signal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from rank_faults import CONFIG, prepare
from training_inputs import simpo_spec

from artifacts.finished import is_finished, mark_finished
from engine import group as ranks
from engine import train
from engine.group import Group, Launch
from engine.session import Stop
from schemas.errors import StageError, UserError
from schemas.training import SftConfig
from tasks.rank_errors import root_cause


def hold(path: Path) -> int:
    """The lock of a rank of an earlier start."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_every_rank_waits_for_its_own_predecessor(tmp_path: Path) -> None:
    """Rank 1: before it measures a GPU that is still full; asked to stop, it no longer waits."""
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", CONFIG))
    held = hold(path.parent / "lock-rank1")
    rank = subprocess.Popen(
        [sys.executable, "-u", "-m", "engine.train", str(path)],
        cwd=REPOSITORY,
        env=dict(os.environ) | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None
    limit = threading.Timer(60, rank.kill)
    limit.start()
    assert rank.stdout.readline().startswith("rank 1 of an earlier start of this run is still there: waiting up to 900")
    rank.send_signal(signal.SIGTERM)
    said, _ = rank.communicate()
    limit.cancel()
    os.close(held)
    assert said == "asked to stop: saving at the end of this step\n"
    error = json.loads((path.parent / "error-rank1.json").read_text())
    assert error["message"] == "stopped on request while waiting for an earlier start of this run"


def test_second_start_of_a_run_is_told_at_once_and_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "LOCK_WAIT_S", 1.2)
    held = hold(tmp_path / "lock-rank0")
    train._lock(tmp_path, 1, Stop())
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match="another process is training this very run"):
        train._lock(tmp_path, 0, Stop())
    assert capsys.readouterr().out.count("waiting up to 1.2 s") == 1
    os.close(held)
    late = tmp_path / "error-rank0.json"
    late.write_text("stopped on request after step 5")
    train._lock(tmp_path, 0, Stop())
    assert not late.exists(), "what the earlier start said as it ended would be taken for the error of this one"


def test_rank_ends_itself_when_its_launcher_died_and_its_stop_never_comes() -> None:
    """As one that waits in a collective for a rank that is frozen."""
    waits = (
        "import time, types; from engine import train; train.ORPHAN_S = 0.2;"
        "train._stop_with_parent(types.SimpleNamespace()); print('up', flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", waits], cwd=REPOSITORY, stdin=pipe, stdout=pipe) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.6)
        assert rank.stdin is not None
        rank.stdin.close()
        assert rank.wait(30) == 1


@pytest.mark.parametrize(
    ("shown", "rank", "seen"),
    [(None, "1", "1"), ("4,7", "1", "7"), ("GPU-1,GPU-2", "0", "GPU-1"), ("3", "1", "3"), ("", "1", "")],
)
def test_a_rank_sees_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, rank: str, seen: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    train._see_one_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_more_ranks_than_devices_are_shown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="shows 2 GPUs, and rank 2 needs one of its own"):
        train._see_one_device()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"simpo": None}, "simpo needs simpo"),
        ({"stage": "evaluate"}, "evaluate needs evaluate"),
        ({"stage": "sft"}, "sft needs sft"),
        ({"stage": "sft", "sft": SftConfig()}, "sft needs lora"),
    ],
)
def test_a_section_that_the_stage_reads_is_not_given(tmp_path: Path, change: dict[str, Any], missing: str) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)
    path = tmp_path / "own-spec.json"
    train._check_sections(spec, path)
    with pytest.raises(UserError) as raised:
        train._check_sections(spec.model_copy(update=change), path)
    assert str(raised.value) == f"{path}: stage {missing}, which is not given (add it; {{}} takes every default)"


@pytest.mark.parametrize("stage", ["sft", "evaluate"])
def test_only_pairs_are_dealt_to_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    pairs = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)
    alone = pairs.model_copy(update={"stage": stage})
    monkeypatch.setenv("WORLD_SIZE", "2")
    train._check_n_ranks(alone, tmp_path)  # what torch.distributed.run did not set says nothing of ranks
    monkeypatch.setenv("RANK", "1")
    train._check_n_ranks(pairs, tmp_path)
    with pytest.raises(UserError, match=f"stage {stage} is the work of one process, and 2 were started"):
        train._check_n_ranks(alone, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    train._check_n_ranks(alone, tmp_path)


def test_signal_is_taken_when_nobody_reads_any_more() -> None:
    script = (
        "import os, signal, types; from engine import train; stop = types.SimpleNamespace(wanted=False);"
        "train._stop_on_signal(stop); os.kill(os.getpid(), signal.SIGTERM); os._exit(0 if stop.wanted else 3)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, stdout=writing, timeout=60)
    os.close(writing)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("too long", where="render", fix="cut"), 2, "error: render: too long (cut)\n"),
        (StageError("rank 0 died\nits last words"), 1, "error: rank 0 died\n"),
    ],
)
def test_an_error_meant_for_the_user_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    with pytest.raises(SystemExit) as ended, train.ErrorRecord(tmp_path / "error-rank0.json"):
        raise error
    assert ended.value.code == code
    assert capfd.readouterr().err == line
    assert json.loads((tmp_path / "error-rank0.json").read_text())["message"] == str(error)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "Full", "/store/x"),
            "error: /store/x: Full (free some space, or choose a folder of another disk)\n",
        ),
        (OSError(errno.ENOSPC, "Full"), "error: {out}: Full (free some space, or choose a folder of another disk)\n"),
        (
            OSError(errno.EISDIR, "Is a directory", "a", None, "b"),
            "error: b: Is a directory (a folder lies where a file should)\n",
        ),
        (OSError(errno.ENXIO, "No such device", "/store/x"), "error: /store/x: No such device\n"),
        (
            OSError(errno.EIO, "Input/output error", "/store/x"),
            "error: /store/x: Input/output error (look at the disk: it could not read or write)\n",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: OSError, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the error cannot be left on disk for the launcher, which then shows what the rank has printed."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(train, "write_atomically", refuse)
    with pytest.raises(SystemExit) as ended, train.ErrorRecord(tmp_path / "error-rank0.json"):
        raise error
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said == line.format(out=tmp_path)
    for printed in (said, f"[rank1]:{said}"):
        found = root_cause(tmp_path, [(0, 1)], 1, ["step 1/2 loss 1", printed.rstrip(), "Traceback"])
        assert str(found) == said.removeprefix("error: ").rstrip()


def test_disk_that_takes_not_even_an_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks print goes to files, which fill first; then their errors have no place either."""
    assert "its last lines:\nTraceback" in str(root_cause(tmp_path, [(0, 1)], 1, ["Traceback"]))
    assert not list(tmp_path.iterdir())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    found = root_cause(tmp_path, [(0, 1)], 1, ["Traceback"])
    assert str(found) == f"{tmp_path}: No space left on device (free some space, or choose a folder of another disk)"
    assert not list(tmp_path.iterdir())


def test_host_memory_that_ran_out_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, train.ErrorRecord(tmp_path / "error-rank0.json"):
        raise MemoryError
    assert ended.value.code == 1
    assert capfd.readouterr().err == "error: host memory ran out (free some, or raise the limit: ulimit -v)\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_is_one_line(tmp_path: Path, signum: signal.Signals) -> None:
    """The import of torch ends in a signal, and catches what it may raise."""
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {signum:d})\nexcept BaseException:\n    pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "engine.train", str(path)],
        cwd=REPOSITORY,
        env=dict(os.environ) | {"PYTHONPATH": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (1, "error: stopped on request before training began\n")
    assert not (path.parent / "error-rank0.json").exists()


def test_first_ctrl_c_saves_and_the_second_ends(tmp_path: Path) -> None:
    script = (
        "import os, signal, types; from pathlib import Path; from engine import train;"
        "stop = types.SimpleNamespace(wanted=False);"
        "train._stop_on_signal(stop); os.kill(os.getpid(), signal.SIGINT); print(stop.wanted, flush=True)\n"
        f"with train.ErrorRecord(Path({str(tmp_path / 'error-rank0.json')!r})): os.kill(os.getpid(), signal.SIGINT)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "asked to stop: saving at the end of this step\nTrue\n"
    assert ended.stderr == "error: ended by a second Ctrl-C; what was saved before is whole\n"
    assert ended.returncode == 1


def test_an_input_that_was_altered_since_the_spec_was_written_is_one_line(tmp_path: Path) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)
    assert spec.pairs is not None
    path = prepare(tmp_path / "run", spec)
    with Path(spec.pairs.path).open("ab") as file:
        file.write(b"\0" * 8)
    command = [sys.executable, "-m", "engine.train", str(path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: {spec.pairs.path}: altered since the spec was written (put back the pairs that the spec names, or "
        "start again from the stage before)\n"
    )


def test_what_an_earlier_start_finished_no_longer_counts_once_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)
    mark_finished(tmp_path, spec.digest())

    def killed(*_: object) -> None:
        assert not is_finished(tmp_path, spec.digest())
        raise StageError("killed")

    monkeypatch.setattr(train, "_stage", killed)
    with pytest.raises(StageError, match="killed"):
        train._run(spec, Launch(), tmp_path, Stop())


def test_ranks_compare_their_specs_before_the_stage_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)

    def compare(group: Group, digest: str) -> None:
        assert digest == spec.digest()
        raise UserError("another spec")

    monkeypatch.setattr(ranks, "check_spec", compare)
    monkeypatch.setattr(train, "_stage", lambda *_: pytest.fail("begun"))
    with pytest.raises(UserError, match="another spec"):
        train._run(spec, Launch(), tmp_path, Stop())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As where nothing can be written or removed, which root, who runs some tests, may do in a read-only folder."""
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0))
    for name in ("error-rank0.json", "lock-rank0"):
        (path.parent / name).mkdir()
    command = [sys.executable, "-m", "engine.train", str(path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: {path.parent / 'lock-rank0'}: Is a directory (a folder lies where a file should)\n"
    )


def test_an_error_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError), train.ErrorRecord(tmp_path / "error-rank0.json"):
        raise KeyError("x")
    assert "KeyError" in json.loads((tmp_path / "error-rank0.json").read_text())["traceback"]
