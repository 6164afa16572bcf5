"""Preference optimisation on pairs of whole runs: set-up, the checks before step 1, the run, its report."""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import PrinterCallback, TrainerState, TrainingArguments

from artifacts.store import write_atomically
from engine import losses
from engine.branches import n_replicas
from engine.collectives import Group, compare_digests, tensor_digest
from engine.data import BranchTable, ShuffledBatches, read_pairs
from engine.loading import load_adapter, load_base, save_adapter
from engine.preference_trainer import PreferenceTrainer
from engine.reference_scores import reference_scores
from engine.scores import Scorer, token_logprobs
from engine.session import (
    Checkpoints,
    StepPrinter,
    Stop,
    curve,
    first_and_last_loss,
    latest_checkpoint,
    peak_memory_bytes,
    resumed_step,
    trainer_settings,
)
from schemas.config import SimpoConfig
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec


def _first_margin(trainer: PreferenceTrainer, out: Path, checkpoint: Path | None) -> float:
    """The margin before step 1, measured once and kept for runs that resume."""
    kept = out / "first_margin.json"
    if checkpoint is not None and kept.is_file():
        return float(json.loads(kept.read_text()))
    margin = trainer.mean_margin()
    if trainer.group.rank == 0:
        write_atomically(kept, json.dumps(margin))
    return margin


def loss_of(config: SimpoConfig) -> losses.PairLossFunction:
    """The configured loss with its own constants."""
    if config.loss == "simpo":
        return partial(losses.simpo, beta=config.beta, gamma=config.resolved_gamma, cpo_alpha=config.cpo_alpha)
    if config.loss == "dpo":
        return partial(losses.dpo, beta=config.beta, label_smoothing=config.label_smoothing)
    return partial(getattr(losses, config.loss), beta=config.beta)


def _frozen_sample(model: Any) -> str:
    """sha256 over up to 4,096 evenly spread elements of every frozen tensor: catches another base model."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            digest.update(f"{name}{tensor_digest(flat[:: max(1, flat.numel() // 4096)])}".encode())
    return digest.hexdigest()


def train(
    spec: TrainSpec, config: SimpoConfig, group: Group, out: Path, stop: Stop, scorer: Scorer = token_logprobs
) -> TrainReport:
    """Trains from the adapter `start` into `out/adapter`, resuming from the newest whole checkpoint in `out`.

    Every rank calls it with the same spec; only rank 0 writes.

    Raises:
        UserError: no training pair, or an adapter of another model.
        StageError: a score, loss or gradient is not finite (names the pair), the ranks differ (names the tensor), or a
            signal asked to stop (after a checkpoint was saved).
        PeerLostError: another rank died.
    """
    branches = BranchTable(spec.branches)
    pairs = read_pairs(spec.pairs, "train") if spec.pairs else []
    if not pairs:
        raise UserError("no pair is in the train split", where="simpo", fix="see the pair report for what was refused")
    names = sorted({name for pair in pairs for name in (pair.chosen, pair.rejected)})
    base = load_base(spec.model, spec.base, group.device, max(branches[name].n_tokens for name in names))
    model = load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
    replicas = n_replicas(config.plan, group.world_size)
    order = range(len(pairs))
    batches = ShuffledBatches([order[i : i + replicas] for i in order[::replicas]], config.seed)
    settings = trainer_settings(
        out,
        config.optimizer,
        epochs=config.epochs,
        accumulation=math.ceil(config.accumulation / replicas),
        seed=config.seed,
        device=group.device,
    )
    kind = losses.LOSSES[config.loss]
    references: dict[str, float] = {}
    if kind.needs_reference:
        folder = Path(spec.reference_folder or out)
        references = reference_scores(spec, model, branches, names, group, folder, scorer)
    trainer = PreferenceTrainer(
        branches=branches,
        pairs=pairs,
        batches=batches,
        plan=config.plan,
        loss=loss_of(config),
        kind=kind,
        references=references,
        group=group,
        scorer=scorer,
        stop=stop,
        model=model,
        args=TrainingArguments(**settings),
    )
    pairs_per_step = settings["gradient_accumulation_steps"] * replicas
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Checkpoints(group, model, out, config.save_steps, stop))
    if group.rank == 0:
        trainer.add_callback(StepPrinter())
    checkpoint = latest_checkpoint(out)
    if checkpoint is not None:
        trainer.meter.restore(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).log_history)
    compare_digests(
        group,
        {name: tensor_digest(parameter) for name, parameter in trainer.parameters.items()}
        | {
            "the base model": _frozen_sample(model),
            "the order of pairs": batches.digest(math.ceil(config.epochs), trainer.name_of),
            "the run spec": spec.digest(),
            "the checkpoint": checkpoint.name if checkpoint else "none",
        },
        "before step 1",
    )
    first_margin = _first_margin(trainer, out, checkpoint)
    if group.rank == 0:
        print(
            f"{config.loss}: {len(pairs)} pairs, {pairs_per_step} pairs a step, plan {config.plan} on"
            f" {group.world_size} process(es) ({group.backend}), beta {config.beta:g}, gamma "
            f"{config.resolved_gamma:g}, cpo_alpha {config.cpo_alpha:g}, margin before step 1 {first_margin:.4f}",
            flush=True,
        )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.agreed:
        raise StageError(f"stopped on request after step {trainer.state.global_step}; a checkpoint was saved")
    last_margin = trainer.mean_margin()
    if group.rank == 0:
        save_adapter(model, out / "adapter", base_name=spec.base.name, model_sha256=spec.model.sha256, stage="simpo")
    points = curve(trainer.state.log_history)
    first_loss, last_loss = first_and_last_loss(points)
    return TrainReport(
        stage="simpo",
        n_examples=len(pairs),
        n_steps=trainer.state.global_step,
        n_tokens_seen=trainer.meter.tokens_seen,
        n_tokens_scored=trainer.meter.tokens_scored,
        padding_share=0.0,
        first_loss=first_loss,
        last_loss=last_loss,
        first_margin=first_margin,
        last_margin=last_margin,
        wall_s=trainer.meter.train_s,
        world_size=group.world_size,
        backend=group.backend,
        plan=config.plan,
        peak_memory_bytes=peak_memory_bytes(group.device),
        resumed_from_step=resumed_step(checkpoint),
        settings={
            "device": str(group.device),
            "dtype": spec.base.dtype,
            "attention": str(base.config._attn_implementation),
            "optimizer": config.optimizer.optimizer,
            "loss": config.loss,
            "reference": f"base model, {len(references)} branches" if references else "none",
            "beta": f"{config.beta:g}",
            "gamma": f"{config.resolved_gamma:g}",
            "cpo_alpha": f"{config.cpo_alpha:g}",
            "pairs_per_step": str(pairs_per_step),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        curve=points,
    )
