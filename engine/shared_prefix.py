"""Both branches of a pair in one forward: their common prefix once, and the two tails behind it.

Shapes: S tokens of the common prefix, T packed tokens = S + chosen tail + rejected tail, P scored positions.

Exact: the tails keep the positions they have in their own branch, and no token of one tail is seen by the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from engine.data import Branch
from engine.scores import chunked_logprobs, split_head

CHUNK_POSITIONS = 1024


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


def shared_prefix_logprobs(model: nn.Module, chosen: Branch, rejected: Branch, device: torch.device) -> list[Tensor]:
    """logp_P (nats) of the chosen and of the rejected branch's scored positions, with one graph for both."""
    n_shared = common_prefix(chosen.token_ids_T, rejected.token_ids_T)
    n_chosen, n_rejected = chosen.n_tokens, rejected.n_tokens
    packed_T = np.concatenate([chosen.token_ids_T, rejected.token_ids_T[n_shared:]]).astype(np.int64)
    places_T = np.concatenate([np.arange(n_chosen), np.arange(n_shared, n_rejected)])
    ids_1T, places_1T = (torch.from_numpy(values)[None].to(device) for values in (packed_T, places_T))
    decoder, head = split_head(model)
    hidden_TD = decoder(
        input_ids=ids_1T,
        attention_mask=block_mask(n_shared, n_chosen, n_rejected, device),
        position_ids=places_1T,
        use_cache=False,
    ).last_hidden_state[0]
    found = []
    for branch, shift in ((chosen, 0), (rejected, n_chosen - n_shared)):
        before_P = branch.positions_P - 1  # the hidden state that predicts a position, in its own branch
        before_P = torch.from_numpy(np.where(before_P < n_shared, before_P, before_P + shift)).to(device)
        targets_P = torch.from_numpy(branch.token_ids_T[branch.positions_P].astype(np.int64)).to(device)
        found.append(chunked_logprobs(hidden_TD[before_P], targets_P, head, CHUNK_POSITIONS))
    return found
