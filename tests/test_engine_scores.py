"""The plain scorer and the oracle against transformers' own logits."""

from __future__ import annotations

import pytest
import torch
from engine_models import ARCHITECTURES, lora_gradients, relative_error, tiny_model

from engine import reference
from engine.scores import branch_scores, token_logprobs


def _batch(n_rows: int = 2, n_tokens: int = 23) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 89, (n_rows, n_tokens), generator=generator)
    rows_P = torch.tensor([0, 1, 0, 1, 0])
    positions_P = torch.tensor([1, 22, 7, 3, 22])
    return ids_BT, torch.ones_like(ids_BT), rows_P, positions_P


def _full_logprobs(model, ids_BT, mask_BT, rows_P, positions_P):
    logp_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits.log_softmax(-1)
    return logp_BTV[rows_P, positions_P - 1, ids_BT[rows_P, positions_P]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1, 2, 5, 1024])
def test_equals_full_logits_with_gradients(architecture: str, chunk: int) -> None:
    model, batch = tiny_model(architecture), _batch()
    upstream_P = torch.randn(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want_P = _full_logprobs(model, *batch)
    (want_P * upstream_P).sum().backward()
    want = lora_gradients(model)
    got_P = token_logprobs(model, *batch, chunk_positions=chunk)
    (got_P * upstream_P).sum().backward()
    assert relative_error(got_P, want_P) < 1e-12
    for name, grad in lora_gradients(model).items():
        assert relative_error(grad, want[name]) < 1e-9, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_oracle_is_the_transformers_model(architecture: str) -> None:
    """transformers' RMSNorm rounds to float32, hence 1e-5 (measured: 2e-7 scores, 7e-7 gradients)."""
    model, batch = tiny_model(architecture), _batch()
    want_P = _full_logprobs(model, *batch)
    want_P.sum().backward()
    want = lora_gradients(model)
    got_P = reference.token_logprobs(model, *batch)
    got_P.sum().backward()
    assert relative_error(got_P, want_P) < 1e-5
    for name, grad in lora_gradients(model).items():
        assert relative_error(grad, want[name]) < 1e-5, name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_does_not_change_scores(side: str) -> None:
    """The claim 'padding must be on the left' is wrong for scoring: both sides give the unpadded score."""
    model = tiny_model()
    ids_BT, mask_BT, *_ = _batch(1)
    pad_BT, off_BT = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)
    order = (lambda pad, row: [pad, row]) if side == "left" else (lambda pad, row: [row, pad])
    shift = 4 if side == "left" else 0
    rows_P, positions_P = torch.zeros(3, dtype=torch.long), torch.tensor([1, 9, 22])
    want_P = token_logprobs(model, ids_BT, mask_BT, rows_P, positions_P)
    padded = torch.cat(order(pad_BT, ids_BT), 1), torch.cat(order(off_BT, mask_BT), 1)
    for scorer in (token_logprobs, reference.token_logprobs):
        got_P = scorer(model, *padded, rows_P, positions_P + shift)
        assert relative_error(got_P, want_P) < 1e-6


def test_bad_positions_are_refused() -> None:
    model = tiny_model()
    ids_BT, mask_BT, *_ = _batch()
    one = torch.zeros(1, dtype=torch.long)
    for positions in ([0], [23], [-1]):
        with pytest.raises(ValueError, match=r"allowed 1\.\.22"):
            token_logprobs(model, ids_BT, mask_BT, one, torch.tensor(positions))
    with pytest.raises(ValueError, match="at least one"):
        token_logprobs(model, ids_BT, mask_BT, one[:0], one[:0])
    with pytest.raises(ValueError, match="batch has 2"):
        token_logprobs(model, ids_BT, mask_BT, one + 2, one + 1)


def test_branch_scores() -> None:
    logp_P = torch.tensor([-1.0, -2.0, -6.0])
    assert [float(s) for s in branch_scores(logp_P)] == [-9.0, -3.0]
    assert [float(s) for s in branch_scores(logp_P, torch.tensor([1.0, 1.0, 0.0]))] == [-3.0, -1.5]
    with pytest.raises(ValueError, match="0/0"):
        branch_scores(logp_P[:0])
    with pytest.raises(ValueError, match="0/0"):
        branch_scores(logp_P, torch.zeros(3))
