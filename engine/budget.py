"""Which engine runs a stage and whether its longest branch fits: settled from numbers, before any weight is loaded.

Imports no torch. Sizes are those of the model's config.json; memory is the ledger's (`engine.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from engine.choose import ALLOCATOR_SHARE, SIZES, Budget, choose_plan, longest_branch, sized_plans
from engine.host_memory import HostLimit, tightest
from engine.memory import GIB, BaseFormat, Ledger, Optimiser, Setup, predict
from engine.plan import MemoryPlan, uniform_plan
from schemas.config import ModelConfig
from schemas.errors import UserError
from schemas.training import OptimizerConfig

EngineName = Literal["plain", "long_context"]
Side = Literal["device", "host"]

LONG_CONTEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

SAME_IN_ALL_LAYERS = ("llama", "mistral")
"""Families that attend in all layers alike, whatever layer_types says."""

HOST_SHARE = 0.9
"""Of the host memory that is free: what all ranks together may pin."""

MISSED_SHARE = 0.05
"""Of the device memory allowed: what to plan without, at least, where the ledger's plan did not fit."""


class Stand(NamedTuple):
    """How memory stood on the side where it ran out. On the host, only `obtainable_bytes` is known."""

    side: Side
    obtainable_bytes: int  # what this process holds there and could still get
    peak_bytes: int = 0  # most that this process held
    idle_bytes: int = 0  # held by the allocator in pieces too small for what was asked
    world_size: int = 1


class StagePlan(NamedTuple):
    """What a stage had planned: enough to plan again with less. Without setup and budget nothing was planned."""

    engine: EngineName
    longest_tokens: int
    ledger: Ledger | None = None
    config: Mapping[str, Any] = {}
    setup: Setup | None = None
    budget: Budget | None = None


def host_budget(asked_gib: float | None, limits: Sequence[HostLimit]) -> int:
    """Host bytes that the processes of a stage may pin together. `limits`: the machine's, then its control groups'.

    Raises:
        UserError: more is asked for than a control group leaves.
    """
    if asked_gib is None:
        return int(HOST_SHARE * tightest(limits).available_bytes)
    for limit in limits[1:]:
        if asked_gib * GIB > limit.available_bytes:
            raise UserError(
                f"{asked_gib:g} GiB of host memory are asked for, {limit.by} leaves {limit.available_bytes / GIB:.1f}",
                where="model.host_gib",
                fix="lower it, or raise that limit",
            )
    return int(asked_gib * GIB)


def window_of(config: Any) -> int | None:
    """Tokens of the sliding window that a model of this transformers config attends within; None: it sees all."""
    types = None if config.model_type in SAME_IN_ALL_LAYERS else getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if not types or "sliding_attention" in types else None


def rope_by_length(rope_type: str) -> bool:
    """Whether a token's rotary embedding depends on the length of what it stands in, besides its position."""
    return "dynamic" in rope_type or rope_type == "longrope"


def choose_engine(
    base: ModelConfig, problem: str | None, longest_tokens: int, *, on_gpu: bool
) -> tuple[EngineName, str]:
    """The engine of a stage and the reason; one for all its branches, so that both sides of a pair round alike.

    `auto` takes the walk on a GPU whatever the length: layer for layer it launches fewer kernels than the model's own
    forward, which is what short branches wait for (docs/ENGINE.md has the times).

    Args:
        problem: what keeps the long-context engine from computing exactly what the model would; None: nothing.

    Raises:
        UserError: the config asks for the long-context engine, and there is a problem.
    """
    if base.engine == "long_context" and problem:
        raise UserError(
            f"the long-context engine does not cover {problem}", where="model.engine", fix='set it to "plain" or "auto"'
        )
    if base.engine != "auto":
        return base.engine, "as configured"
    if not on_gpu:
        return "plain", "no GPU"
    if problem:
        return "plain", f"the long-context engine does not cover {problem}"
    return "long_context", f"the longest branch has {longest_tokens:,} tokens"


def memory_setup(
    base: ModelConfig,
    *,
    lora_rank: int,
    lora_targets: tuple[str, ...],
    optimizer: OptimizerConfig | None,
    n_scored: int,
    accumulating: bool,
    n_multiprocessors: int = 0,
) -> Setup:
    """The ledger's view of a stage. `optimizer` None: nothing is trained. n_multiprocessors: of the GPU."""
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
        ordered_on=n_multiprocessors if base.deterministic else 0,
    )


def unlimited_plan(config: Mapping[str, Any], n_tokens: int) -> MemoryPlan:
    """The plan off the GPU, where nothing is offloaded: keep all but what is cheap to compute again."""
    tile_tokens = min(SIZES[0].tile_tokens, n_tokens)
    return uniform_plan("mlp", config["num_hidden_layers"], tile_tokens=tile_tokens, head_groups=SIZES[0].head_groups)


def training_plan(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> tuple[MemoryPlan, Ledger]:
    """The plan of a branch that is trained on; UserError, with the longest that would fit, when it does not."""
    return choose_plan(config, n_tokens, setup, device_bytes=budget.device_bytes, host_bytes=budget.host_bytes)


def scoring_plan(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> tuple[MemoryPlan, Ledger]:
    """The plan of a branch that is only scored: nothing is kept, so the widest tiles whose forward fits.

    Raises:
        UserError: not even the smallest does.
    """
    ledgers = [
        predict(config, n_tokens, plan, setup, keeps=False)
        for plan in sized_plans(config, n_tokens, "layer_offload")
    ]  # fmt: skip
    for ledger in ledgers:
        if ledger.peak_device_bytes <= ALLOCATOR_SHARE * budget.device_bytes and ledger.host_bytes <= budget.host_bytes:
            return ledger.plan, ledger
    raise UserError(
        f"scoring a branch of {n_tokens:,} tokens takes {ledgers[-1].peak_device_bytes / GIB:.1f} GiB on the device "
        f"and {ledgers[-1].host_bytes / GIB:.1f} on the host, {budget.device_bytes / GIB:.1f} and "
        f"{budget.host_bytes / GIB:.1f} GiB are there",
        where="evaluate",
        fix="lower render.max_tokens",
    )


def advice(stand: Stand, plan: StagePlan) -> list[str]:
    """What to change after memory ran out, the gentlest first; lengths and sizes are of a plan with what was there."""
    if plan.engine == "plain":
        return _advice_on_plain(plan)
    if plan.setup is None or plan.budget is None:
        return ["lower render.max_tokens"]
    found, left = (_left_on_device if stand.side == "device" else _left_on_host)(stand, plan, plan.budget)
    longest = longest_branch(plan.config, plan.setup, device_bytes=left.device_bytes, host_bytes=left.host_bytes)
    if longest >= plan.longest_tokens:
        name, value = ("gpu_gib", left.device_bytes) if stand.side == "device" else ("host_gib", left.host_bytes)
        for_all = value * (stand.world_size if stand.side == "host" else 1)
        found.append(f"set model.{name} = {for_all / GIB:.1f}: the policy then keeps less and computes more again")
    else:
        found.append(f"set render.max_tokens = {longest}, the longest branch that fits what was there")
    return found


def _advice_on_plain(plan: StagePlan) -> list[str]:
    other = 'set model.engine = "long_context"'
    if plan.setup is not None and plan.budget is not None:
        device_bytes, host_bytes = plan.budget
        longest = longest_branch(plan.config, plan.setup, device_bytes=device_bytes, host_bytes=host_bytes)
        other += f", which holds branches of up to {longest:,} tokens here"
    return [other, "lower tokens_per_micro_batch", "lower render.max_tokens"]


def _left_on_device(stand: Stand, plan: StagePlan, budget: Budget) -> tuple[list[str], Budget]:
    """Advice that is about the device alone, and the budget to plan with instead."""
    found, allowed_bytes = [], budget.device_bytes
    lost_bytes = allowed_bytes - stand.obtainable_bytes
    if lost_bytes > MISSED_SHARE * allowed_bytes:
        found.append(f"free the {lost_bytes / GIB:.1f} GiB of the device that others have taken since the start")
        return found, budget._replace(device_bytes=stand.obtainable_bytes)
    if stand.idle_bytes > MISSED_SHARE * allowed_bytes:
        found.append(
            f"set PYTORCH_ALLOC_CONF=expandable_segments:True (as `traceforge` does where it is not set): "
            f"{stand.idle_bytes / GIB:.1f} GiB lay idle in pieces"
        )
    predicted_bytes = plan.ledger.peak_device_bytes if plan.ledger else allowed_bytes
    missed_bytes = max(stand.peak_bytes - predicted_bytes, int(MISSED_SHARE * allowed_bytes))
    return found, budget._replace(device_bytes=allowed_bytes - missed_bytes)


def _left_on_host(stand: Stand, plan: StagePlan, budget: Budget) -> tuple[list[str], Budget]:
    own_bytes = min(budget.host_bytes, int(HOST_SHARE * stand.obtainable_bytes / stand.world_size))
    found = []
    wanted_bytes = (plan.ledger.host_bytes if plan.ledger else 0) - own_bytes
    if wanted_bytes > 0:
        found.append(f"give the host {wanted_bytes * stand.world_size / GIB:.1f} GiB more memory")
    if stand.world_size > 1:
        found.append('set simpo.plan = "sequential": one process then has all of the host memory')
    return found, budget._replace(host_bytes=own_bytes)
