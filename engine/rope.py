"""Rotary embeddings that depend on more than a token's position: on the length of the sequence it stands in.

transformers' dynamic NTK scaling keeps, besides, the longest sequence it has seen, so that a score would depend on what
was scored before it. Here every branch is computed as by a model that has seen none.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.budget import rope_by_length


def _rope_type(decoder: nn.Module) -> str:
    return str(getattr(getattr(decoder, "rotary_emb", None), "rope_type", "default"))


def depends_on_length(decoder: nn.Module) -> bool:
    """Whether the same token at the same position is turned otherwise in a longer sequence."""
    return rope_by_length(_rope_type(decoder))


def forget_lengths(decoder: nn.Module) -> None:
    """Dynamic NTK scaling as it was before the first sequence. Call it before a forward pass."""
    if "dynamic" not in _rope_type(decoder):
        return
    rotary: Any = decoder.rotary_emb
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.register_buffer("inv_freq", rotary.original_inv_freq.to(rotary.inv_freq.device), persistent=False)
