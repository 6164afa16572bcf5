"""What both training stages share: Trainer settings, stopping, the log."""

from __future__ import annotations

import contextlib
import math
import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from engine.checkpoints import not_written
from engine.collectives import gather
from engine.group import Group
from engine.monitor import AllocatorPeaks
from engine.schedule import n_in_epochs
from schemas.errors import StageError
from schemas.reports import TrainPoint
from schemas.training import OptimizerConfig, Tracker


@dataclass
class Stop:
    """A wish to stop (a signal sets it) and the ranks' agreement to do so at the same step."""

    wanted: bool = False
    agreed: bool = False

    def end(self, group: Group, step: int) -> None:
        """Ends a stage whose ranks have agreed to stop, and only then. All wait until the last of them has saved: the
        first to end has the launcher end the others.

        Raises:
            StageError: they have.
            PeerLostError: a rank died.
        """
        if self.agreed:
            gather(group, torch.zeros(1))
            raise StageError(f"stopped on request after step {step}; a checkpoint was saved: the same start goes on")


@dataclass
class Meter:
    """Running totals, carried across a resume by the Trainer's own log."""

    peaks: AllocatorPeaks
    tokens_seen: int = 0
    tokens_scored: int = 0
    train_s: float = 0.0
    step_tokens: int = 0
    step_operations: float = 0.0
    lap_started_s: float = field(default_factory=time.monotonic)
    step_started_s: float | None = None
    step_s: float = 0.0
    """How long the last step took, without what lay between it and the one before: a save."""

    def restore(self, log_history: Sequence[Mapping[str, Any]]) -> None:
        last = next((entry for entry in reversed(log_history) if "tokens_seen" in entry), None)
        if last is not None:
            self.tokens_seen, self.tokens_scored = int(last["tokens_seen"]), int(last["tokens_scored"])
            self.train_s = float(last["train_s"])

    def start(self) -> None:
        """Training begins now: what came before is none of its time."""
        self.lap_started_s = time.monotonic()

    def begin_step(self) -> None:
        """A micro-batch begins, and with it a step where none has begun since the last lap."""
        self.step_started_s = self.step_started_s or time.monotonic()

    def count(self, n_tokens: int, n_scored: int, operations: float) -> None:
        self.tokens_seen += n_tokens
        self.tokens_scored += n_scored
        self.step_tokens += n_tokens
        self.step_operations += operations

    def lap(self, world_size: int) -> dict[str, float]:
        """Totals, the step's speed over all ranks, and operations a second and allocator peaks of this one."""
        now = time.monotonic()
        self.train_s += now - self.lap_started_s
        self.step_s = max(now - (self.step_started_s or self.lap_started_s), 1e-9)
        speed = self.step_tokens / self.step_s
        tflops_per_s = self.step_operations / self.step_s / world_size / 1e12
        self.step_tokens, self.step_operations = 0, 0.0
        self.lap_started_s, self.step_started_s = now, None
        return {
            "tokens_per_s": speed,
            "tflops_per_s": tflops_per_s,
            "tokens_seen": self.tokens_seen,
            "tokens_scored": self.tokens_scored,
            "train_s": self.train_s,
            **self.peaks.lap(),
        }


def trainer_settings(
    out: Path,
    optimizer: OptimizerConfig,
    *,
    epochs: float,
    steps_per_epoch: int,
    accumulation: int,
    seed: int,
    device: torch.device,
    checkpointing: bool,
    trackers: Sequence[Tracker],
) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments. Saving is decided by `Checkpoints`, batches by our own loader."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": epochs,
        "max_steps": n_in_epochs(epochs, steps_per_epoch),  # the library's own product may be one too many
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.lr_scheduler,
        "warmup_steps": optimizer.warmup_share,
        "max_grad_norm": optimizer.max_grad_norm,
        "weight_decay": optimizer.weight_decay,
        "optim": optimizer.optimizer,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [name for name in trackers if name != "tensorboard"],  # see `engine.trackers`
        "seed": seed,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "dataloader_pin_memory": device.type == "cuda",
        "bf16": False,
    }


class StageTrainer(Trainer):
    """A Trainer whose first step trains, and whose failed save (a full disk) says so and leaves no torn folder.

    A callback that asks to stop as training begins is obeyed, and a checkpoint of the last step is the end, wherever
    in an epoch that is; the library, which looks only after a step, would train one more.
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The library's schedule. Its warm-up begins at rate 0, a step that trains nothing: that step is left out."""
        left_out = int(self.args.get_warmup_steps(num_training_steps) > 0)
        scheduler = super().create_scheduler(num_training_steps + left_out, optimizer)
        if left_out:
            with warnings.catch_warnings():  # torch takes it for a step of the optimiser that was forgotten
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
                scheduler.step()
        return scheduler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            folder = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
            raise not_written(folder, error) from error


class StepPrinter(TrainerCallback):
    """One line a logged step, for whoever reads the process's output."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = ("loss", "margin", "accuracy", "kl", "grad_norm", "learning_rate", "tokens_per_s")
        shown += ("idle_share", "exchange_share", "reserved_bytes")
        values = [f"{name} {logs[name]:.4g}" for name in shown if logs and name in logs]
        if logs and "loss" in logs:
            with contextlib.suppress(BrokenPipeError):  # no reader is left: the run is about to be stopped for that
                print(f"step {state.global_step}/{state.max_steps} {' '.join(values)}", flush=True)


def curve(log_history: Sequence[Mapping[str, Any]]) -> tuple[TrainPoint, ...]:
    """The optimiser steps in the Trainer's log."""
    names = TrainPoint.model_fields.keys()
    steps = [{name: entry[name] for name in names if name in entry} for entry in log_history if "loss" in entry]
    return tuple(TrainPoint(**step) for step in steps)


def first_and_last_loss(points: Sequence[TrainPoint]) -> tuple[float, float]:
    """Mean loss of the first and of the last quarter of the steps (at least one step each)."""
    quarter = math.ceil(len(points) / 4)
    losses = [point.loss for point in points]
    return sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter


def peak_memory(peaks: AllocatorPeaks) -> dict[str, int | None]:
    """The report's memory fields: of the GPU's allocator, or what was resident in host memory on a CPU."""
    if peaks.lap():
        return {"peak_memory_bytes": peaks.allocated_bytes, "peak_reserved_bytes": peaks.reserved_bytes}
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
