"""Pairwise losses as pure functions of branch scores, each with its derivative by the scores.

A pairwise loss reads a branch through one number, its score, so branch-parallel training needs just two things of
it: the value and dL/d score of each branch. Every function here takes float64 scores of N pairs and returns both.

Shapes: N pairs. Scores are log-probabilities over the scored tokens of a branch, either their mean (nats per token)
or their sum (nats); each function says which. `log_ratio` is policy minus reference, of sums unless said otherwise.
σ is the logistic function. log σ comes from `logsigmoid`, so margins of any size stay finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairLoss(NamedTuple):
    """Loss per pair and its derivatives by the chosen and the rejected score, each [N]."""

    loss_N: Tensor
    d_chosen_N: Tensor
    d_rejected_N: Tensor


def _logistic(logit_N: Tensor, scale: float, label_smoothing: float = 0.0) -> PairLoss:
    """-(1-ε) log σ(z) - ε log σ(-z); z grows by `scale` per unit of the chosen score and falls so for the rejected."""
    loss_N = -(1 - label_smoothing) * logsigmoid(logit_N) - label_smoothing * logsigmoid(-logit_N)
    slope_N = scale * (label_smoothing * torch.sigmoid(logit_N) - (1 - label_smoothing) * torch.sigmoid(-logit_N))
    return PairLoss(loss_N, slope_N, -slope_N)


def simpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float, gamma: float, cpo_alpha: float = 0.0) -> PairLoss:
    """SimPO: L = -log σ(β(ā_c - ā_r) - γ) - α ā_c, on mean scores ā (nats per scored token).

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6; γ as written there, not divided by β. α > 0 adds the
    negative log-likelihood of the chosen branch (CPO-SimPO); 0 is plain SimPO.
    """
    base = _logistic(beta * (chosen_N - rejected_N) - gamma, beta)
    return PairLoss(base.loss_N - cpo_alpha * chosen_N, base.d_chosen_N - cpo_alpha, base.d_rejected_N)
