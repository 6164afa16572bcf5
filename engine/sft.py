"""Supervised fine-tuning on scored spans, through TRL's SFTTrainer.

The library gives the loop, schedules, checkpoints and resume. What differs from it: rows are pre-tokenised branches in
length-bucketed batches, and the loss is the weighted mean over the scored tokens of the whole accumulation window,

    L = - sum_p w_p logp_p / sum_p w_p        (nats per scored token; p over all micro-batches of the window)

so splitting a batch into micro-batches changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.sft_config import SFTConfig as TrlSftConfig
from trl.trainer.sft_trainer import SFTTrainer

from engine.checkpoints import Checkpoints, resumed_step, start_from
from engine.cost import CostModel, cost_model
from engine.data import Batch, BranchTable, EpochLoader, ShuffledBatches, collate, length_bucketed, padding_share
from engine.group import Group, join
from engine.health import EarlyStop, check_gradients
from engine.loading import load_base, load_tokenizer, new_adapter, save_adapter, trainable_parameters
from engine.monitor import AllocatorPeaks
from engine.out_of_memory import memory_advice
from engine.scorers import Engine, open_engine
from engine.scores import Scorer
from engine.session import (
    Meter,
    StageTrainer,
    StepPrinter,
    Stop,
    curve,
    first_and_last_loss,
    peak_memory,
    trainer_settings,
)
from engine.trackers import check_trackers, tracker_callbacks
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import SftConfig


class SpanSftTrainer(StageTrainer, SFTTrainer):
    """SFTTrainer whose loss reads only scored positions and never builds [tokens, vocabulary]."""

    def __init__(
        self,
        *,
        model: PeftModel,
        branches: BranchTable,
        batches: ShuffledBatches,
        scorer: Scorer,
        cost: CostModel,
        stop: Stop,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, **kwargs)
        self.cost = cost
        self.branches, self.batches, self.scorer, self.stop = branches, batches, scorer, stop
        self.policy = model
        self.meter = Meter(AllocatorPeaks(self.args.device))
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the window's weight itself
        self.parameters = trainable_parameters(model)
        for parameter in self.parameters.values():
            # TRL casts LoRA to bfloat16 on a quantised base: steps below its precision would be lost
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()

    def get_train_dataloader(self) -> EpochLoader:
        return EpochLoader(self.train_dataset, self.batches, self._collate)  # type: ignore[arg-type]

    def _collate(self, rows: list[dict[str, str]]) -> dict[str, Any]:
        names = [row["branch_id"] for row in rows]
        return {**collate([self.branches[name] for name in names])._asdict(), "branch_ids": names}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of one window and the sum of their weights: what the window's loss is divided by."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples, torch.stack([sample["weights_P"].sum() for sample in samples]).sum().to(device)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        batch = Batch(*(inputs[name] for name in Batch._fields))
        logp_P = self.scorer(model, *batch[:4])
        self.meter.count(int(batch.attention_mask_BT.sum()), len(batch.positions_P), self.floating_point_ops(inputs))
        return -(batch.weights_P.to(logp_P) * logp_P).sum() / num_items_in_batch

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.meter.begin_step()
        names = inputs["branch_ids"]
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise StageError(f"the loss is {loss.item()} on branches {', '.join(names)}; training stopped")
        if self.accelerator.sync_gradients:
            check_gradients(self.parameters, f"branches {', '.join(names)}")
            self.stop.agreed = self.stop.wanted
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        n_tokens_B = inputs["attention_mask_BT"].sum(1).tolist()
        n_scored_B = inputs["rows_P"].bincount(minlength=len(n_tokens_B)).tolist()
        return sum(self.cost.branch(*row).useful for row in zip(n_tokens_B, n_scored_B, strict=True))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | self.meter.lap(1) if "loss" in logs else logs, start_time)


def chosen_rows(branches: BranchTable, *, only_resolved: bool) -> list[str]:
    """Ids of the training branches: the train split, and only resolved runs when asked.

    Raises:
        UserError: none is left; says how many there were and why they do not count.
    """
    columns = (branches.column(name) for name in ("branch_id", "split", "outcome"))
    rows = [(name, outcome) for name, split, outcome in zip(*columns, strict=True) if split == "train"]
    kept = [name for name, outcome in rows if outcome == "resolved" or not only_resolved]
    if kept:
        return kept
    if rows:
        raise UserError(
            f"none of the {len(rows)} training branches is of a resolved run",
            where="sft",
            fix="add resolved runs, or set sft.only_resolved = false",
        )
    raise UserError("no branch is in the train split", where="sft", fix="lower split.heldout_share or add tasks")


def _steps_per_epoch(config: SftConfig, batches: Sequence[Sequence[int]]) -> int:
    return math.ceil(len(batches) / config.accumulation)


def train(
    spec: TrainSpec, config: SftConfig, group: Group, out: Path, stop: Stop, scorer: Scorer | None = None
) -> TrainReport:
    """Trains a fresh adapter into `out/adapter`, resuming from the newest whole checkpoint in `out`.

    Args:
        scorer: None: that of the engine which the config asks for.

    Raises:
        UserError: nothing to train on, a branch that does not fit, or a model that cannot be loaded.
        StageError: the loss or a gradient is not finite, or a signal asked to stop (after a checkpoint was saved).
    """
    check_trackers(config.trackers)
    branches = BranchTable(spec.branches)
    names = chosen_rows(branches, only_resolved=config.only_resolved)
    lengths_of = dict(zip(branches.column("branch_id"), branches.column("n_tokens"), strict=True))
    n_tokens = [lengths_of[name] for name in names]
    batches = length_bucketed(n_tokens, config.tokens_per_micro_batch)
    accumulating = config.accumulation > 1 or len(batches) < len(names)
    engine = open_engine(spec, branches, names, group, optimizer=config.optimizer, accumulating=accumulating)
    with memory_advice(engine, group) as watched:
        trainer = _load(spec, config, group, out, stop, engine, scorer or engine.scorer, branches, names, batches)
        watched.trainer = trainer
        early_stop = EarlyStop(config.early_stop)
        checkpoints = Checkpoints(group, trainer.policy, out, config.save_steps, stop, run=spec.digest())
        for callback in (early_stop, checkpoints, StepPrinter(), *tracker_callbacks(spec, config.trackers)):
            trainer.add_callback(callback)
        checkpoint = start_from(out, spec.digest(), group)
        if checkpoint is not None:
            trainer.meter.restore(
                transformers.TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).log_history
            )
        print(
            f"sft: {len(names)} branches, {sum(n_tokens)} tokens, {len(batches)} micro-batches, "
            f"{_steps_per_epoch(config, batches)} steps an epoch, padding {padding_share(n_tokens, batches):.1%}, "
            f"engine {engine.name}: {engine.why}",
            flush=True,
        )
        trainer.meter.start()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    stop.end(group, trainer.state.global_step)
    save_adapter(trainer.policy, out / "adapter", base_name=spec.base.name, model_sha256=spec.model.sha256, stage="sft")
    points = curve(trainer.state.log_history)
    first_loss, last_loss = first_and_last_loss(points)
    return TrainReport(
        stage="sft",
        n_examples=len(names),
        n_steps=trainer.state.global_step,
        n_tokens_seen=trainer.meter.tokens_seen,
        n_tokens_scored=trainer.meter.tokens_scored,
        padding_share=padding_share(n_tokens, batches),
        first_loss=first_loss,
        last_loss=last_loss,
        wall_s=trainer.meter.train_s,
        world_size=group.world_size,
        backend=group.backend,
        plan="single",
        **peak_memory(trainer.meter.peaks),  # type: ignore[arg-type]
        stopped_early=early_stop.reason,
        resumed_from_step=resumed_step(checkpoint),
        settings=engine.settings(trainer.policy)
        | {
            "device": str(group.device),
            "dtype": spec.base.dtype,
            "optimizer": config.optimizer.optimizer,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        curve=points,
    )


def _load(
    spec: TrainSpec,
    config: SftConfig,
    group: Group,
    out: Path,
    stop: Stop,
    engine: Engine,
    scorer: Scorer,
    branches: BranchTable,
    names: list[str],
    batches: list[list[int]],
) -> SpanSftTrainer:
    """The model with a fresh adapter in a trainer without callbacks; the ranks have met when it returns."""
    assert spec.lora is not None  # `engine.train` refuses such a spec
    base = load_base(spec.model, spec.base, group.device, engine.longest_tokens)
    join(group)
    model = new_adapter(base, spec.lora, config.seed)
    engine.agree_on_attention(model, group)
    engine.pin_host(group.device)
    checkpointing = engine.name == "plain" and group.device.type == "cuda"
    settings = trainer_settings(
        out,
        config.optimizer,
        epochs=config.epochs,
        steps_per_epoch=_steps_per_epoch(config, batches),
        accumulation=config.accumulation,
        seed=config.seed,
        device=group.device,
        checkpointing=checkpointing,
        trackers=config.trackers,
    )
    trainer = SpanSftTrainer(
        branches=branches,
        batches=ShuffledBatches(batches, config.seed),
        scorer=scorer,
        cost=cost_model(base.config.to_dict(), recomputes=checkpointing or engine.name == "long_context"),
        stop=stop,
        model=model,
        args=TrlSftConfig(**settings, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
        train_dataset=Dataset.from_dict({"branch_id": names}),
        processing_class=load_tokenizer(spec.model),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
