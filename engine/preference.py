"""Preference optimisation on pairs of whole runs, by any branch plan, on transformers.Trainer.

The library gives the loop, schedules, accumulation, logging, checkpoints and resume; each rank's Trainer believes it
is alone. What is ours: a training step that is a branch plan, and the SUM of the gradients over ranks before the
library clips them. A window's loss is  sum_i w_i L_i / (pairs of the window),  also in an epoch's last, shorter one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from artifacts.store import write_atomically
from engine import losses
from engine.branches import Outcome, Plan, Side, n_replicas, score_all, step
from engine.collectives import Group, compare_digests, sum_gradients, tensor_digest
from engine.data import BranchTable, EpochLoader, Pair, ShuffledBatches, collate, read_pairs, to_device
from engine.loading import load_adapter, load_base, save_adapter, trainable_parameters
from engine.scores import Scorer, branch_scores, token_logprobs
from engine.session import (
    Checkpoints,
    Meter,
    StepPrinter,
    Stop,
    check_gradients,
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

MARGIN_PAIRS = 256
"""At most this many training pairs are scored for the margins before the first and after the last step."""


class PairIndices(Dataset[int]):
    def __init__(self, n_pairs: int) -> None:
        self.n_pairs = n_pairs

    def __len__(self) -> int:
        return self.n_pairs

    def __getitem__(self, index: int) -> int:
        return index


class PreferenceTrainer(Trainer):
    """A Trainer whose training step is a branch plan over the ranks of `group`."""

    def __init__(
        self,
        *,
        model: PeftModel,
        branches: BranchTable,
        pairs: Sequence[Pair],
        batches: ShuffledBatches,
        plan: Plan,
        loss: Any,
        group: Group,
        scorer: Scorer,
        stop: Stop,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, train_dataset=PairIndices(len(pairs)), **kwargs)
        self.policy, self.branches, self.pairs, self.batches = model, branches, pairs, batches
        self.loss, self.group, self.scorer, self.stop = loss, group, scorer, stop
        self.plan: Plan = plan
        self.meter = Meter()
        self.window: list[Outcome] = []
        self.window_pairs: list[str] = []
        self.parameters = trainable_parameters(model)

    def get_train_dataloader(self) -> EpochLoader:
        return EpochLoader(self.train_dataset, self.batches, lambda indices: {"pairs": torch.tensor(indices)})  # type: ignore[arg-type]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], int]:
        """The micro-batches of one window and its true number of pairs, over all replicas."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples, sum(len(sample["pairs"]) for sample in samples)

    def score(self, index: int, side: Side) -> Tensor:
        """Mean log-probability (nats per scored token) of one branch; dropout depends on step, pair and side only."""
        pair = self.pairs[index]
        branch = self.branches[pair.chosen if side == "chosen" else pair.rejected]
        seed = f"{self.args.seed}/{self.state.global_step}/{pair.pair_id}/{side}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]))
        batch = to_device(collate([branch]), self.group.device)
        return branch_scores(self.scorer(self.policy, *batch[:4]), batch.weights_P)[1]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        indices: list[int] = inputs["pairs"].tolist()
        weights_N = torch.tensor([self.pairs[index].weight for index in indices], dtype=torch.float64)
        shares_N = weights_N / num_items_in_batch
        outcome = step(self.plan, self.group, indices, shares_N, self.score, self.loss, self._name)
        self.window.append(outcome)
        self.window_pairs += [self._name(index) for index in indices]
        for index in indices:
            branches = [self.branches[name] for name in (self.pairs[index].chosen, self.pairs[index].rejected)]
            self.meter.count(sum(b.n_tokens for b in branches), sum(len(b.positions_P) for b in branches))
        if self.accelerator.sync_gradients:
            wishes = sum_gradients(self.group, list(self.parameters.values()), torch.tensor([float(self.stop.wanted)]))
            check_gradients(self.parameters, f"pairs {', '.join(self.window_pairs)}")
            self.stop.agreed = float(wishes[0]) > 0
            self.window_pairs = []
        return (outcome.loss_N * shares_N).sum().to(self.args.device)

    def _name(self, index: int) -> str:
        return self.pairs[index].pair_id

    def mean_margin(self) -> float:
        """Mean of ā_c - ā_r over (up to MARGIN_PAIRS, evenly spread) training pairs, without dropout."""
        stride = math.ceil(len(self.pairs) / MARGIN_PAIRS)
        indices = range(0, len(self.pairs), stride)
        self.policy.eval()
        chosen_N, rejected_N = score_all(
            self.plan, self.group, len(indices), lambda place, side: self.score(indices[place], side)
        )
        return float((chosen_N - rejected_N).mean())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Matrix products of forward and of backward through frozen weights of all branches of the micro-batch."""
        names = [name for i in inputs["pairs"].tolist() for name in (self.pairs[i].chosen, self.pairs[i].rejected)]
        return 4 * self.policy.num_parameters() * sum(self.branches[name].n_tokens for name in names)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.window:
            chosen_N = torch.cat([outcome.chosen_N for outcome in self.window])
            rejected_N = torch.cat([outcome.rejected_N for outcome in self.window])
            logs = logs | self.meter.lap()
            logs["margin"] = float((chosen_N - rejected_N).mean())
            logs["accuracy"] = float((chosen_N > rejected_N).double().mean())
            logs["chosen_logp"], logs["rejected_logp"] = float(chosen_N.mean()), float(rejected_N.mean())
            self.window = []
        super().log(logs, start_time)


def _first_margin(trainer: PreferenceTrainer, out: Path, checkpoint: Path | None) -> float:
    """The margin before step 1, measured once and kept for runs that resume."""
    kept = out / "first_margin.json"
    if checkpoint is not None and kept.is_file():
        return float(json.loads(kept.read_text()))
    margin = trainer.mean_margin()
    if trainer.group.rank == 0:
        write_atomically(kept, json.dumps(margin))
    return margin


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
    longest = max(branches[name].n_tokens for pair in pairs for name in (pair.chosen, pair.rejected))
    base = load_base(spec.model, spec.base, group.device, longest)
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
    trainer = PreferenceTrainer(
        branches=branches,
        pairs=pairs,
        batches=batches,
        plan=config.plan,
        loss=partial(losses.simpo, beta=config.beta, gamma=config.resolved_gamma, cpo_alpha=config.cpo_alpha),
        group=group,
        scorer=scorer,
        stop=stop,
        model=model,
        args=TrainingArguments(**settings),
    )
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
            "the order of pairs": batches.digest(math.ceil(config.epochs), trainer._name),
            "the run spec": spec.digest(),
            "the checkpoint": checkpoint.name if checkpoint else "none",
        },
        "before step 1",
    )
    first_margin = _first_margin(trainer, out, checkpoint)
    if group.rank == 0:
        print(
            f"simpo: {len(pairs)} pairs, {settings['gradient_accumulation_steps'] * replicas} pairs a step, plan "
            f"{config.plan} on {group.world_size} process(es) ({group.backend}), beta {config.beta:g}, gamma "
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
            "beta": f"{config.beta:g}",
            "gamma": f"{config.resolved_gamma:g}",
            "cpo_alpha": f"{config.cpo_alpha:g}",
            "pairs_per_step": str(settings["gradient_accumulation_steps"] * replicas),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        curve=points,
    )
