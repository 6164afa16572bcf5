"""Log-probabilities of chosen tokens, without the logits of the others.

Shapes: B rows, T tokens, D hidden size, V vocabulary, P scored positions, C positions of one chunk.

A *scorer* is any callable `(model, input_ids_BT, attention_mask_BT, rows_P, positions_P) -> logp_P`.
`token_logprobs` here is the plain one (the model's own forward); `engine.layers.LongContextScorer` is the one
for long branches. Losses, branch plans and trainers take a scorer and do not care which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.rope import depends_on_length, forget_lengths

Scorer = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


def split_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The decoder (ids -> normed hidden states) and the LM head of a causal LM, seen through peft wrappers."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    head = inner.get_output_embeddings()  # type: ignore[operator]
    decoder = inner.get_decoder()  # type: ignore[operator]
    if head is None or decoder is inner:
        raise ValueError(f"{type(inner).__name__} has no LM head above a decoder: not a causal language model")
    return decoder, head


def check_positions(input_ids_BT: Tensor, attention_mask_BT: Tensor, rows_P: Tensor, positions_P: Tensor) -> None:
    """ValueError unless rows_P and positions_P name real tokens right behind another one, in rows without holes.

    One synchronisation with the device.
    """
    n_rows, n_tokens = input_ids_BT.shape
    if attention_mask_BT.shape != input_ids_BT.shape:
        raise ValueError(f"attention mask {tuple(attention_mask_BT.shape)}: need one as the ids, {(n_rows, n_tokens)}")
    if rows_P.shape != positions_P.shape or rows_P.dim() != 1:
        raise ValueError(f"rows {tuple(rows_P.shape)} and positions {tuple(positions_P.shape)}: need two equal [P]")
    if positions_P.numel() == 0:
        raise ValueError("no scored position: a branch needs at least one scored token")
    kept_BT = attention_mask_BT.bool()
    starts_B = kept_BT[:, 0] + (kept_BT[:, 1:] > kept_BT[:, :-1]).sum(1)
    inside_2P = torch.stack([rows_P.clamp(0, n_rows - 1), positions_P.clamp(1, n_tokens - 1)]).to(kept_BT.device).long()
    rows, positions = inside_2P  # those outside are refused first
    unknown_P = ~(kept_BT[rows, positions] & kept_BT[rows, positions - 1])
    extremes = [positions_P.min(), positions_P.max(), rows_P.min(), rows_P.max(), unknown_P.sum(), starts_B[rows].max()]
    first, last, first_row, last_row, n_unknown, most_starts = torch.stack(
        [number.to(kept_BT.device) for number in extremes]
    ).tolist()
    if first < 1 or last >= n_tokens:
        raise ValueError(
            f"scored positions span {first}..{last}, allowed 1..{n_tokens - 1}: "
            "the first token has nothing before it to be predicted from"
        )
    if first_row < 0 or last_row >= n_rows:
        raise ValueError(f"scored rows span {first_row}..{last_row}, batch has {n_rows}")
    if n_unknown:
        row, position = inside_2P[:, unknown_P][:, 0].tolist()
        raise ValueError(
            f"{n_unknown} scored positions are padding or have padding before them, first {position} of row {row}: "
            "there is no token, or none to predict it from"
        )
    if most_starts > 1:
        raise ValueError(f"the attention mask of a scored row has a hole: {most_starts} runs of tokens, allowed 1")


def is_right_padded(attention_mask_BT: Tensor) -> bool:
    """Whether each row is ones, then zeros (or ones alone)."""
    return bool((attention_mask_BT[:, 1:] <= attention_mask_BT[:, :-1]).all())


def _chunk_logprobs(hidden_CD: Tensor, targets_C: Tensor, head: nn.Module) -> Tensor:
    logits_CV = head(hidden_CD)
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    picked_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1)
    return picked_C - torch.logsumexp(logits_CV, dim=1)


def chunked_logprobs(hidden_PD: Tensor, targets_P: Tensor, head: nn.Module, chunk_positions: int) -> Tensor:
    """logp_P of targets under the head at normed hidden states; logits of one chunk alive, recomputed in backward."""
    chunks = [
        checkpoint(_chunk_logprobs, hidden_CD, targets_C, head, use_reentrant=False)
        for hidden_CD, targets_C in zip(hidden_PD.split(chunk_positions), targets_P.split(chunk_positions), strict=True)
    ]
    return torch.cat(chunks)  # type: ignore[arg-type]


def token_logprobs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    rows_P: Tensor,
    positions_P: Tensor,
    *,
    chunk_positions: int = 1024,
) -> Tensor:
    """Log-probability (nats) of token `input_ids[rows[p], positions[p]]` given the tokens before it.

    The hidden state is the one at `positions[p] - 1`, so positions start at 1. The head runs on `chunk_positions`
    states at a time and is recomputed in backward, so no [tokens, V] tensor is ever alive. Returns logp_P,
    float32 (float64 when the model is). ValueError for positions that `check_positions` refuses.
    """
    check_positions(input_ids_BT, attention_mask_BT, rows_P, positions_P)
    decoder, head = split_head(model)
    if depends_on_length(decoder) and not (len(input_ids_BT) == 1 and bool(attention_mask_BT.all())):
        return _row_by_row(model, input_ids_BT, attention_mask_BT, rows_P, positions_P, chunk_positions)
    forget_lengths(decoder)
    hidden_BTD = decoder(
        input_ids=input_ids_BT,
        # what stands to the right of a token never reaches it: with a right mask, causal attention is already exact,
        # and without a mask the attention kernel runs its faster causal path
        attention_mask=None if is_right_padded(attention_mask_BT) else attention_mask_BT,
        use_cache=False,
    ).last_hidden_state
    hidden_PD = hidden_BTD[rows_P, positions_P - 1]
    return chunked_logprobs(hidden_PD, input_ids_BT[rows_P, positions_P], head, chunk_positions)


def _row_by_row(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    rows_P: Tensor,
    positions_P: Tensor,
    chunk_positions: int,
) -> Tensor:
    """logp_P with each row alone and unpadded, for models that compute it otherwise beside a longer one."""
    pieces, order = [], []
    for row in rows_P.unique().tolist():
        kept_T = attention_mask_BT[row].bool()
        place_T, chosen = kept_T.cumsum(0) - 1, (rows_P == row).nonzero().flatten()
        ids_1T = input_ids_BT[row][kept_T][None]
        alone = (torch.ones_like(ids_1T), torch.zeros_like(chosen), place_T[positions_P[chosen]])
        pieces.append(token_logprobs(model, ids_1T, *alone, chunk_positions=chunk_positions))
        order.append(chosen)
    return torch.cat(pieces)[torch.cat(order).argsort()]


def branch_scores(logp_P: Tensor, weights_P: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum and mean log-probability of one branch: (sum w_p logp_p, that / sum w_p); weights default to 1.

    Units: nats, and nats per scored token. ValueError when nothing is scored (0/0).
    """
    if logp_P.numel() == 0:
        raise ValueError("no scored position: the mean log-probability of an empty branch is 0/0")
    if weights_P is None:
        return logp_P.sum(), logp_P.mean()
    if weights_P.shape != logp_P.shape:
        raise ValueError(f"weights {tuple(weights_P.shape)} do not match log-probabilities {tuple(logp_P.shape)}")
    total_weight = weights_P.to(logp_P.dtype).sum()
    if float(total_weight) <= 0:
        raise ValueError("weights of the scored positions sum to zero: the mean log-probability is 0/0")
    total = (weights_P.to(logp_P.dtype) * logp_P).sum()
    return total, total / total_weight
