"""What a config.json asks for that no model of its family computes. Imports neither torch nor transformers.

transformers checks types when it reads a config, and little of what the values mean: the rest ends as a KeyError or a
shape that does not match in the first forward pass, or in numbers that are no model's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from engine.budget import LONG_CONTEXT_FAMILIES, SAME_IN_ALL_LAYERS

ROPE_TYPES: Final = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""Of transformers (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`); the default has no scaling."""

_ATTENTION_TYPES: Final = ("full_attention", "sliding_attention")

_ROPE_LISTS: Final = ("short_factor", "long_factor")
_ROPE_OPTIONS: Final = ("attention_factor", "beta_fast", "beta_slow")
_ROPE_NUMBERS: Final = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    *_ROPE_LISTS,
    *_ROPE_OPTIONS,
)


def config_problem(config: Any) -> str | None:
    """What no engine can compute of a model with this transformers config; None: nothing, or another family.

    Families beyond those of the long-context engine have meanings of their own for the same fields.
    """
    if config.model_type not in LONG_CONTEXT_FAMILIES:
        return None
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % key_heads:
        return f"num_attention_heads ({heads}) that is no multiple of num_key_value_heads ({key_heads})"
    head_size = getattr(config, "head_dim", None)
    if head_size is None and config.hidden_size % heads:
        return f"hidden_size ({config.hidden_size}) that is no multiple of num_attention_heads ({heads})"
    head_size = head_size or config.hidden_size // heads
    if head_size % 2:
        return f"an odd head_dim ({head_size}), whose features rotary embeddings cannot turn in pairs"
    if config.model_type not in SAME_IN_ALL_LAYERS and (problem := _layer_problem(config)):
        return problem
    rope = getattr(config, "rope_parameters", None) or {}
    return rope_problem(rope) or _length_problem(rope, head_size)


def _layer_problem(config: Any) -> str | None:
    types = getattr(config, "layer_types", None) or ()
    if others := [kind for kind in types if kind not in _ATTENTION_TYPES]:
        return f"layer_types of {others[0]} (known: {', '.join(_ATTENTION_TYPES)})"
    if "sliding_attention" in types and getattr(config, "sliding_window", None) is None:
        return (
            "layer_types of sliding_attention without a sliding_window (which use_sliding_window = true puts in force)"
        )
    return None


def rope_problem(rope: Mapping[str, Any]) -> str | None:
    """`rope`: rope_scaling as a config.json has it, or transformers' rope_parameters, which take in all of its kind."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        return f"rotary embeddings of rope_type {json.dumps(kind):.40} (known: {', '.join(ROPE_TYPES)})"
    for key in ("rope_theta", *_ROPE_NUMBERS * (kind != "default")):
        may_be_null = key in _ROPE_OPTIONS or (kind == "longrope" and key == "factor")
        if key not in rope or (may_be_null and rope[key] is None):
            continue
        numbers = rope[key] if key in _ROPE_LISTS else [rope[key]]
        if not isinstance(numbers, list) or not all(map(_is_positive, numbers)):
            return f"rotary embeddings whose {key} is {json.dumps(rope[key]):.40}, where positive numbers belong"
    share = rope.get("partial_rotary_factor", 1)
    if kind not in ("default", "proportional") and share != 1:
        return (
            f"rotary embeddings whose partial_rotary_factor is {json.dumps(share):.40}, which these families leave at 1"
        )
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        return f"rotary embeddings of their own for {nested[0]}"
    return None


def _length_problem(rope: Mapping[str, Any], head_size: int) -> str | None:
    for key in _ROPE_LISTS:
        if rope.get("rope_type") == "longrope" and len(rope[key]) != head_size // 2:
            return f"rotary embeddings whose {key} has {len(rope[key])} numbers for the {head_size // 2} of a head"
    return None


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def stored_format(config: Any) -> str:
    """How the weights of a model of this config are stored: none (as numbers), nf4, fp4, int8, or a method's name."""
    stored = getattr(config, "quantization_config", None) or {}
    if not isinstance(stored, Mapping):
        stored = stored.to_dict()
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))  # bitsandbytes' own default
    if stored.get("load_in_8bit"):
        return "int8"
    return str(stored.get("quant_method", "an unnamed method")) if stored else "none"
