"""Faults of a real process group: a killed rank, signals, cancels, time-outs; what is left, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_faults import CONFIG, SOON_S, at_step, prepare, ranks_of, with_fault
from safetensors.torch import load_file
from training_inputs import make_adapter, make_model, make_tables, simpo_spec

from artifacts.finished import mark_finished
from artifacts.store import Store
from engine import preference
from engine.checkpoints import latest_checkpoint
from engine.group import Group
from engine.session import Stop
from schemas.config import EvaluateConfig, LoraConfig, ModelConfig, PromoteConfig
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SftConfig
from tasks import launch as launcher
from tasks.evaluate import evaluate
from tasks.launch import launch, run_spec
from tasks.promote import current, promote
from tasks.sft import sft
from tasks.simpo import simpo


@pytest.fixture(autouse=True)
def _one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_killed_rank_takes_the_group_down_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """kill -9 of rank 1 after a checkpoint, with a stale port 29500 in the way all along; against one process here."""
    spec = simpo_spec(tmp_path / "inputs", CONFIG.model_copy(update={"epochs": 6}))  # 24 steps: killed midway
    path = prepare(tmp_path / "run", spec)
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        rank = ranks_of(path.parent)[1]
        assert rank.environ()["MASTER_ADDR"] == "127.0.0.1"  # a host's own name need not resolve, and then ranks wait
        rank.send_signal(signal.SIGKILL)

    lines, watch = list[str](), at_step(5, kill)

    def log(line: str) -> None:
        lines.append(line)
        watch(line)

    with socket.socket() as stale:
        stale.bind(("127.0.0.1", 29500))
        stale.listen()
        with pytest.raises(StageError, match="rank 1 was ended by SIGKILL"):
            launch(path, n_processes=2, log=log)
        assert time.monotonic() - killed_at < SOON_S
        assert not ranks_of(path.parent)
        shown = [line for line in lines if not line.startswith("[rank")]  # one line, in place of tables and tracebacks
        assert len(shown) == 1
        assert shown[0].startswith("failed: rank 1 was ended by SIGKILL (killed from outside, or out of memory)")
        assert not [line for line in lines if "Traceback" in line]
        assert not (path.parent / "adapter").exists()
        assert latest_checkpoint(path.parent) is not None

        launch(path, n_processes=2)
    resumed = TrainReport.model_validate_json((path.parent / "report.json").read_text())
    assert 3 <= resumed.resumed_from_step < resumed.n_steps
    assert resumed.resumed_from_step % CONFIG.save_steps == 0

    assert spec.simpo is not None
    whole = preference.train(spec, spec.simpo, Group(), tmp_path / "whole", Stop())
    assert [point.loss for point in resumed.curve] == pytest.approx([point.loss for point in whole.curve], rel=1e-9)
    got, want = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (path.parent, tmp_path / "whole"))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)  # measured: 6e-17


def test_rank_out_of_memory_ends_the_run_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails at its tenth score; rank 0 then waits for it in an exchange, and must not do so for long."""
    with_fault("out of memory", monkeypatch)
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", CONFIG.model_copy(update={"plan": "parallel"})))
    lines: list[tuple[float, str]] = []
    with pytest.raises(StageError, match=r"rank 1: out of memory .* 1.17 GiB. To go on: set model.engine"):
        launch(path, n_processes=2, log=lambda line: lines.append((time.monotonic(), line)))
    last_step_at = max(at for at, line in lines if "step " in line)
    assert time.monotonic() - last_step_at < SOON_S
    assert not ranks_of(path.parent)
    assert latest_checkpoint(path.parent) is not None
    assert not (path.parent / "adapter").exists()


def test_cancel_saves_and_leaves_no_process(tmp_path: Path) -> None:
    """Whatever is raised in the caller ends both ranks; they save on the way out."""
    spec = simpo_spec(tmp_path / "inputs", CONFIG.model_copy(update={"epochs": 200, "save_steps": 10_000}))
    path = prepare(tmp_path / "run", spec)

    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(path, n_processes=2, log=at_step(2, cancel))
    assert not ranks_of(path.parent)
    assert latest_checkpoint(path.parent) is not None


def test_sigterm_to_a_rank_saves_and_says_so(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 200, "save_steps": 10_000, "plan": "sequential"})
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", config))
    with pytest.raises(StageError, match=r"stopped on request after step \d+"):
        launch(path, log=at_step(2, lambda: ranks_of(path.parent)[0].send_signal(signal.SIGTERM)))
    assert latest_checkpoint(path.parent) is not None


def test_time_out_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "STOP_GRACE_S", 1.0)
    config = CONFIG.model_copy(update={"epochs": 5000, "save_steps": 100_000, "plan": "sequential"})
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", config))
    with pytest.raises(StageError, match="did not end within 3 s"):
        launch(path, timeout_s=3)
    assert not ranks_of(path.parent)


def test_error_of_a_rank_comes_through_as_its_own(tmp_path: Path) -> None:
    """An adapter of another model is the user's error; it is not buried under the launcher's."""
    spec = simpo_spec(tmp_path / "inputs", CONFIG)
    other = make_model(tmp_path / "other", seed=9)
    path = prepare(tmp_path / "run", spec.model_copy(update={"model": other}))
    with pytest.raises(UserError, match="the adapter was trained on model"):
        launch(path)


def test_stages_end_to_end(tmp_path: Path) -> None:
    """The task functions, each in its own process: SFT, SimPO on two ranks, evaluation, promotion."""
    store = Store(tmp_path / "store")
    model, base = make_model(tmp_path / "model"), ModelConfig(name="tiny")
    branches, paired = make_tables(tmp_path / "tables", n_pairs=6, n_heldout=4)
    lines: list[str] = []
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_share=0.0)
    first = sft(
        branches,
        model,
        SftConfig(epochs=4, tokens_per_micro_batch=600, optimizer=optimizer),
        LoraConfig(r=4),
        base,
        store,
        log=lines.append,
    )
    assert first.report.last_loss < first.report.first_loss
    second = simpo(paired, branches, model, first.adapter, CONFIG, base, store, log=lines.append)
    assert second.report.first_margin is not None
    assert second.report.last_margin is not None
    assert second.report.last_margin > second.report.first_margin
    assert (second.report.world_size, second.report.backend) == (2, "gloo")
    scored = evaluate(
        branches, paired, model, {"sft": first.adapter, "simpo": second.adapter}, EvaluateConfig(), base, store
    )
    assert [score.name for score in scored.report.models] == ["base", "sft", "simpo"]
    outcome = promote(scored, second.adapter, PromoteConfig(metric="mean_margin"), store)
    assert outcome.report.promoted
    assert current(store) == (second.adapter, None)
    assert any("step 1/" in line for line in lines)
    assert not list((store.root / "work").iterdir()), "working folders are left behind"


def forget_spec(out: Path) -> None:
    """The mark as it was when it did not say yet whose it is."""
    mark = out / "finished.json"
    said = json.loads(mark.read_text())
    del said["spec"]
    mark.write_text(json.dumps(said))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no mark: killed after the report": lambda out: (out / "finished.json").unlink(),
    "a mark that is none": lambda out: (out / "finished.json").write_bytes(b"\xff{"),
    "the mark of another spec, which was run in this folder by hand": lambda out: mark_finished(out, "0" * 64),
    "a mark that names no spec": forget_spec,
    "an empty report": lambda out: (out / "report.json").write_text(""),
    "the adapter is in the store already": lambda out: (out / "adapter").rename(out.parent / "moved"),
    "half of an adapter": lambda out: (out / "adapter" / "adapter_model.safetensors").write_bytes(b"half"),
    "a file of the adapter is missing": lambda out: (out / "adapter" / "adapter_config.json").unlink(),
}


@pytest.fixture
def ended(tmp_path: Path) -> tuple[TrainSpec, Store, Path]:
    """A spec whose stage has ended in its working folder, and nothing has been stored yet."""
    spec, store = simpo_spec(tmp_path / "inputs", CONFIG), Store(tmp_path / "store")
    out = store.root / "work" / f"simpo-v3-{spec.digest()[:16]}"
    shutil.copytree(spec.adapters["start"].path, out / "adapter")
    (out / "report.json").write_text("{}")
    mark_finished(out, spec.digest())
    return spec, store, out


def test_finished_work_of_a_dead_launcher_is_not_done_again(
    ended: tuple[TrainSpec, Store, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store, out = ended
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: pytest.fail("started again"))
    assert run_spec(spec, store, version=3) == ("{}", out)
    with pytest.raises(pytest.fail.Exception, match="started again"):
        run_spec(spec, store, version=4)


@pytest.mark.parametrize("damage", DAMAGE)
def test_work_that_is_not_whole_is_gone_on_with(
    ended: tuple[TrainSpec, Store, Path], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been taken for finished: stored as it was, or refused at every start until somebody removed the folder."""
    spec, store, out = ended
    DAMAGE[damage](out)
    started: list[Path] = []

    def finish(path: Path, **_: object) -> None:
        started.append(path)
        (out / "report.json").write_text("{}")

    monkeypatch.setattr(launcher, "launch", finish)
    assert run_spec(spec, store, version=3) == ("{}", out)
    assert started == [out / "spec.json"]


def test_digest_of_a_spec_knows_contents_and_settings_not_places(tmp_path: Path) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG)
    moved = spec.model_copy(update={"model": spec.model.model_copy(update={"path": "/elsewhere"})})
    changed = spec.model_copy(update={"model": spec.model.model_copy(update={"sha256": "0" * 64})})
    assert moved.digest() == spec.digest()
    assert changed.digest() != spec.digest()
    assert spec.model_copy(update={"simpo": CONFIG.model_copy(update={"beta": 3.0})}).digest() != spec.digest()


def test_no_training_pair_is_a_user_error_with_reasons(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    branches, paired = make_tables(tmp_path, n_pairs=0, n_heldout=1)
    refused = paired.report.model_copy(update={"rejected_by_reason": {"openings differ": 3}})
    with pytest.raises(UserError, match="openings differ 3"):
        simpo(
            paired.model_copy(update={"report": refused}),
            branches,
            model,
            make_adapter(tmp_path / "start", model),
            CONFIG,
            ModelConfig(name="tiny"),
            Store(tmp_path / "store"),
        )


@pytest.mark.parametrize("n_processes", [1, 2])
def test_workers_end_when_their_launcher_dies(tmp_path: Path, n_processes: int) -> None:
    """The launcher is killed outright: nobody is left to send a signal, so the ranks notice a closed pipe."""
    config = CONFIG.model_copy(update={"epochs": 5000, "save_steps": 100_000, "plan": "auto"})
    path = prepare(tmp_path / "run", simpo_spec(tmp_path / "inputs", config))
    child = os.fork()
    if child == 0:
        launch(path, n_processes=n_processes, log=at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(1)
    os.waitpid(child, 0)
    deadline = time.monotonic() + SOON_S
    while ranks_of(path.parent) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not ranks_of(path.parent)
    assert latest_checkpoint(path.parent) is not None
