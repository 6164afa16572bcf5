"""A transformers.Trainer whose training step is a branch plan.

The library gives the loop, schedules, accumulation, logging, checkpoints and resume; each rank's Trainer believes it
is alone. What is ours: the step, and the SUM of the gradients over ranks before the library clips them. A window's
loss is  sum_i w_i L_i / (pairs of the window),  also in an epoch's last, shorter one.

Shapes: N pairs of one micro-batch, one per replica.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer

from engine import losses
from engine.branches import Outcome, Plan, Side, score_all, step
from engine.collectives import Group, sum_gradients
from engine.data import BranchTable, EpochLoader, Pair, ShuffledBatches, collate, to_device
from engine.loading import trainable_parameters
from engine.scores import Scorer, branch_scores
from engine.session import Meter, Stop, check_gradients

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
        loss: losses.PairLossFunction,
        kind: losses.LossKind,
        references: Mapping[str, float],
        group: Group,
        scorer: Scorer,
        stop: Stop,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, train_dataset=PairIndices(len(pairs)), **kwargs)
        self.policy, self.branches, self.pairs, self.batches = model, branches, pairs, batches
        self.loss, self.kind, self.references = loss, kind, references
        self.group, self.scorer, self.stop = group, scorer, stop
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
        outcome = step(self.plan, self.group, indices, shares_N, self.score, self._loss_of(indices), self.name_of)
        self.window.append(outcome)
        self.window_pairs += [self.name_of(index) for index in indices]
        for index in indices:
            branches = [self.branches[name] for name in (self.pairs[index].chosen, self.pairs[index].rejected)]
            self.meter.count(sum(b.n_tokens for b in branches), sum(len(b.positions_P) for b in branches))
        if self.accelerator.sync_gradients:
            wishes = sum_gradients(self.group, list(self.parameters.values()), torch.tensor([float(self.stop.wanted)]))
            check_gradients(self.parameters, f"pairs {', '.join(self.window_pairs)}")
            self.stop.agreed = float(wishes[0]) > 0
            self.window_pairs = []
        return (outcome.loss_N * shares_N).sum().to(self.args.device)

    def _loss_of(self, indices: Sequence[int]) -> losses.PairLossFunction:
        """The loss of these pairs by their mean scores, with what the loss needs to know of each branch filled in."""
        sides = [[self.pairs[i].chosen for i in indices], [self.pairs[i].rejected for i in indices]]
        summed = self.kind.score == "sum"
        scales = [[float(self.branches[name].weights_P.sum()) if summed else 1.0 for name in side] for side in sides]
        references = [[self.references.get(name, 0.0) for name in side] for side in sides]
        return partial(
            losses.of_means,
            self.loss,
            scales_2N=torch.tensor(scales, dtype=torch.float64),
            references_2N=torch.tensor(references, dtype=torch.float64),
        )

    def name_of(self, index: int) -> str:
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
