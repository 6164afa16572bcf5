"""`traceforge plan`: what a branch of a given length needs, component by component, before anything is loaded."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from artifacts.store import Store
from engine.budget import memory_setup
from engine.choose import choose_plan, longest_branch
from engine.cost import cost_model
from engine.deal import PairCost, deal
from engine.memory import GIB, Ledger, Setup
from engine.plan import FIELDS, MemoryPlan
from schemas.base import Frozen
from schemas.config import RunConfig, SimpoConfig
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

BranchPlanName = Literal["parallel", "sequential", "shared_prefix"]
PLAN_OF: Final[Mapping[str, BranchPlanName]] = {"split": "parallel", "whole": "sequential", "shared": "shared_prefix"}


class CardPlan(Frozen):
    """What one GPU does in an optimiser step, and how much of its memory that takes at most."""

    card: int
    work: tuple[str, ...]
    busy_share: float = Field(description="of the step's predicted time")
    peak_device_bytes: int
    host_bytes: int


class BranchPlan(Frozen):
    """How the pairs of one optimiser step are worked on, by predicted cost."""

    plans: tuple[BranchPlanName, ...] = Field(description="that of each pair of the step")
    n_shared: int = Field(description="tokens of the common prefix that were assumed")
    cards: tuple[CardPlan, ...]

    def text(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(self.plans).items()))
        lines = [f"branch plan of a step of {len(self.plans)} pair(s): {counts}"]
        for card in self.cards:
            work = "; ".join(card.work) or "nothing"
            lines.append(
                f"  GPU {card.card}: {work} (busy {card.busy_share:.0%}, {card.peak_device_bytes / GIB:.2f} GiB on it, "
                f"{card.host_bytes / GIB:.2f} GiB of the host)"
            )
        return "\n".join(lines)


class PlanReport(Frozen):
    """The memory of one branch, forward, backward and optimiser, on one device, and who works on which branch."""

    model: str
    n_tokens: int
    n_scored: int
    device_limit_bytes: int
    host_limit_bytes: int = Field(description="of one process")
    peak_device_bytes: int
    host_bytes: int
    longest_tokens: int = Field(description="the longest branch that fits the same limits")
    policy: str
    branch_plan: BranchPlan
    ledger: Ledger

    def text(self) -> str:
        return (
            f"{self.ledger.table()}\n\n{self.model}: a branch of {self.n_tokens:,} tokens, {self.n_scored:,} of them "
            f"scored, peaks at {self.peak_device_bytes / GIB:.2f} GiB on the device and {self.host_bytes / GIB:.2f} "
            f"GiB on the host;\nthe longest that fits is {self.longest_tokens:,} tokens\n{self.policy}\n"
            f"{self.branch_plan.text()}"
        )


def policy_text(plan: MemoryPlan) -> str:
    """What a plan keeps where, in how many layers, and in which sizes it works."""
    n_layers, places = len(plan.layers), []
    for field in FIELDS:
        for place in ("host", "device"):
            count = sum(getattr(layer, field) == place for layer in plan.layers)
            if count:
                places.append(f"{field} on the {place} in {count} of {n_layers} layers")
    kept = ", ".join(places)
    staged = ", q, k, v staged through the host" if plan.staged_qkv else ""
    sizes = f"tiles of {plan.tile_tokens:,} tokens, {plan.tile_buffers} buffers for them, "
    sizes += f"heads in {plan.head_groups} group(s)"
    return f"policy {plan.policy}: {kept}; {sizes}{staged}"


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


def _shared_ledger(
    model: Mapping[str, Any], n_packed: int, setup: Setup, device_bytes: int, host_bytes: int
) -> Ledger | None:
    """The ledger of both branches behind their common prefix; None where they do not fit."""
    packed = setup.model_copy(update={"several_blocks": True, "n_scored": 2 * setup.n_scored})
    try:
        return choose_plan(model, n_packed, packed, device_bytes=device_bytes, host_bytes=host_bytes)[1]
    except UserError:
        return None


def plan_branches(
    model: Mapping[str, Any],
    simpo: SimpoConfig,
    setup: Setup,
    alone: Ledger,
    *,
    n_gpus: int,
    n_shared: int,
    device_bytes: int,
    host_bytes: int,
) -> BranchPlan:
    """Deals the pairs of a step, both branches as long as `alone`'s, to the GPUs as the preference stage does.

    Raises:
        UserError: the configured plan cannot be run on so many GPUs, or both branches do not fit behind their prefix.
    """
    n_tokens, n_scored = alone.n_tokens, setup.n_scored
    if n_shared >= n_tokens:
        raise UserError(f"a common prefix of {n_shared:,} tokens leaves nothing to compare", where="--shared")
    if simpo.plan == "parallel" and n_gpus % 2:
        raise UserError("plan parallel needs two GPUs a pair", where="--gpus", fix='or simpo.plan = "auto"')
    cost = cost_model(model, recomputes=True, in_blocks=True)
    branch, tail = cost.branch(n_tokens, n_scored), n_tokens - n_shared
    packed, shared = None, None
    if simpo.plan in ("auto", "shared_prefix"):
        packed = _shared_ledger(model, n_tokens + tail, setup, device_bytes, host_bytes)
        shared = cost.packed(n_shared, tail, tail, 2 * n_scored).total if packed else None
        if packed is None and simpo.plan == "shared_prefix":
            raise UserError(
                f"both branches behind their prefix, {n_tokens + tail:,} tokens, do not fit",
                where="simpo.plan",
                fix='use "auto"',
            )
    dealt = deal([PairCost(branch, branch, shared)] * simpo.accumulation, simpo.plan, n_gpus, balanced=simpo.balanced)
    work: list[Counter[str]] = [Counter() for _ in range(n_gpus)]
    ledgers = [[alone] for _ in range(n_gpus)]
    for placed in dealt.placed:
        if placed.mode == "split":
            work[placed.chosen_rank]["the chosen branch"] += 1
            work[placed.rejected_rank]["the rejected branch"] += 1
        elif placed.mode == "whole":
            work[placed.chosen_rank]["both branches, one after the other,"] += 1
        else:
            way = "behind their common prefix" if n_shared else "packed into one pass"
            work[placed.chosen_rank][f"both branches, {way},"] += 1
            ledgers[placed.chosen_rank].append(packed or alone)
    cards = tuple(
        CardPlan(
            card=rank,
            work=tuple(f"{what} of {count} pair(s)" for what, count in work[rank].items()),
            busy_share=dealt.busy_R[rank] / dealt.end,
            peak_device_bytes=max(ledger.peak_device_bytes for ledger in ledgers[rank]),
            host_bytes=max(ledger.host_bytes for ledger in ledgers[rank]),
        )
        for rank in range(n_gpus)
    )
    in_order = sorted(dealt.placed, key=lambda placed: placed.place)
    return BranchPlan(plans=tuple(PLAN_OF[placed.mode] for placed in in_order), n_shared=n_shared, cards=cards)


def plan_memory(
    config: RunConfig,
    device_gib: float,
    host_gib: float,
    n_gpus: int = 1,
    *,
    model: str = "",
    n_tokens: int,
    n_scored: int,
    n_shared: int = 0,
) -> PlanReport:
    """Predicts the memory of the preference stage for one branch, and how a step's pairs are dealt to the GPUs.

    Args:
        host_gib: of all processes together, one a GPU.
        n_shared: tokens that both branches of a pair begin with.

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
        accumulating=config.simpo.accumulation > 1 or n_gpus == 1,
    )
    limits = {"device_bytes": int(device_gib * GIB), "host_bytes": int(host_gib * GIB / n_gpus)}
    plan, ledger = choose_plan(model_config, n_tokens, setup, **limits)
    return PlanReport(
        model=name,
        n_tokens=n_tokens,
        n_scored=n_scored,
        device_limit_bytes=limits["device_bytes"],
        host_limit_bytes=limits["host_bytes"],
        peak_device_bytes=ledger.peak_device_bytes,
        host_bytes=ledger.host_bytes,
        longest_tokens=longest_branch(model_config, setup, **limits),
        policy=policy_text(plan),
        branch_plan=plan_branches(
            model_config, config.simpo, setup, ledger, n_gpus=n_gpus, n_shared=n_shared, **limits
        ),
        ledger=ledger,
    )
