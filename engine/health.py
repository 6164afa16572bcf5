"""What is watched while a stage trains: numbers that are none, when to stop early, how far the policy has gone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from schemas.errors import StageError
from schemas.training import EarlyStopConfig


def _not_finite(tensors: Mapping[str, Tensor], what: str) -> str | None:
    """Which tensor is not finite, or that their norm is not, though each of them is.

    The norm of all is asked first: asking each of hundreds of tensors on a GPU took 1 % of a step. Clipping divides by
    it, so that a gradient of infinite norm would become zero, and a step that trains nothing would pass for one.
    """
    if torch.isfinite(torch.nn.utils.get_total_norm(list(tensors.values()))):
        return None
    if broken := next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None):
        return f"{what}{broken} is not finite"
    largest = max(tensors, key=lambda name: float(tensors[name].abs().max()))
    return f"the norm of all is not finite, for {what}{largest} is too large"


def check_finite(parameters: Mapping[str, nn.Parameter], when: str) -> None:
    """StageError naming the first parameter that is not finite, before it is saved as something to go on from."""
    if said := _not_finite(parameters, ""):
        raise StageError(f"{said} {when}; what was saved before is whole")


def check_gradients(parameters: Mapping[str, nn.Parameter], what: str) -> None:
    """StageError naming the first parameter whose gradient is not finite, before anything is stepped or saved."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    if said := _not_finite(gradients, "the gradient of "):
        raise StageError(f"{said}; training stopped at {what}")


def check_scores(score_of: Mapping[str, float], whose: str) -> None:
    """StageError naming the first branch whose log-probability is not finite, before it is kept or compared."""
    for name, score in score_of.items():
        if not math.isfinite(score):
            raise StageError(f"the log-probability of branch {name} under {whose} is {score}; it was not kept")


def kl_to_start(start_logp_P: Tensor, logp_P: Tensor) -> Tensor:
    """Per scored token, an estimate (nats) of KL(start || policy): r - 1 - log r with r = p_policy / p_start.

    Never negative, and unbiased when the tokens were drawn from the start policy (Schulman 2020, estimator k3); the
    tokens here are those of the logged runs. Costs nothing: both log-probabilities are there anyway.
    """
    log_ratio_P = logp_P - start_logp_P
    return torch.expm1(log_ratio_P) - log_ratio_P


def early_stop_reason(log: Sequence[Mapping[str, Any]], rule: EarlyStopConfig) -> str | None:
    """Why training should end now, or None. Reads the entries of optimiser steps in a Trainer's log."""
    steps = [entry for entry in log if "loss" in entry]
    # every step has a KL where the limit is set; a log that an earlier version began may lack some
    if rule.max_kl is not None and steps and steps[-1].get("kl", 0.0) > rule.max_kl:
        return f"KL to the start is {steps[-1]['kl']:.4g} nats per scored token, above {rule.max_kl:g}"
    n_steps = rule.patience_steps
    if n_steps is not None and len(steps) >= 2 * n_steps:
        before, latest = (
            sum(entry["loss"] for entry in part) / n_steps
            for part in (steps[-2 * n_steps : -n_steps], steps[-n_steps:])
        )
        if latest >= before or before - latest < rule.min_gain:
            return f"the mean loss of {n_steps} steps is {latest:.4g}, that of the {n_steps} before {before:.4g}"
    return None


class EarlyStop(TrainerCallback):
    """Ends training by the rule. It reads the log, which is the same on every rank, so all end at the same step.

    A run that goes on from the checkpoint of that step is at its end already: it trains no step more.
    """

    def __init__(self, rule: EarlyStopConfig) -> None:
        self.rule = rule
        self.reason: str | None = None

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        if state.global_step < state.max_steps:  # the last step ends training without any rule
            self.reason = self.reason or early_stop_reason(state.log_history, self.rule)
        if self.reason is not None:
            control.should_training_stop = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._look(state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._look(state, control)
