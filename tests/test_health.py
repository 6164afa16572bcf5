"""What is watched: KL to the start, early stops, trackers, checkpoints on a full disk."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import queue
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter
from training_inputs import simpo_spec, useful_operations

from engine import preference, trackers
from engine.checkpoints import latest_checkpoint
from engine.data import BranchTable, read_pairs
from engine.group import Group
from engine.health import check_gradients, early_stop_reason, kl_to_start
from engine.monitor import AllocatorPeaks
from engine.scores import token_logprobs
from engine.session import Meter, Stop
from engine.shared_prefix import common_prefix
from engine.trackers import check_trackers
from engine.train import be_deterministic
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import EarlyStopConfig, OptimizerConfig, SftConfig, SimpoConfig

CONFIG = SimpoConfig(
    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_share=0.0), plan="sequential", epochs=3, save_steps=2, seed=3
)


def train(spec: TrainSpec, out: Path, **options: Any) -> TrainReport:
    assert spec.simpo is not None
    return preference.train(spec, spec.simpo, Group(), out, Stop(), **options)


def test_gradient_whose_norm_is_infinite_stops_training() -> None:
    """Each of its elements is finite, and clipping by that norm would make all of them zero."""
    small, large = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    small.grad, large.grad = torch.ones(2), torch.full((2,), 1e30)
    check_gradients({"small": small}, "pair p")
    with pytest.raises(StageError, match=r"^the norm .* gradient of large is too large; training stopped at pair p"):
        check_gradients({"small": small, "large": large}, "pair p")


def steps(*losses: float, **last: float) -> list[dict[str, float]]:
    log = [{"loss": loss, "step": float(step)} for step, loss in enumerate(losses)]
    log[-1] |= last
    return [*log, {"train_runtime": 1.0}]


def test_kl_estimate_is_zero_at_the_start_positive_away_and_unbiased() -> None:
    """Against the exact KL of two distributions over 50 words, 200,000 draws (measured: 0.3 % off)."""
    generator = torch.Generator().manual_seed(0)
    start, policy = (torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(start.exp(), 200_000, replacement=True, generator=generator)
    estimate = kl_to_start(start[drawn], policy[drawn])
    assert float(estimate.min()) >= 0
    assert float(estimate.mean()) == pytest.approx(float((start.exp() * (start - policy)).sum()), rel=0.03)
    assert not kl_to_start(start, start).any()


def test_loss_that_no_longer_falls_ends_training() -> None:
    rule = EarlyStopConfig(patience_steps=2, min_gain=0.1)
    assert early_stop_reason(steps(4, 4, 3), rule) is None
    assert early_stop_reason(steps(4, 4, 3, 3), rule) is None
    assert early_stop_reason(steps(4, 4, 3, 3, 2.95, 2.95), rule) == (
        "the mean loss of 2 steps is 2.95, that of the 2 before 3"
    )
    assert early_stop_reason(steps(0, 0, 0, 0), EarlyStopConfig(patience_steps=2)) is not None, "all pairs satisfied"
    assert early_stop_reason(steps(1, 1, 0.9, 0.9), EarlyStopConfig(patience_steps=2)) is None
    assert early_stop_reason(steps(1, 1, 1, 1), EarlyStopConfig()) is None
    assert early_stop_reason([], rule) is None


def test_policy_that_went_too_far_ends_training() -> None:
    rule = EarlyStopConfig(max_kl=0.5)
    assert early_stop_reason(steps(1, 1, kl=0.4), rule) is None
    assert "above 0.5" in str(early_stop_reason(steps(1, 1, kl=0.6), rule))
    with pytest.raises(ValueError, match="preference stage only"):
        SftConfig(early_stop=rule)


def test_run_that_stops_early_keeps_its_adapter_and_says_why(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"early_stop": EarlyStopConfig(max_kl=1e-6)})
    report = train(simpo_spec(tmp_path / "inputs", config, n_pairs=4, n_heldout=0), tmp_path / "out")
    assert report.n_steps == len(report.curve) == 2  # the first step starts at 0
    assert report.stopped_early is not None
    assert report.stopped_early.startswith("KL to the start is")
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_rule_that_holds_at_the_last_step_has_ended_nothing(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 1, "accumulation": 2, "early_stop": EarlyStopConfig(max_kl=1e-6)})
    report = train(simpo_spec(tmp_path / "inputs", config, n_pairs=4, n_heldout=0), tmp_path / "out")
    last = report.curve[-1]
    assert last.kl is not None
    assert last.kl > 1e-6
    assert report.n_steps == 2
    assert report.stopped_early is None


@pytest.mark.parametrize("margin_pairs", [1, 2, 256])
def test_limit_of_the_kl_holds_at_every_step(tmp_path: Path, margin_pairs: int) -> None:
    """Of 6 pairs a step each, as few as one is scored for the margin: the others would have no KL."""
    config = CONFIG.model_copy(update={"margin_pairs": margin_pairs, "accumulation": 2})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=6, n_heldout=0)
    free = train(spec, tmp_path / "free")
    assert sum(point.kl is not None for point in free.curve) == {1: 3, 2: 5, 256: 9}[margin_pairs]
    watched = config.model_copy(update={"early_stop": EarlyStopConfig(max_kl=1e3)})
    report = train(spec.model_copy(update={"simpo": watched}), tmp_path / "watched")
    assert all(point.kl is not None for point in report.curve)
    assert (report.first_margin, report.last_margin) == (free.first_margin, free.last_margin)
    limited = config.model_copy(update={"early_stop": EarlyStopConfig(max_kl=1e-6)})
    assert len(train(spec.model_copy(update={"simpo": limited}), tmp_path / "limited").curve) == 2


def test_steps_report_kl_work_and_window(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"accumulation": 1, "accumulation_start": 3})
    report = train(simpo_spec(tmp_path / "inputs", config, n_pairs=4, n_heldout=0), tmp_path / "out")
    first, *_, last = report.curve
    assert first.kl == pytest.approx(0, abs=1e-9)  # float32 norms: other batches round otherwise
    assert last.kl is not None
    assert last.kl > 1e-3
    assert (first.n_pairs, last.n_pairs) == (3, 1)
    assert sum(point.n_pairs or 0 for point in report.curve) == 12
    assert report.settings["pairs_per_step"] == "1 to 3"
    assert last.epoch == pytest.approx(3)
    assert first.tflops_per_s is not None
    assert first.tflops_per_s > 0


@pytest.mark.parametrize(("n_steps", "shares"), [(1, [1]), (4, [1 / 2, 1, 2 / 3, 1 / 3])])
def test_warm_up_begins_above_zero_so_that_every_step_trains(tmp_path: Path, n_steps: int, shares: list[float]) -> None:
    optimizer = OptimizerConfig(learning_rate=5e-3, lr_scheduler="linear", warmup_share=0.4)
    config = CONFIG.model_copy(update={"epochs": 1, "optimizer": optimizer})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=n_steps, n_heldout=0)
    report = train(spec, tmp_path / "out")
    assert [point.learning_rate / 5e-3 for point in report.curve] == pytest.approx(shares)
    start, trained = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (Path(spec.adapters["start"].path), tmp_path / "out" / "adapter")
    )
    assert any(not torch.equal(start[name], tensor) for name, tensor in trained.items())


def test_deterministic_asks_for_kernels_that_add_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        be_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_steps_go_to_tensorboard_unless_told_otherwise(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 1})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=3, n_heldout=0)
    spec = spec.model_copy(update={"log_folder": str(tmp_path / "logs")})
    train(spec, tmp_path / "out")
    (folder,) = (tmp_path / "logs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/margin")] == [1, 2, 3]


def test_full_disk_under_the_log_folder_ends_the_log_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes in a thread, whose error came as a traceback and then ended the stage, naming its folder."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", refuse)
    config = CONFIG.model_copy(update={"epochs": 4})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=3, n_heldout=0)
    spec = spec.model_copy(update={"log_folder": str(tmp_path / "logs")})
    assert train(spec, tmp_path / "out").n_steps == 12
    (folder,) = (tmp_path / "logs").iterdir()
    said = "".join(capfd.readouterr())
    assert said.count(f"{folder}: No space left on device; nothing more is logged there") == 1


def test_only_the_thread_of_tensorboard_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """Called as `threading.excepthook` is: pytest has one of its own."""
    board = event_file_writer._AsyncWriterThread(queue.Queue(), None, 1)
    for thread, error, is_silent in (
        (board, OSError(errno.ENOSPC, "full"), True),
        (board, ValueError("bad"), False),
        (threading.Thread(), OSError(errno.ENOSPC, "full"), False),
    ):
        trackers._say_nothing_of_the_system(threading.ExceptHookArgs((type(error), error, None, thread)))
        assert (capfd.readouterr().err == "") == is_silent


def test_speed_of_a_step_is_without_the_save_before_it() -> None:
    meter = Meter(AllocatorPeaks(torch.device("cpu")))
    meter.start()
    for save_s in (0.0, 0.5):
        time.sleep(save_s)
        meter.begin_step()
        time.sleep(0.02)
        meter.begin_step()  # a second micro-batch
        meter.count(100, 10, 0.0)
        logged = meter.lap(1)
    assert 100 / 0.4 < logged["tokens_per_s"] <= 100 / 0.02
    assert logged["train_s"] >= 0.54


@pytest.mark.parametrize("plan", ["sequential", "shared_prefix"])
def test_operations_of_a_step_are_those_that_have_to_be_done_once(tmp_path: Path, plan: str) -> None:
    """Two pairs, of which one has a common prefix."""
    config = CONFIG.model_copy(update={"plan": plan, "epochs": 1, "accumulation": 2})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=2, n_heldout=0, shared_prefix=True)
    assert spec.pairs is not None
    branches = BranchTable(spec.branches)
    n_tokens, n_once, want = 0, 0, 0.0
    for pair in read_pairs(spec.pairs, "train", branches):
        sides = branches[pair.chosen], branches[pair.rejected]
        lengths = [side.n_tokens for side in sides]
        shared = common_prefix(*(side.token_ids_T for side in sides)) if plan == "shared_prefix" else 0
        seen = (sum(length**2 for length in lengths) - shared**2) / 2
        want += useful_operations(sum(lengths) - shared, seen, sum(len(side.positions_P) for side in sides))
        n_tokens, n_once = n_tokens + sum(lengths), n_once + shared
    assert (n_once > 5) == (plan == "shared_prefix")
    (point,) = train(spec, tmp_path / "out").curve
    assert point.tflops_per_s is not None
    assert point.tflops_per_s * 1e12 * n_tokens / point.tokens_per_s == pytest.approx(want, rel=1e-9)


def test_tracker_that_is_not_installed_is_a_user_error() -> None:
    with pytest.raises(UserError, match="tracker wandb is not installed"):
        check_trackers(("wandb",))
    check_trackers(())


def test_folder_that_a_tracker_left_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("trackio") is not None
    with pytest.raises(UserError, match="tracker trackio is not installed"):
        check_trackers(("trackio",))


def test_full_disk_loses_no_checkpoint_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    """From step 3 on no file may grow beyond 4 KB, so the save of step 4 fails in the middle."""
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=3, n_heldout=0)
    whole = train(spec, tmp_path / "whole")
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    calls = 0

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += model.training
        if calls == 7:  # three a step
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        return token_logprobs(model, *arguments)

    try:
        whole_before = (
            r"checkpoint-4 could not be written .*; what was saved before is whole. Raise .*\(ulimit -f\), or free"
        )
        with pytest.raises(StageError, match=whole_before):
            train(spec, tmp_path / "full", scorer=scorer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    newest = latest_checkpoint(tmp_path / "full")
    assert newest is not None
    assert newest.name == "checkpoint-2"
    assert not (tmp_path / "full" / "checkpoint-4").exists()
    report = train(spec, tmp_path / "full")
    assert report.resumed_from_step == 2
    assert [point.loss for point in report.curve] == [point.loss for point in whole.curve]
    adapters = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("full", "whole")]
    assert all(torch.equal(adapters[0][name], tensor) for name, tensor in adapters[1].items())
    assert math.isfinite(report.last_loss)
