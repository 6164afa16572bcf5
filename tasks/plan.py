"""`traceforge plan`: what a branch of a given length needs, component by component, before anything is loaded."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.budget import memory_setup, rope_by_length
from engine.choose import SEARCHED_TOKENS, choose_plan, longest_branch
from engine.cost import cost_model
from engine.deal import PairCost, deal
from engine.memory import GIB, Ledger, Setup
from engine.plan import FIELDS, MemoryPlan
from schemas.base import LARGEST, Frozen, Section
from schemas.config import RunConfig
from schemas.errors import UserError
from schemas.training import SimpoConfig
from tasks.model_shape import SHAPES as SHAPES
from tasks.model_shape import ModelShape, read_shape
from tasks.plan_engine import check_engine
from tasks.positions import trained_positions

DEVICE_GIB: Final = 23.5
HOST_GIB: Final = 64.0
"""Planned for where neither the command line nor the configuration says how much there is."""

SCORED_TOKENS: Final = 4096
"""Planned for where the command line does not say how many, of a branch that is long enough."""

MAX_DEALT_PAIRS: Final = 128
"""Of a step: all pairs of a plan are equal, so that more would be dealt in the same way again."""

MULTIPROCESSORS: Final = 192
"""Of the GPU, where sums have a fixed order: more of them take more memory, and no GPU of today has more than these."""

BranchPlanName = Literal["parallel", "sequential", "shared_prefix"]
PLAN_OF: Final[Mapping[str, BranchPlanName]] = {"split": "parallel", "whole": "sequential", "shared": "shared_prefix"}


class PlanRequest(Section):
    """What to plan for. The fields are the options of the command line."""

    tokens: int = Field(ge=2, description="length of the branch")
    scored: int = Field(ge=1, description="how many of them are scored")
    shared: int = Field(default=0, ge=0, description="tokens that both branches of a pair begin with")
    gpu_gib: float = Field(gt=0, le=4096, description="memory of one GPU that may be used")
    host_gib: float = Field(gt=0, le=65_536, description="of all processes together, one a GPU")
    gpus: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def _within_the_branch(self) -> Self:
        if self.scored >= self.tokens:
            raise ValueError(f"--scored {self.scored:,} of --tokens {self.tokens:,}: the first token is never scored")
        if self.shared >= self.tokens:
            raise ValueError(f"--shared {self.shared:,} of --tokens {self.tokens:,} leaves nothing to compare")
        return self


def plan_request(config: RunConfig, **options: float | None) -> PlanRequest:
    """The options as they were given, memory that was not from the configuration.

    Raises:
        UserError: a value that nothing can be planned for.
    """
    given = {name: value for name, value in options.items() if value is not None}
    base = config.model
    known = {"gpu_gib": base.gpu_gib or DEVICE_GIB, "host_gib": base.host_gib or HOST_GIB}
    known["scored"] = max(1, min(SCORED_TOKENS, int(given.get("tokens", SCORED_TOKENS)) - 1))
    try:
        return PlanRequest.model_validate(known | given)
    except ValidationError as error:
        problem = error.errors()[0]
        said = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            raise UserError(said) from error
        name = str(problem["loc"][0])
        where = f"--{name.replace('_', '-')}" if name in given else f"model.{name}"
        raise UserError(f"{said.lower()}, got {problem['input']!r}", where=where) from error


class CardPlan(Frozen):
    """What one GPU does in an optimiser step, and how much of its memory that takes at most."""

    card: int
    work: tuple[str, ...]
    busy_share: float = Field(description="of the step's predicted time")
    peak_device_bytes: int
    host_bytes: int


class BranchPlan(Frozen):
    """How the pairs of one optimiser step are worked on, by predicted cost."""

    n_pairs: int = Field(description="of a step")
    plans: tuple[BranchPlanName, ...] = Field(description=f"that of each pair, of the first {MAX_DEALT_PAIRS} at most")
    n_shared: int = Field(description="tokens of the common prefix that were assumed")
    cards: tuple[CardPlan, ...]

    def text(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(self.plans).items()))
        dealt = f", the first {len(self.plans)} of them" if len(self.plans) < self.n_pairs else ""
        lines = [f"branch plan of a step of {self.n_pairs:,} pair(s){dealt}: {counts}"]
        for card in self.cards:
            if not card.work:
                lines.append(f"  GPU {card.card}: nothing of this step")
                continue
            took = f"{card.peak_device_bytes / GIB:.2f} GiB on it, {card.host_bytes / GIB:.2f} GiB of the host"
            lines.append(f"  GPU {card.card}: {'; '.join(card.work)} (busy {card.busy_share:.0%}, {took})")
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
    longest_tokens: int = Field(
        description="the longest branch that fits the same limits, within a window of the model, as far as was searched"
    )
    engine: str = Field(description="that the stage runs on a GPU, and why")
    policy: str
    branch_plan: BranchPlan
    ledger: Ledger
    trained_positions: int | None = Field(description="of the model, where its config.json names them")

    def text(self) -> str:
        trained, beyond = self.trained_positions, ""
        if trained is not None and self.n_tokens > trained:
            beyond = f"\nthe model was trained on {trained:,} positions: its rope_scaling may extend them"
        bound = "at least " if self.longest_tokens >= SEARCHED_TOKENS else ""
        return (
            f"{self.ledger.table()}\n\n{self.model}: a branch of {self.n_tokens:,} tokens, {self.n_scored:,} of them "
            f"scored, peaks at {self.peak_device_bytes / GIB:.2f} GiB on the device and {self.host_bytes / GIB:.2f} "
            f"GiB on the host;\nthe longest that fits is {bound}{self.longest_tokens:,} tokens\nengine {self.engine}\n"
            f"{self.policy}\n{self.branch_plan.text()}{beyond}"
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


def _shared_ledger(
    model: Mapping[str, Any], n_packed: int, setup: Setup, device_bytes: int, host_bytes: int
) -> Ledger | None:
    """The ledger of both branches behind their common prefix; None where they do not fit."""
    try:
        return choose_plan(model, n_packed, setup.in_blocks(), device_bytes=device_bytes, host_bytes=host_bytes)[1]
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
    undivided: str | None,
    device_bytes: int,
    host_bytes: int,
) -> BranchPlan:
    """Deals the pairs of a step, both branches as long as `alone`'s, to the GPUs as the preference stage does.

    Args:
        undivided: what keeps both branches of a pair from one pass; None: nothing.

    Raises:
        UserError: the configured plan cannot be run on so many GPUs, or both branches do not fit behind their prefix.
    """
    n_tokens, n_scored = alone.n_tokens, setup.n_scored
    if simpo.plan == "parallel" and n_gpus % 2:
        raise UserError("plan parallel needs two GPUs a pair", where="--gpus", fix='or simpo.plan = "auto"')
    if simpo.plan == "shared_prefix" and undivided:
        raise UserError(f"plan shared_prefix is not possible: {undivided}", where="simpo.plan", fix='use "auto"')
    cost = cost_model(model, recomputes=True, in_blocks=True)
    branch, tail = cost.branch(n_tokens, n_scored), n_tokens - n_shared
    packed, shared = None, None
    if simpo.plan in ("auto", "shared_prefix") and not undivided:
        packed = _shared_ledger(model, n_tokens + tail, setup, device_bytes, host_bytes)
        shared = cost.packed(n_shared, tail, tail, 2 * n_scored) if packed else None
        if packed is None and simpo.plan == "shared_prefix":
            raise UserError(
                f"both branches behind their prefix, {n_tokens + tail:,} tokens, do not fit",
                where="simpo.plan",
                fix='use "auto"',
            )
    n_dealt = min(simpo.accumulation, MAX_DEALT_PAIRS)
    dealt = deal([PairCost(branch, branch, shared)] * n_dealt, simpo.plan, n_gpus, balanced=simpo.balanced)
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
    return BranchPlan(
        n_pairs=simpo.accumulation,
        plans=tuple(PLAN_OF[placed.mode] for placed in in_order),
        n_shared=n_shared,
        cards=cards,
    )


def _undivided(shape: ModelShape) -> str | None:
    """What keeps both branches of a pair from one pass behind their common prefix."""
    if shape.window_tokens is not None:
        return "the model attends within a sliding window"
    if rope_by_length(shape.rope_type):
        return "its rotary embeddings depend on the length"
    return None


def plan_memory(config: RunConfig, asked: PlanRequest, model: str = "") -> PlanReport:
    """Predicts the memory of the preference stage for one branch, and how a step's pairs are dealt to the GPUs.

    Nothing is written, and of the model its config.json alone is read.

    Args:
        model: one of `SHAPES`, or a folder with a config.json; the configuration's own where it is empty.

    Raises:
        UserError: no such model, one that the long-context engine would not train, or the branch does not fit; the
            text says how long one may be.
    """
    name, shape = read_shape(model or config.model.name)
    engine, model_config = check_engine(config, shape, asked.tokens), shape.config()
    setup = memory_setup(
        config.model,
        lora_rank=config.lora.r,
        lora_targets=config.lora.target_modules,
        optimizer=config.simpo.optimizer,
        n_scored=asked.scored,
        accumulating=True,
        n_multiprocessors=MULTIPROCESSORS,
    )
    limits = {"device_bytes": int(asked.gpu_gib * GIB), "host_bytes": int(asked.host_gib * GIB / asked.gpus)}
    plan, ledger = choose_plan(model_config, asked.tokens, setup, **limits)
    longest = max(longest_branch(model_config, setup, **limits), asked.tokens)  # the search goes in steps
    branch_plan = plan_branches(
        model_config, config.simpo, setup, ledger,
        n_gpus=asked.gpus, n_shared=asked.shared, undivided=_undivided(shape), **limits,
    )  # fmt: skip
    return PlanReport(
        model=name,
        n_tokens=asked.tokens,
        n_scored=asked.scored,
        device_limit_bytes=limits["device_bytes"],
        host_limit_bytes=limits["host_bytes"],
        peak_device_bytes=ledger.peak_device_bytes,
        host_bytes=ledger.host_bytes,
        longest_tokens=min(longest, shape.window_tokens or LARGEST),
        engine=engine,
        policy=policy_text(plan),
        branch_plan=branch_plan,
        ledger=ledger,
        trained_positions=trained_positions(model_config),
    )
