"""How far the positions go that a model was trained on. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from engine.model_folder import read_json

_EXTENDING: Final = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary scaling that carry a model from its original length to `factor` times that."""

_MOST: Final = 2**40
"""Beyond it a number says nothing about a model."""


def trained_positions(config: Mapping[str, Any]) -> int | None:
    """The number of positions that a config.json says its model was trained for; None: it names none.

    Branches beyond run, by every engine and exactly: the model has just never seen such positions. Published files
    give the extended length, or the original one and a factor; the larger of the two counts.
    """
    named = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not _is_number(named):
        return None
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in _EXTENDING:
        return int(named)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", named)
    if not (_is_number(factor) and _is_number(original)):
        return int(named)
    return max(int(named), int(factor * original))


def folder_positions(model: Path) -> int | None:
    """`trained_positions` of a model folder.

    Raises:
        UserError: its config.json is damaged.
    """
    path = model / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    text_config = config.get("text_config")
    return trained_positions(text_config if isinstance(text_config, dict) else config)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= _MOST
