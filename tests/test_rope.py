"""Rotary embeddings that depend on a sequence's length, or on those seen before it: each branch counts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import lora_gradients, relative_error, tiny_model

from engine import reference
from engine.budget import unlimited_plan
from engine.layers import LongContextScorer
from engine.scores import Scorer, token_logprobs

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
ORIGINAL = 16


def walk_of(model: Any) -> Scorer:
    config = model.config.to_dict()
    return LongContextScorer(lambda n_tokens: unlimited_plan(config, n_tokens))


SCORERS: dict[str, Callable[[Any], Scorer]] = {
    "plain": lambda _: token_logprobs, "walk": walk_of, "oracle": lambda _: reference.token_logprobs
}  # fmt: skip


def dynamic_model() -> Any:
    return tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)


def row_of(n_tokens: int) -> tuple[torch.Tensor, ...]:
    ids_1T = torch.randint(0, 89, (1, n_tokens), generator=torch.Generator().manual_seed(n_tokens))
    positions_P = torch.tensor([1, n_tokens // 2, n_tokens - 1])
    return ids_1T, torch.ones_like(ids_1T), torch.zeros(3, dtype=torch.long), positions_P


def scored(score: Scorer, model: Any, row: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logp_P = score(model, *row)
    logp_P.sum().backward()
    return logp_P, lora_gradients(model)


@pytest.mark.parametrize("name", SCORERS)
def test_a_score_does_not_depend_on_what_was_scored_before(name: str) -> None:
    """24 tokens after 40: longer than the original 16, shorter than the longest that the model has seen."""
    fresh, used = dynamic_model(), dynamic_model()
    score, again = SCORERS[name](fresh), SCORERS[name](used)
    want_P, want = scored(score, fresh, row_of(24))
    scored(again, used, row_of(40))
    logp_P, found = scored(again, used, row_of(24))
    assert relative_error(logp_P, want_P) < 1e-12
    assert all(relative_error(grad, want[key]) < 1e-9 for key, grad in found.items())


def test_backward_turns_tokens_as_its_own_forward_did() -> None:
    model = dynamic_model()
    walk = walk_of(model)
    want = scored(walk, model, row_of(24))[1]
    logp_P = walk(model, *row_of(24))
    walk(model, *row_of(40)).detach()
    logp_P.sum().backward()
    assert all(relative_error(grad, want[key]) < 1e-9 for key, grad in lora_gradients(model).items())


@pytest.mark.parametrize("name", ["plain", "walk"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_what_they_are_alone(name: str, side: str) -> None:
    """A longer row beside it turns no token otherwise, and padding is no part of a row."""
    model = dynamic_model()
    score, lengths = SCORERS[name](model), (24, 40, 9)
    alone = [score(model, *row_of(n_tokens)) for n_tokens in lengths]
    ids_BT, mask_BT = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    rows, positions = [], []
    for row, n_tokens in enumerate(lengths):
        start = 40 - n_tokens if side == "left" else 0
        ids_BT[row, start : start + n_tokens], mask_BT[row, start : start + n_tokens] = row_of(n_tokens)[0][0], 1
        rows += [row] * 3
        positions += (row_of(n_tokens)[3] + start).tolist()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    logp_P = score(model, ids_BT, mask_BT, torch.tensor(rows)[order], torch.tensor(positions)[order])
    assert relative_error(logp_P, torch.cat(alone)[order]) < 1e-12
