"""Pairwise losses as pure functions of branch scores, each with its derivative by the scores.

A pairwise loss reads a branch through one number, its score, so branch-parallel training needs just two things of
it: the value and dL/d score of each branch. Every function here takes the scores of N pairs and returns both.

Shapes: N pairs. A score is a log-probability over the scored tokens of a branch, either their mean (ā, nats per token)
or their sum (s, nats); with a reference model it is that minus the reference's own. `LOSSES` says which loss reads
which. σ is the logistic function; log σ comes from `logsigmoid`, so margins of any size stay finite.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

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
    """SimPO: L = -log σ(β(ā_c - ā_r) - γ) - α ā_c, on mean scores without a reference.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6; γ as written there, not divided by β. α > 0 adds the
    negative log-likelihood of the chosen branch (CPO-SimPO); 0 is plain SimPO.
    """
    base = _logistic(beta * (chosen_N - rejected_N) - gamma, beta)
    return PairLoss(base.loss_N - cpo_alpha * chosen_N, base.d_chosen_N - cpo_alpha, base.d_rejected_N)


def dpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float, label_smoothing: float = 0.0) -> PairLoss:
    """DPO: L = -(1-ε) log σ(β(s_c - s_r)) - ε log σ(-β(s_c - s_r)), on sums minus the reference's.

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7; ε > 0 is conservative DPO (Mitchell 2023), for labels
    that are wrong with probability ε.
    """
    return _logistic(beta * (chosen_N - rejected_N), beta, label_smoothing)


def ipo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> PairLoss:
    """IPO: L = (ā_c - ā_r - 1/(2β))², on means minus the reference's.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17, β being its τ; per token as its authors told TRL.
    """
    excess_N = chosen_N - rejected_N - 1 / (2 * beta)
    return PairLoss(excess_N**2, 2 * excess_N, -2 * excess_N)


def hinge(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> PairLoss:
    """Hinge: L = max(0, 1 - β(s_c - s_r)), on sums minus the reference's.

    Source: Zhao et al. 2023 (arXiv 2305.10425), on the log-ratios of DPO. At the corner the slope is 0.
    """
    short_N = 1 - beta * (chosen_N - rejected_N)
    slope_N = -beta * (short_N > 0).to(short_N.dtype)
    return PairLoss(short_N.clamp(min=0), slope_N, -slope_N)


def _log1mexp(log_p_N: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Mächler 2012)."""
    near_zero_N = log_p_N > -math.log(2)
    return torch.where(near_zero_N, torch.log(-torch.expm1(log_p_N)), torch.log1p(-torch.exp(log_p_N)))


def orpo(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> PairLoss:
    """ORPO: L = -ā_c - β log σ(log odds_c - log odds_r), odds = p/(1-p) with p = exp ā; means, no reference.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7. The likelihood term is over the scored tokens.
    """
    ratio_N = chosen_N - rejected_N
    log_rest_chosen_N, log_rest_rejected_N = _log1mexp(chosen_N), _log1mexp(rejected_N)
    log_odds_N = ratio_N - (log_rest_chosen_N - log_rest_rejected_N)
    # d log odds / dā = 1 + p/(1-p) = 1/(1-p). The chosen slope is σ(-log odds)/(1-p) in one, as both may be 0
    return PairLoss(
        -chosen_N - beta * logsigmoid(log_odds_N),
        -1 - beta * torch.exp(-torch.logaddexp(log_rest_chosen_N, ratio_N + log_rest_rejected_N)),
        -beta * torch.sigmoid(-log_odds_N) / torch.expm1(rejected_N),
    )


def _bump(score_N: Tensor) -> Tensor:
    """σ'(x) = σ(x) σ(-x)."""
    return torch.sigmoid(score_N) * torch.sigmoid(-score_N)


def apo_zero(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> PairLoss:
    """APO-zero: L = 1 - σ(β s_c) + σ(β s_r), on sums minus the reference's: for chosen runs better than the model's.

    Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7.
    """
    loss_N = torch.sigmoid(-beta * chosen_N) + torch.sigmoid(beta * rejected_N)
    return PairLoss(loss_N, -beta * _bump(beta * chosen_N), beta * _bump(beta * rejected_N))


def apo_down(chosen_N: Tensor, rejected_N: Tensor, *, beta: float) -> PairLoss:
    """APO-down: L = σ(β s_c) + 1 - σ(β(s_c - s_r)), sums minus the reference's: for chosen runs worse than the model's.

    Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 8.
    """
    margin_N = beta * (chosen_N - rejected_N)
    loss_N = torch.sigmoid(beta * chosen_N) + torch.sigmoid(-margin_N)
    return PairLoss(loss_N, beta * (_bump(beta * chosen_N) - _bump(margin_N)), beta * _bump(margin_N))


class PairLossFunction(Protocol):
    def __call__(self, chosen_N: Tensor, rejected_N: Tensor) -> PairLoss: ...


class LossKind(NamedTuple):
    """What a loss reads: the mean or the sum of a branch's log-probabilities, and whether minus the reference's."""

    score: Literal["mean", "sum"]
    needs_reference: bool


def of_means(
    loss: PairLossFunction,
    chosen_N: Tensor,
    rejected_N: Tensor,
    *,
    scales_2N: Tensor,
    references_2N: Tensor,
) -> PairLoss:
    """Any loss as a function of mean scores, which is what the branch plans exchange.

    Args:
        scales_2N: what turns a branch's mean into the score the loss reads: its total weight for sums, 1 for means;
            row 0 chosen, row 1 rejected.
        references_2N: the reference's mean score of each branch (nats per scored token); zeros without a reference.
    """
    chosen_scale_N, rejected_scale_N = scales_2N
    inner = loss(
        chosen_scale_N * (chosen_N - references_2N[0]),
        rejected_scale_N * (rejected_N - references_2N[1]),
    )
    return PairLoss(inner.loss_N, chosen_scale_N * inner.d_chosen_N, rejected_scale_N * inner.d_rejected_N)


LOSSES: dict[str, LossKind] = {
    "simpo": LossKind("mean", needs_reference=False),
    "orpo": LossKind("mean", needs_reference=False),
    "dpo": LossKind("sum", needs_reference=True),
    "ipo": LossKind("mean", needs_reference=True),
    "hinge": LossKind("sum", needs_reference=True),
    "apo_zero": LossKind("sum", needs_reference=True),
    "apo_down": LossKind("sum", needs_reference=True),
}
