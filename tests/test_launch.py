"""What the launcher hands its ranks, and whom it ends."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tasks import launch as launcher
from tasks.launch import ALLOCATOR, _Group, environment_of


def test_ranks_get_an_allocator_that_does_not_fragment() -> None:
    assert environment_of({}, 1)["PYTORCH_ALLOC_CONF"] == ALLOCATOR == "expandable_segments:True"


def test_what_is_set_already_stays() -> None:
    own = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "3", "HOME": "/h"}
    environment = environment_of(own, 2)
    assert environment | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"} == environment
    assert environment.items() >= own.items()
    assert "PYTORCH_ALLOC_CONF" not in environment_of({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, 1)


def test_signal_to_the_agent_leaves_ranks_the_time_of_a_step() -> None:
    assert float(environment_of({}, 2)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == launcher.MAX_STOP_GRACE_S


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert environment_of({}, 2)["OMP_NUM_THREADS"] == "4"
    assert environment_of({}, 16)["OMP_NUM_THREADS"] == "1"


def test_stranger_with_the_id_of_an_ended_process_is_left_alone() -> None:
    """Ids are given again as soon as their process was waited for; here the stranger's is put in the place of one."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        ended.pid = stranger.pid
        _Group(ended, 1).stop()
        left_alone = stranger.poll() is None
        stranger.kill()
    assert left_alone


def started(script: str) -> subprocess.Popen[bytes]:
    """A shell that has set its traps."""
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize(("step_s", "saved"), [(0.0, False), (1.0, True)])
def test_cancelled_ranks_get_the_time_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, saved: bool
) -> None:
    """The rank ends its step 1 s after it was asked to."""
    monkeypatch.setattr(launcher, "STOP_GRACE_S", 0.2)
    file = tmp_path / "saved"
    group = _Group(started(f"trap 'sleep 1; touch {file}; exit 0' TERM; echo ready; while :; do sleep 0.1; done"), 1)
    for now in (10.0, 10.0 + step_s):
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda now=now: now)
            group.stepped()
    said: list[str] = []
    group.stop(said.append)
    assert file.exists() == saved
    assert said == [f"waiting up to {0.2 + 2 * step_s:.0f} s for the end of the step and its checkpoint"]


def test_cancelled_ranks_do_not_get_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_STOP_GRACE_S", 0.2)
    process = started("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    began = time.monotonic()
    _Group(process, 1).stop()
    assert time.monotonic() - began < 5
    assert process.returncode == -9


def test_rank_is_asked_to_end_and_not_what_it_has_started(tmp_path: Path) -> None:
    """A compiler that is ended under a rank fails the very step that is to be saved."""
    file = tmp_path / "saved"
    process = started(f"sleep 60 & trap 'kill -0 $! && touch {file}; kill $!; exit 0' TERM; echo ready; wait $!")
    _Group(process, 1).stop()
    assert file.exists()


def test_what_a_rank_has_started_is_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "STOP_GRACE_S", 0.2)
    process = started("trap '' TERM; sleep 60 & echo ready; while :; do sleep 0.1; done")
    helpers = psutil.Process(process.pid).children()
    _Group(process, 1).stop()
    _, left = psutil.wait_procs(helpers, timeout=5)
    assert helpers
    assert not left
