"""Stopping a real process group: who waits for whom, what is saved, and that nobody is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from rank_faults import CONFIG, at_step, prepare, ranks_of, with_fault
from safetensors.torch import load_file
from training_inputs import simpo_spec

from engine import preference
from engine.checkpoints import latest_checkpoint
from engine.group import Group
from engine.session import Stop
from schemas.errors import StageError
from schemas.reports import TrainReport
from schemas.training import EarlyStopConfig
from tasks import launch as launcher
from tasks.launch import launch

ENDLESS = CONFIG.model_copy(update={"epochs": 5000, "save_steps": 100_000})


@pytest.fixture(autouse=True)
def _one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_all_ranks_wait_for_the_one_that_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving takes longer than the others are left once a rank has ended with an error, which a stop is."""
    with_fault("slow save", monkeypatch)
    monkeypatch.setattr(launcher, "AFTER_FAILURE_S", 1.0)
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", ENDLESS))

    def stop() -> None:
        for rank in ranks_of(path.parent).values():
            rank.send_signal(signal.SIGTERM)

    with pytest.raises(StageError, match="a checkpoint was saved"):
        launch(path, n_processes=2, log=at_step(2, stop))
    assert latest_checkpoint(path.parent) is not None


def test_ranks_whose_agent_was_killed_save_and_end(tmp_path: Path) -> None:
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", ENDLESS))

    def kill_agent() -> None:
        agent = ranks_of(path.parent)[0].parent()
        assert agent is not None
        assert "torch.distributed.run" in agent.cmdline()
        agent.kill()

    with pytest.raises(StageError, match=r"torch.distributed.run was ended by SIGKILL") as raised:
        launch(path, n_processes=2, log=at_step(2, kill_agent))
    assert not ranks_of(path.parent)
    assert latest_checkpoint(path.parent) is not None
    assert any("stopped on request" in note for note in raised.value.__notes__)


def test_rank_that_hangs_when_its_peer_dies_is_killed_and_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in NCCL, which may not notice: rank 0 can do nothing any more. torch.distributed.run waits 30 s for it."""
    monkeypatch.setattr(launcher, "AFTER_FAILURE_S", 1.0)
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", ENDLESS))
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        ranks = ranks_of(path.parent)
        ranks[0].suspend()
        ranks[1].kill()
        killed_at = time.monotonic()

    with pytest.raises(StageError, match="rank 1 was ended by SIGKILL"):
        launch(path, n_processes=2, log=at_step(2, kill))
    assert time.monotonic() - killed_at < 25
    assert not ranks_of(path.parent)


def test_run_that_was_killed_after_it_stopped_early_trains_no_step_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops at step 2, far from the next checkpoint that is due, and is killed as it scores the margin."""
    config = CONFIG.model_copy(update={"early_stop": EarlyStopConfig(max_kl=1e-6), "save_steps": 1000})
    spec = simpo_spec(tmp_path / "inputs", config)
    path = prepare(tmp_path / "run", spec)
    with monkeypatch.context() as patch:
        with_fault("killed when trained", patch)
        with pytest.raises(StageError, match="rank 1 was ended by SIGKILL"):
            launch(path, n_processes=2)
    lines: list[str] = []
    launch(path, n_processes=2, log=lines.append)
    resumed = TrainReport.model_validate_json((path.parent / "report.json").read_text())
    assert not any("step 3/" in line for line in lines)
    assert resumed.resumed_from_step == resumed.n_steps == len(resumed.curve) == 2

    assert spec.simpo is not None
    whole = preference.train(spec, spec.simpo, Group(), tmp_path / "whole", Stop())
    assert whole.stopped_early is not None
    assert resumed.stopped_early == whole.stopped_early
    assert [point.loss for point in resumed.curve] == pytest.approx([point.loss for point in whole.curve], rel=1e-9)
    assert resumed.last_margin == pytest.approx(whole.last_margin, rel=1e-9)
    got, want = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (path.parent, tmp_path / "whole"))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)
