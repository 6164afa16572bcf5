"""`traceforge plan`: what a branch of a given length needs, component by component, before anything is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from artifacts.store import Store
from engine.budget import memory_setup
from engine.choose import choose_plan, longest_branch
from engine.memory import GIB, Ledger
from schemas.base import Frozen
from schemas.config import RunConfig
from schemas.errors import UserError
from tasks.model import prepare_model

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Shapes that can be planned for before their weights are here."""


class PlanReport(Frozen):
    """The memory of one branch, forward, backward and optimiser, on one device."""

    model: str
    n_tokens: int
    n_scored: int
    device_limit_bytes: int
    host_limit_bytes: int
    peak_device_bytes: int
    host_bytes: int
    longest_tokens: int = Field(description="the longest branch that fits the same limits")
    ledger: Ledger

    def text(self) -> str:
        return (
            f"{self.ledger.table()}\n\n{self.model}: a branch of {self.n_tokens:,} tokens, {self.n_scored:,} of them "
            f"scored, peaks at {self.peak_device_bytes / GIB:.2f} GiB on the device and {self.host_bytes / GIB:.2f} "
            f"GiB on the host;\nthe longest that fits is {self.longest_tokens:,} tokens"
        )


def _model_config(config: RunConfig, model: str) -> tuple[str, Mapping[str, Any]]:
    """(name, config.json) of a known shape, a config.json or its folder; of the run's own model for an empty name."""
    if model.lower() in SHAPES:
        return model.lower(), SHAPES[model.lower()]
    if not model:
        ready = prepare_model(config.model, Store(config.store))
        name, path = ready.name, Path(ready.model.path) / "config.json"
    else:
        path = Path(model) if model.endswith(".json") else Path(model) / "config.json"
        name = path.resolve().parent.name
    try:
        return name, json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(SHAPES)
        raise UserError(f"no readable model config ({error})", where=path, fix=f"a folder, or {known}") from error


def plan_memory(
    config: RunConfig, *, model: str = "", n_tokens: int, n_scored: int, device_gib: float, host_gib: float
) -> PlanReport:
    """Predicts the memory of the preference stage for one branch.

    Raises:
        UserError: no such model, or the branch does not fit; the text says how long one may be.
    """
    name, model_config = _model_config(config, model)
    setup = memory_setup(
        config.model,
        lora_rank=config.lora.r,
        lora_targets=config.lora.target_modules,
        optimizer=config.simpo.optimizer,
        n_scored=n_scored,
        accumulating=config.simpo.accumulation > 1 or config.simpo.plan != "parallel",
    )
    device_bytes, host_bytes = int(device_gib * GIB), int(host_gib * GIB)
    _, ledger = choose_plan(model_config, n_tokens, setup, device_bytes=device_bytes, host_bytes=host_bytes)
    return PlanReport(
        model=name,
        n_tokens=n_tokens,
        n_scored=n_scored,
        device_limit_bytes=device_bytes,
        host_limit_bytes=host_bytes,
        peak_device_bytes=ledger.peak_device_bytes,
        host_bytes=ledger.host_bytes,
        longest_tokens=longest_branch(model_config, setup, device_bytes=device_bytes, host_bytes=host_bytes),
        ledger=ledger,
    )
