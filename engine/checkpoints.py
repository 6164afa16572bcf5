"""Checkpoints that are whole or absent: saving, which ones count, which are removed."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from artifacts.store import fsync, payload_digest, refusal, write_atomically
from engine.collectives import compare_digests, gather, tensor_digest
from engine.group import Group
from engine.health import check_finite
from engine.loading import trainable_parameters
from schemas.errors import StageError, UserError

if TYPE_CHECKING:
    from engine.session import Stop

COMPLETE_FILE = "complete"
"""Beside a checkpoint's files: their digest, written last. A checkpoint without it is a torn one."""

KEPT_CHECKPOINTS = 2

_NAME = re.compile(r"checkpoint-\d+")


def not_written(folder: Path, error: Exception) -> StageError:
    """What to say of a checkpoint whose save failed; its torn folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    why, advice = refusal(error, folder.parent)
    return StageError(
        f"{folder.name} could not be written ({why}); what was saved before is whole. {advice} and start again"
    )


class Checkpoints(TrainerCallback):
    """Saves every `save_steps` steps and at the last one, whatever made it the last; only rank 0 writes.

    Before a save the ranks compare their adapters, so a checkpoint never hides that they have drifted apart. To be
    added after `EarlyStop`: both decide once a step is in the log.

    Args:
        run: digest of the spec, which a checkpoint belongs to.
    """

    def __init__(self, group: Group, model: nn.Module, out: Path, save_steps: int, stop: Stop, *, run: str) -> None:
        self.group, self.model, self.out, self.save_steps, self.stop = group, model, out, save_steps, stop
        self.run = run
        self.saved = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Waits for rank 0's save before the step begins: ranks that wait for it within would count as idle."""
        if self.saved:
            gather(self.group, torch.zeros(1))
        self.saved = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if "loss" not in (logs or {}):
            return  # the summary after the last step
        if self.stop.agreed:
            control.should_training_stop = True
        due = state.global_step % self.save_steps == 0 or state.global_step >= state.max_steps
        if due or control.should_training_stop:
            trained = trainable_parameters(self.model)
            check_finite(trained, f"after step {state.global_step}")
            digests = {name: tensor_digest(p) for name, p in trained.items()}
            compare_digests(self.group, digests, f"in the adapter after step {state.global_step}")
            control.should_save = self.group.rank == 0
            self.saved = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        checkpoint = self.out / f"checkpoint-{state.global_step}"
        try:
            for path in (*checkpoint.rglob("*"), checkpoint):  # before the older ones go: power may fail
                fsync(path)
            mark = f"{payload_digest(checkpoint)[0]} {self.run}"
            write_atomically(self.out / f"{checkpoint.name}.{COMPLETE_FILE}", mark)
        except OSError as error:
            raise not_written(checkpoint, error) from error
        for old in _checkpoints(self.out)[:-KEPT_CHECKPOINTS]:
            _remove(old)


def _checkpoints(out: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whatever else has such a name is somebody's copy."""
    found = [path for path in out.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=resumed_step)


def _remove(checkpoint: Path) -> None:
    """The mark goes first: what is left of a removal that was cut short is torn."""
    for path in (checkpoint.with_name(f"{checkpoint.name}.{COMPLETE_FILE}"), checkpoint):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def latest_checkpoint(out: Path, run: str | None = None) -> Path | None:
    """The newest checkpoint that was written to its end and still is what was written; None without one.

    Args:
        run: digest of the spec that it has to belong to.

    Raises:
        UserError: it belongs to another one: its folder was given another spec.
    """
    for checkpoint in reversed(_checkpoints(out)):
        mark = out / f"{checkpoint.name}.{COMPLETE_FILE}"
        with contextlib.suppress(OSError, ValueError):  # no mark, or one that is damaged: the checkpoint does not count
            content, its_run = mark.read_text().split()
            if content != payload_digest(checkpoint)[0]:
                continue
            if run not in (None, its_run):
                raise UserError(
                    "the checkpoint belongs to another spec than spec.json beside it", where=checkpoint,
                    fix="give each spec a folder of its own, or remove this one's checkpoints",
                )  # fmt: skip
            return checkpoint
    return None


def content_of(checkpoint: Path) -> str:
    """sha256 of what a whole checkpoint holds, as its mark has it."""
    return checkpoint.with_name(f"{checkpoint.name}.{COMPLETE_FILE}").read_text().split()[0]


def resumed_step(checkpoint: Path | None) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0


def start_from(out: Path, run: str, group: Group) -> Path | None:
    """The checkpoint that training goes on from: `latest_checkpoint`, and rank 0 says so.

    It removes the newer ones, which are torn or damaged: by their numbers they would count among the newest, and those
    that are saved from here on would be removed in their stead.
    """
    found = latest_checkpoint(out, run)
    if group.rank == 0:
        newer = [path for path in _checkpoints(out) if resumed_step(path) > resumed_step(found)]
        for damaged in newer:
            _remove(damaged)
            print(f"{damaged.name} is not whole and was removed")
        if found or newer:
            print(f"training goes on from {found.name}" if found else "training starts over", flush=True)
    return found
