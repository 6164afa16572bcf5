"""Both branches of a pair in one forward: their common prefix once, and the two tails behind it.

Shapes: S tokens of the common prefix, T packed tokens = S + chosen tail + rejected tail, P scored positions.

Exact: the tails keep the positions they have in their own branch, and no token of one tail is seen by the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine import segments
from engine.data import Branch
from engine.layers import LongContextScorer
from engine.scores import Scorer, chunked_logprobs, split_head
from engine.walk import Sequence

CHUNK_POSITIONS = 1024


class PackedPair(NamedTuple):
    """Prefix, chosen tail, rejected tail; per branch the packed rows before its scored tokens, and these tokens."""

    n_prefix: int
    n_chosen: int
    n_rejected: int
    token_ids_T: Tensor
    before_P: tuple[Tensor, Tensor]
    targets_P: tuple[Tensor, Tensor]


def common_prefix(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """Number of leading tokens that two branches share."""
    n_tokens = min(len(one_T), len(other_T))
    different = np.flatnonzero(one_T[:n_tokens] != other_T[:n_tokens])
    return int(different[0]) if len(different) else n_tokens


def block_mask(n_prefix: int, n_chosen: int, n_rejected: int, device: torch.device) -> Tensor:
    """mask_11TT, true where a query (row) sees a key: causal, but the rejected tail does not see the chosen one."""
    n_tokens = n_chosen + n_rejected - n_prefix
    mask_TT = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device).tril_()
    mask_TT[n_chosen:, n_prefix:n_chosen] = False
    return mask_TT[None, None]


def pack_pair(chosen: Branch, rejected: Branch, device: torch.device) -> PackedPair:
    """The pair's tokens on the device, the common prefix once."""
    n_prefix = common_prefix(chosen.token_ids_T, rejected.token_ids_T)
    packed_T = np.concatenate([chosen.token_ids_T, rejected.token_ids_T[n_prefix:]]).astype(np.int64)
    before, targets = [], []
    for branch, shift in ((chosen, 0), (rejected, chosen.n_tokens - n_prefix)):
        before_P = branch.positions_P - 1  # the hidden state that predicts a position, in its own branch
        before.append(torch.from_numpy(np.where(before_P < n_prefix, before_P, before_P + shift)).to(device))
        targets.append(torch.from_numpy(branch.token_ids_T[branch.positions_P].astype(np.int64)).to(device))
    packed_ids_T = torch.from_numpy(packed_T).to(device)
    return PackedPair(n_prefix, chosen.n_tokens, rejected.n_tokens, packed_ids_T, tuple(before), tuple(targets))


def _plain_logprobs(model: nn.Module, pair: PackedPair) -> list[Tensor]:
    """By the model's own forward, under a dense block mask."""
    device = pair.token_ids_T.device
    places_T = torch.cat([torch.arange(pair.n_chosen), torch.arange(pair.n_prefix, pair.n_rejected)]).to(device)
    decoder, head = split_head(model)
    hidden_TD = decoder(
        input_ids=pair.token_ids_T[None],
        attention_mask=block_mask(pair.n_prefix, pair.n_chosen, pair.n_rejected, device),
        position_ids=places_T[None],
        use_cache=False,
    ).last_hidden_state[0]
    return [
        chunked_logprobs(hidden_TD[before_P], targets_P, head, CHUNK_POSITIONS)
        for before_P, targets_P in zip(pair.before_P, pair.targets_P, strict=True)
    ]


def shared_prefix_logprobs(
    model: nn.Module, chosen: Branch, rejected: Branch, device: torch.device, scorer: Scorer | None = None
) -> list[Tensor]:
    """logp_P (nats) of the chosen and of the rejected branch's scored positions, with one graph for both.

    Args:
        scorer: a LongContextScorer walks the pair in its own way; any other leaves it to the model's forward.
    """
    pair = pack_pair(chosen, rejected, device)
    if not isinstance(scorer, LongContextScorer):
        return _plain_logprobs(model, pair)
    layout = segments.shared_prefix(pair.n_prefix, pair.n_chosen, pair.n_rejected)
    sequence = Sequence(pair.token_ids_T, layout, torch.cat(pair.before_P), torch.cat(pair.targets_P))
    sizes = [len(targets_P) for targets_P in pair.targets_P]
    return list(scorer.score(model, sequence).split(sizes))
