"""A transformers.Trainer whose training step is an accumulation window, dealt to the ranks branch by branch.

The library gives the loop, schedules, logging, checkpoints and resume; each rank's Trainer believes it is alone. What
is ours: the step (to the library a window is one batch of one epoch that holds all windows), and the SUM of the
gradients over ranks before the library clips them. A window's loss is  sum_i w_i L_i / (pairs of the window).

Shapes: N pairs of one window; P scored positions of one branch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine import losses
from engine.branches import SIDES, Outcome, Side, run_window
from engine.collectives import sum_gradients
from engine.cost import CostModel
from engine.data import Branch, BranchTable, Pair, collate, to_device
from engine.deal import Deal, PairCost, Plan, deal
from engine.group import Group
from engine.health import check_gradients, kl_to_start
from engine.loading import trainable_parameters
from engine.losses import PairLoss
from engine.monitor import AllocatorPeaks
from engine.scores import Scorer, branch_scores
from engine.session import Meter, StageTrainer, Stop
from engine.shared_prefix import common_prefix, shared_prefix_logprobs


class PairIndices(Dataset[int]):
    def __init__(self, n_pairs: int) -> None:
        self.n_pairs = n_pairs

    def __len__(self) -> int:
        return self.n_pairs

    def __getitem__(self, index: int) -> int:
        return index


class Pairs:
    """The training pairs with their branches, and what their loss needs to know of each."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        branches: BranchTable,
        loss: losses.PairLossFunction,
        kind: losses.LossKind,
        references: Mapping[str, float],
    ) -> None:
        self.pairs, self.branches = pairs, branches
        self._loss, self._summed, self._references = loss, kind.score == "sum", references

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].pair_id

    def branch(self, index: int, side: Side) -> Branch:
        pair = self.pairs[index]
        return self.branches[pair.chosen if side == "chosen" else pair.rejected]

    def loss(self, index: int, chosen_1: Tensor, rejected_1: Tensor) -> PairLoss:
        """The loss of one pair by its mean scores."""
        sides = [self.branch(index, "chosen"), self.branch(index, "rejected")]
        scales = [[float(side.weights_P.sum()) if self._summed else 1.0] for side in sides]
        references = [[self._references.get(side.branch_id, 0.0)] for side in sides]
        return losses.of_means(
            self._loss,
            chosen_1,
            rejected_1,
            scales_2N=torch.tensor(scales, dtype=torch.float64),
            references_2N=torch.tensor(references, dtype=torch.float64),
        )

    def packed_tokens(self, index: int) -> int:
        """Tokens of both branches, their common prefix counted once."""
        chosen, rejected = self.branch(index, "chosen"), self.branch(index, "rejected")
        n_shared = common_prefix(chosen.token_ids_T, rejected.token_ids_T)
        return chosen.n_tokens + rejected.n_tokens - n_shared

    def cost(self, index: int, model: CostModel, max_packed_tokens: int) -> PairCost:
        """Predicted cost; without the shared pass when its packed length is above the limit."""
        chosen, rejected = self.branch(index, "chosen"), self.branch(index, "rejected")
        n_scored = [len(chosen.positions_P), len(rejected.positions_P)]
        n_packed = self.packed_tokens(index)
        n_shared = chosen.n_tokens + rejected.n_tokens - n_packed
        tails = chosen.n_tokens - n_shared, rejected.n_tokens - n_shared
        shared = None
        if n_packed <= max_packed_tokens:
            shared = model.packed(n_shared, *tails, sum(n_scored))
        return PairCost(
            model.branch(chosen.n_tokens, n_scored[0]), model.branch(rejected.n_tokens, n_scored[1]), shared
        )


class _Window:
    """The pairs of one step, by their place in it (`engine.branches.PairWork`)."""

    def __init__(self, trainer: PreferenceTrainer, indices: Sequence[int]) -> None:
        self.trainer, self.pairs, self.indices = trainer, trainer.pairs, indices
        self.kl_sum, self.n_kl = 0.0, 0

    def _seed(self, place: int, side: str) -> None:
        """Dropout depends on step, pair and side only, so that every plan draws the same masks."""
        state = self.trainer.state.global_step
        seed = f"{self.trainer.args.seed}/{state}/{self.name(place)}/{side}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]))

    def _mean(self, branch: Branch, logp_P: Tensor) -> Tensor:
        start_logp_P = self.trainer.start_logps.get(branch.branch_id)
        if logp_P.requires_grad and start_logp_P is not None:
            kl_P = kl_to_start(torch.from_numpy(start_logp_P).to(logp_P), logp_P.detach())
            self.kl_sum += float(kl_P.sum())
            self.n_kl += len(kl_P)
        return branch_scores(logp_P, torch.from_numpy(branch.weights_P).to(logp_P.device))[1]

    def score(self, place: int, side: Side) -> Tensor:
        branch = self.pairs.branch(self.indices[place], side)
        self._seed(place, side)
        batch = to_device(collate([branch]), self.trainer.group.device)
        return self._mean(branch, self.trainer.scorer(self.trainer.policy, *batch[:4]))

    def score_shared(self, place: int) -> list[Tensor]:
        chosen, rejected = (self.pairs.branch(self.indices[place], side) for side in SIDES)
        trainer = self.trainer
        logps = shared_prefix_logprobs(trainer.policy, chosen, rejected, trainer.group.device, trainer.scorer)
        return [self._mean(branch, logp_P) for branch, logp_P in zip((chosen, rejected), logps, strict=True)]

    def loss(self, place: int, chosen_1: Tensor, rejected_1: Tensor) -> PairLoss:
        return self.pairs.loss(self.indices[place], chosen_1, rejected_1)

    def name(self, place: int) -> str:
        return self.pairs.name(self.indices[place])

    def share(self, place: int) -> float:
        return self.pairs.pairs[self.indices[place]].weight / len(self.indices)

    def is_longer(self, place: int, side: Side) -> bool:
        other: Side = "rejected" if side == "chosen" else "chosen"
        index = self.indices[place]
        return self.pairs.branch(index, side).n_tokens >= self.pairs.branch(index, other).n_tokens

    def extras(self) -> list[float]:
        return [self.kl_sum, self.n_kl, float(self.trainer.stop.wanted)]


class PreferenceTrainer(StageTrainer):
    """Trains on windows of pairs over the ranks of `group`.

    Args:
        windows: pair indices of every optimiser step.
        cost: predicts the work of a branch, which branches are dealt by.
        max_packed_tokens: the longest pass over both tails of a pair; 0: none.

    `start_logps` holds logp_P of branches under the policy that training starts from; to be filled before that.
    """

    def __init__(
        self,
        *,
        model: PeftModel,
        pairs: Pairs,
        windows: Sequence[Sequence[int]],
        cost: CostModel,
        max_packed_tokens: int,
        plan: Plan,
        balanced: bool,
        group: Group,
        scorer: Scorer,
        stop: Stop,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, train_dataset=PairIndices(len(pairs)), **kwargs)
        self.policy, self.pairs, self.windows, self.cost = model, pairs, windows, cost
        self.n_seen = np.cumsum([len(window) for window in windows])
        self.costs = [pairs.cost(index, cost, max_packed_tokens) for index in range(len(pairs))]
        self._deals: dict[tuple[int, ...], Deal] = {}
        self._deal = partial(deal, plan=plan, n_ranks=group.world_size, balanced=balanced)
        self.group, self.scorer, self.stop = group, scorer, stop
        self.start_logps: dict[str, np.ndarray] = {}
        self.meter = Meter(AllocatorPeaks(group.device))
        self.outcome: Outcome | None = None
        self.exchange_s = 0.0
        self.parameters = trainable_parameters(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            PairIndices(len(self.pairs)),
            batch_sampler=self.windows,  # type: ignore[arg-type]  # any iterable of index lists
            collate_fn=lambda indices: {"pairs": torch.tensor(indices)},
        )

    def deal_of(self, indices: Sequence[int]) -> Deal:
        """How the pairs of a step are dealt to the ranks; worked out once (a second for 512 pairs on 8 ranks)."""
        key = tuple(indices)
        if key not in self._deals:
            self._deals[key] = self._deal([self.costs[index] for index in indices])
        return self._deals[key]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.meter.begin_step()
        model.train()
        indices: list[int] = inputs["pairs"].tolist()
        window = _Window(self, indices)
        self.outcome = run_window(self.group, self.deal_of(indices), window, window.extras)
        started = time.perf_counter()
        sum_gradients(self.group, list(self.parameters.values()))
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self.exchange_s = time.perf_counter() - started
        check_gradients(self.parameters, f"pairs {', '.join(map(self.pairs.name, indices))}")
        self.stop.agreed = float(self.outcome.extras_K[2]) > 0
        members = [self.pairs.branch(index, side) for index in indices for side in SIDES]
        n_scored = sum(len(branch.positions_P) for branch in members)
        self.meter.count(sum(branch.n_tokens for branch in members), n_scored, self.floating_point_ops(inputs))
        shares_N = torch.tensor([window.share(place) for place in range(len(indices))], dtype=torch.float64)
        return (self.outcome.loss_N * shares_N).sum().to(self.args.device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        indices: list[int] = inputs["pairs"].tolist()
        return sum(self.costs[indices[placed.place]].useful(placed.mode) for placed in self.deal_of(indices).placed)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.outcome is not None:
            chosen_N, rejected_N, extras_K = self.outcome.chosen_N, self.outcome.rejected_N, self.outcome.extras_K
            # instead of the library's, the share of all windows, which hold different numbers of pairs
            self.state.epoch = float(self.n_seen[self.state.global_step - 1] / len(self.pairs))
            logs = logs | self.meter.lap(self.group.world_size)
            logs["margin"] = float((chosen_N - rejected_N).mean())
            logs["accuracy"] = float((chosen_N > rejected_N).double().mean())
            logs["chosen_logp"], logs["rejected_logp"] = float(chosen_N.mean()), float(rejected_N.mean())
            logs["n_pairs"] = len(chosen_N)
            if extras_K[1] > 0:
                logs["kl"] = float(extras_K[0] / extras_K[1])
            if self.group.world_size > 1:
                logs["idle_share"] = self.outcome.idle_share
                logs["exchange_share"] = self.exchange_s / self.meter.step_s
        super().log(logs, start_time)
