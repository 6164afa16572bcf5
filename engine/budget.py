"""Which engine runs a stage and whether its longest branch fits: settled from numbers, before any weight is loaded.

Imports no torch. Sizes are those of the model's config.json; memory is the ledger's (`engine.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from engine.choose import SIZES, choose_plan
from engine.memory import GIB, BaseFormat, Ledger, Optimiser, Setup, predict
from engine.plan import MemoryPlan, uniform_plan
from schemas.config import ModelConfig, OptimizerConfig
from schemas.errors import UserError

EngineName = Literal["plain", "long_context"]

LONG_CONTEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LONG_TOKENS = 8_192
"""On a GPU, `auto` takes the long-context engine as soon as one branch of the stage is longer than this."""


class Budget(NamedTuple):
    """What one rank may use."""

    device_bytes: int
    host_bytes: int


def choose_engine(base: ModelConfig, model_type: str, longest_tokens: int, *, on_gpu: bool) -> tuple[EngineName, str]:
    """The engine of a stage and the reason; one for all its branches, so that both sides of a pair round alike.

    Raises:
        UserError: the config asks for the long-context engine on a model it does not cover.
    """
    covered = model_type in LONG_CONTEXT_FAMILIES and base.backend == "transformers"
    if base.engine == "long_context" and not covered:
        raise UserError(
            f"the long-context engine covers {', '.join(LONG_CONTEXT_FAMILIES)} loaded by transformers, not "
            f"{model_type} loaded by {base.backend}",
            where="model.engine",
            fix='set it to "plain" or "auto"',
        )
    if base.engine != "auto":
        return base.engine, "as configured"
    if not on_gpu:
        return "plain", "no GPU"
    if not covered:
        return "plain", f"{model_type} loaded by {base.backend} is not covered by the long-context engine"
    if longest_tokens <= LONG_TOKENS:
        return "plain", f"no branch is longer than {LONG_TOKENS:,} tokens"
    return "long_context", f"the longest branch has {longest_tokens:,} tokens"


def memory_setup(
    base: ModelConfig,
    *,
    lora_rank: int,
    lora_targets: tuple[str, ...],
    optimizer: OptimizerConfig | None,
    n_scored: int,
    accumulating: bool,
) -> Setup:
    """The ledger's view of a stage. `optimizer` None: nothing is trained."""
    formats: dict[str, BaseFormat] = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
    optimiser: Optimiser = "none"
    if optimizer is not None:
        optimiser = "adamw_8bit" if optimizer.optimizer == "adamw_bnb_8bit" else "adamw"
    return Setup(
        base=formats[base.dtype] if base.quantization == "none" else base.quantization,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        optimiser=optimiser,
        n_scored=n_scored,
        accumulating=accumulating,
    )


def unlimited_plan(config: Mapping[str, Any], n_tokens: int) -> MemoryPlan:
    """The plan off the GPU, where nothing is offloaded: keep all but what is cheap to compute again."""
    tile_tokens, head_groups = SIZES[0]
    return uniform_plan(
        "mlp", config["num_hidden_layers"], tile_tokens=min(tile_tokens, n_tokens), head_groups=head_groups
    )


def training_plan(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> tuple[MemoryPlan, Ledger]:
    """The plan of a branch that is trained on; UserError, with the longest that would fit, when it does not."""
    return choose_plan(config, n_tokens, setup, device_bytes=budget.device_bytes, host_bytes=budget.host_bytes)


def scoring_plan(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> tuple[MemoryPlan, Ledger]:
    """The plan of a branch that is only scored: nothing is kept, so the widest tiles whose forward fits.

    Raises:
        UserError: not even the smallest does.
    """
    key_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    peak_bytes = 0
    for tile_tokens, groups in SIZES:
        groups = min(groups, key_heads)
        if key_heads % groups:
            continue
        plan = uniform_plan(
            "layer_offload", config["num_hidden_layers"], tile_tokens=min(tile_tokens, n_tokens), head_groups=groups
        )
        ledger = predict(config, n_tokens, plan, setup)
        live_bytes = max(ledger.device_bytes_of("forward"), ledger.device_bytes_of("head"))
        peak_bytes = ledger.device_bytes_of("static") + live_bytes
        if peak_bytes <= budget.device_bytes:
            return plan, ledger
    raise UserError(
        f"scoring a branch of {n_tokens:,} tokens takes {peak_bytes / GIB:.1f} GiB on the device, "
        f"{budget.device_bytes / GIB:.1f} GiB are there",
        where="evaluate",
        fix="lower render.max_tokens",
    )
