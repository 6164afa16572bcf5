"""What the launcher hands its ranks, and whom it ends."""

from __future__ import annotations

import subprocess

import pytest

from tasks.launch import ALLOCATOR, _stop_tree, environment_of


def test_ranks_get_an_allocator_that_does_not_fragment() -> None:
    assert environment_of({}, 1)["PYTORCH_ALLOC_CONF"] == ALLOCATOR == "expandable_segments:True"


def test_what_is_set_already_stays() -> None:
    own = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "3", "HOME": "/h"}
    environment = environment_of(own, 2)
    assert environment | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"} == environment
    assert environment.items() >= own.items()
    assert "PYTORCH_ALLOC_CONF" not in environment_of({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, 1)


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
        _stop_tree(ended, 0.0)
        left_alone = stranger.poll() is None
        stranger.kill()
    assert left_alone
