"""The oracle: full logits, plain autograd, no tiles, no tricks. Tests compare everything else with it.

Shapes: B rows, T tokens, D hidden size, F MLP size, V vocabulary, P scored positions, H query heads,
K key-value heads, E head size.

The decoder is written out here because transformers computes RMSNorm in float32 whatever the model's dtype, which
would hide errors under 1e-7 from a float64 test. In float32 both agree to rounding (a test keeps that).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.rope import forget_lengths
from engine.scores import check_positions, split_head


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (wide * scale).to(x.dtype) * norm.weight


def _rotate(x_HTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_HTE.chunk(2, dim=-1)
    return x_HTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


def _attention(attn: Any, x_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    n_tokens, head_size = x_TD.shape[0], attn.head_dim
    q_HTE = attn.q_proj(x_TD).view(n_tokens, -1, head_size).transpose(0, 1)
    k_KTE = attn.k_proj(x_TD).view(n_tokens, -1, head_size).transpose(0, 1)
    v_KTE = attn.v_proj(x_TD).view(n_tokens, -1, head_size).transpose(0, 1)
    if hasattr(attn, "q_norm"):
        q_HTE, k_KTE = _rms_norm(q_HTE, attn.q_norm), _rms_norm(k_KTE, attn.k_norm)
    q_HTE, k_KTE = _rotate(q_HTE, cos_TE, sin_TE), _rotate(k_KTE, cos_TE, sin_TE)
    repeats = q_HTE.shape[0] // k_KTE.shape[0]
    k_HTE, v_HTE = k_KTE.repeat_interleave(repeats, 0), v_KTE.repeat_interleave(repeats, 0)
    scores_HTT = (q_HTE @ k_HTE.transpose(1, 2)) * attn.scaling
    future_TT = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=x_TD.device).triu(1)
    weights_HTT = scores_HTT.masked_fill(future_TT, -torch.inf).softmax(-1)
    return attn.o_proj((weights_HTT @ v_HTE).transpose(0, 1).reshape(n_tokens, -1))


def hidden_states(model: nn.Module, input_ids_T: Tensor) -> Tensor:
    """Normed hidden states [T, D] of one row without padding (Llama, Mistral, Qwen2, Qwen3)."""
    decoder: Any = split_head(model)[0]
    x_TD = decoder.embed_tokens(input_ids_T)
    position_ids = torch.arange(input_ids_T.numel(), device=input_ids_T.device)[None]
    forget_lengths(decoder)
    cos_1TE, sin_1TE = decoder.rotary_emb(x_TD, position_ids)
    for layer in decoder.layers:
        attended_TD = _rms_norm(x_TD, layer.input_layernorm)
        x_TD = x_TD + _attention(layer.self_attn, attended_TD, cos_1TE[0], sin_1TE[0])
        mlp = layer.mlp
        normed_TD = _rms_norm(x_TD, layer.post_attention_layernorm)
        gated_TF = nn.functional.silu(mlp.gate_proj(normed_TD)) * mlp.up_proj(normed_TD)
        x_TD = x_TD + mlp.down_proj(gated_TF)
    return _rms_norm(x_TD, decoder.norm)


def token_logprobs(
    model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, rows_P: Tensor, positions_P: Tensor
) -> Tensor:
    """A scorer (see `engine.scores`) that materialises all logits of every row. Rows may be padded on either side."""
    check_positions(input_ids_BT, attention_mask_BT, rows_P, positions_P)
    _, head = split_head(model)
    logp_P: list[Tensor] = [torch.empty(0)] * positions_P.numel()
    for row in rows_P.unique().tolist():
        kept_T = attention_mask_BT[row].bool()
        logits_TV = head(hidden_states(model, input_ids_BT[row][kept_T]))
        wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        all_logp_TV = wide_TV.log_softmax(-1)
        place_T = kept_T.cumsum(0) - 1
        for p in (rows_P == row).nonzero().flatten().tolist():
            position = int(positions_P[p])
            target = int(input_ids_BT[row, position])
            logp_P[p] = all_logp_TV[place_T[position] - 1, target]
    return torch.stack(logp_P)
