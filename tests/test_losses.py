"""Every loss against TRL's own code in float64, value and gradient; extreme margins stay finite."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer

from engine import losses

N_PAIRS, N_TOKENS, VOCABULARY = 5, 17, 23
BETA = 0.7


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2N, T, V] with chosen rows first, token ids, and completions of different lengths."""
    torch.manual_seed(seed)
    logits = torch.randn(2 * N_PAIRS, N_TOKENS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    input_ids = torch.randint(0, VOCABULARY, (2 * N_PAIRS, N_TOKENS))
    completion_mask = (torch.arange(N_TOKENS) >= torch.randint(2, N_TOKENS - 1, (2 * N_PAIRS, 1))).long()
    return logits, input_ids, completion_mask


def own_scores(logits: Tensor, input_ids: Tensor, mask: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Sum or mean of log-probabilities of completion tokens, written out plainly."""
    logp = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2) * mask[:, 1:]
    total = logp.sum(1)
    scores = total if kind == "sum" else total / mask[:, 1:].sum(1)
    chosen, rejected = scores.chunk(2)
    return chosen, rejected


def gradient_by_chain(loss: losses.PairLoss, chosen: Tensor, rejected: Tensor, logits: Tensor) -> Tensor:
    """d mean(L) / d logits from the two score derivatives alone, as branch-parallel training does it."""
    surrogate = (loss.d_chosen_N.detach() * chosen + loss.d_rejected_N.detach() * rejected).mean()
    return torch.autograd.grad(surrogate, logits)[0]


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    got, want = got.detach().double(), want.detach().double()
    assert float((got - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("cpo_alpha", [0.0, 0.3])
@pytest.mark.parametrize("gamma", [0.0, 1.4])
def test_simpo_equals_cpo_trainer(gamma: float, cpo_alpha: float) -> None:
    """`get_batch_logps`, loss and gradient (measured: at most 3e-15)."""
    logits, input_ids, mask = batch()
    labels = torch.where(mask.bool(), input_ids, -100)
    theirs = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)  # type: ignore[arg-type]
    chosen, rejected = own_scores(logits, input_ids, mask, "mean")
    assert_close(torch.cat([chosen, rejected]), theirs)

    stand_in: Any = SimpleNamespace(
        alpha=0.0,
        beta=BETA,
        simpo_gamma=gamma,
        label_smoothing=0.0,
        loss_type="simpo",
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    want = CPOTrainer.cpo_loss(stand_in, *theirs.chunk(2))[0] - cpo_alpha * theirs.chunk(2)[0]  # type: ignore[arg-type]
    got = losses.simpo(chosen, rejected, beta=BETA, gamma=gamma, cpo_alpha=cpo_alpha)
    assert_close(got.loss_N, want)
    assert_close(gradient_by_chain(got, chosen, rejected, logits), torch.autograd.grad(want.mean(), logits)[0])


def dpo_trainer_loss(
    kind: str, logits: Tensor, input_ids: Tensor, mask: Tensor, reference: tuple[Tensor, Tensor]
) -> Tensor:
    """The loss that TRL's DPOTrainer computes from these logits."""
    identity = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
    )
    stand_in: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=identity,
        use_liger_kernel=False,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(),
        maybe_activation_offload_context=nullcontext(),
    )
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "completion_mask": mask,
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    return DPOTrainer._compute_loss(stand_in, lambda **_: SimpleNamespace(logits=logits), inputs, return_outputs=False)


@pytest.mark.parametrize(
    ("name", "trl_name"),
    [("dpo", "sigmoid"), ("ipo", "ipo"), ("hinge", "hinge"), ("apo_zero", "apo_zero"), ("apo_down", "apo_down")],
)
def test_reference_losses_equal_dpo_trainer(name: str, trl_name: str) -> None:
    """Loss and gradient by the logits (measured: at most 3e-15)."""
    logits, input_ids, mask = batch(1)
    reference_logits = logits.detach() + 0.3 * torch.randn_like(logits)
    sums = own_scores(reference_logits, input_ids, mask, "sum")
    want = dpo_trainer_loss(trl_name, logits, input_ids, mask, sums)

    kind = losses.LOSSES[name]
    chosen, rejected = own_scores(logits, input_ids, mask, kind.score)
    reference = own_scores(reference_logits, input_ids, mask, kind.score)
    got = getattr(losses, name)(chosen - reference[0], rejected - reference[1], beta=BETA)
    assert_close(got.loss_N.mean(), want)
    assert_close(gradient_by_chain(got, chosen, rejected, logits), torch.autograd.grad(want, logits)[0])


def test_conservative_dpo_equals_cpo_trainers_label_smoothing() -> None:
    """cDPO is the smoothed logistic loss on log-ratios, which TRL 1.14 keeps in CPOTrainer."""
    chosen = torch.randn(N_PAIRS, dtype=torch.float64, requires_grad=True)
    rejected = torch.randn(N_PAIRS, dtype=torch.float64, requires_grad=True)
    stand_in: Any = SimpleNamespace(
        alpha=0.0,
        beta=BETA,
        label_smoothing=0.1,
        loss_type="sigmoid",
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    want = CPOTrainer.cpo_loss(stand_in, chosen, rejected)[0]  # type: ignore[arg-type]
    got = losses.dpo(chosen, rejected, beta=BETA, label_smoothing=0.1)
    assert_close(got.loss_N, want)
    for mine, theirs in zip(got[1:], torch.autograd.grad(want.sum(), [chosen, rejected]), strict=True):
        assert_close(mine, theirs)


def test_orpo_equals_orpo_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient, TRL's cast to float32 left out (gradients measured: at most 6e-17)."""
    chosen, rejected = ((-torch.rand(N_PAIRS, dtype=torch.float64) * 3).requires_grad_() for _ in range(2))
    stand_in: Any = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor)
    want = -chosen - ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)[0]  # type: ignore[arg-type]
    monkeypatch.undo()
    assert want.dtype == torch.float64
    got = losses.orpo(chosen, rejected, beta=BETA)
    assert_close(got.loss_N, want)
    for mine, theirs in zip(got[1:], torch.autograd.grad(want.sum(), [chosen, rejected]), strict=True):
        assert_close(mine, theirs)


def test_orpo_of_a_certain_chosen_branch_is_the_limit() -> None:
    """At p = 1 the chosen slope is -1 - β odds_r."""
    chosen = torch.tensor([0.0, -1e-12], dtype=torch.float64)
    rejected = torch.full_like(chosen, -2.0)
    got = losses.orpo(chosen, rejected, beta=BETA)
    odds = math.exp(-2) / (1 - math.exp(-2))
    assert got.loss_N.tolist() == pytest.approx([0, 0], abs=1e-11)
    assert got.d_chosen_N.tolist() == pytest.approx([-1 - BETA * odds] * 2, rel=1e-11)
    assert got.d_rejected_N.tolist() == pytest.approx([0, 0], abs=1e-11)


def all_losses() -> list[Any]:
    return [
        pytest.param(partial(losses.simpo, beta=2.0, gamma=1.0, cpo_alpha=0.1), id="simpo"),
        pytest.param(partial(losses.dpo, beta=BETA, label_smoothing=0.1), id="dpo"),
        *(
            pytest.param(partial(getattr(losses, n), beta=BETA), id=n)
            for n in losses.LOSSES
            if n not in ("simpo", "dpo")
        ),
    ]


@pytest.mark.parametrize("loss", all_losses())
def test_derivatives_equal_autograd(loss: losses.PairLossFunction) -> None:
    torch.manual_seed(3)
    chosen = (-3 * torch.rand(50, dtype=torch.float64)).requires_grad_()
    rejected = (-3 * torch.rand(50, dtype=torch.float64)).requires_grad_()
    got = loss(chosen, rejected)
    for mine, theirs in zip(got[1:], torch.autograd.grad(got.loss_N.sum(), [chosen, rejected]), strict=True):
        assert_close(mine, theirs, tolerance=1e-12)


@pytest.mark.parametrize("loss", all_losses())
@pytest.mark.parametrize("margin", [1e-12, 50.0, 1e4])
def test_extreme_margins_are_finite(loss: losses.PairLossFunction, margin: float) -> None:
    low, high = torch.tensor([-margin - 1e-9], dtype=torch.float64), torch.tensor([-1e-9], dtype=torch.float64)
    for chosen, rejected in ((low, high), (high, low)):
        for values in loss(chosen, rejected):
            assert torch.isfinite(values).all()


def test_simpo_gamma_is_not_divided_by_beta() -> None:
    """At a margin of gamma / beta the loss is log 2: the convention of the paper and of TRL's `simpo_gamma`."""
    got = losses.simpo(torch.tensor([0.4]), torch.tensor([0.0]), beta=2.5, gamma=1.0)
    assert float(got.loss_N) == pytest.approx(0.6931471805599453, rel=1e-6)


def test_reference_equal_to_policy_gives_log_two() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert losses.dpo(zero, zero, beta=0.1).loss_N.tolist() == pytest.approx([0.6931471805599453] * 3)


def test_every_named_loss_exists() -> None:
    assert all(callable(getattr(losses, name)) for name in losses.LOSSES)
