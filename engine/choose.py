"""Choosing what to keep: the `auto` policy, and the longest branch that fits. Pure arithmetic on `engine.memory`.

Worth per byte, in operations saved by keeping one byte (Qwen3-8B shape, 64K tokens): attention output 64 k, layer
input 40 k, then q|k|v, mid and gate|up 4 k each. So: inputs and attention outputs on the host first, then mid and
q|k|v (their copies overlap with compute), then the wide MLP projections: in what device memory is left, and on the
host for one layer in three of long branches, which is as much as a PCIe link carries beside the rest. What a small host
has no room for stays on the device, last layers first, or is computed again, whichever is less work. Where not even the
smallest tiles and groups of heads fit the device, q|k|v of the layer at work are staged through the host as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.memory import GIB, Ledger, Setup, dimensions, host_bytes_of, predict
from engine.plan import LayerPlan, MemoryPlan, Place, PolicyName, uniform_plan
from schemas.errors import UserError


class Budget(NamedTuple):
    """What one rank may use."""

    device_bytes: int
    host_bytes: int


class Sizes(NamedTuple):
    """Tile tokens, groups of key-value heads, and whether q, k, v are staged through the host."""

    tile_tokens: int
    head_groups: int
    staged_qkv: bool = False


SIZES = (
    *(Sizes(8192, groups) for groups in (1, 2, 4, 8)),
    *(Sizes(tile, 8) for tile in (4096, 2048)),
    *(Sizes(tile, 8, staged_qkv=True) for tile in (8192, 4096, 2048)),
)
"""From fastest to smallest."""
MAX_TILE_BUFFERS = 8
BULK_OFFLOAD_TOKENS = 32_768  # from here on a layer computes long enough to hide its wide projections' copies
BULK_OFFLOAD_STRIDE = 3
DEVICE_WORTH = 0.8  # of the operations computed again: what keeping inputs and attention on the device is to bring
ALLOCATOR_SHARE = 0.97  # of the device memory allowed; the rest is for what the allocator cannot use (measured: 1.5 %)
SEARCHED_TOKENS = 2**24  # longer branches are not looked for
LENGTH_STEP_TOKENS = 1024  # `longest_branch` answers in multiples of this


def _n_layers(config: Mapping[str, Any]) -> int:
    return config["num_hidden_layers"]


def sized_plans(config: Mapping[str, Any], n_tokens: int, policy: PolicyName) -> list[MemoryPlan]:
    """The policy on every layer, in every size that the model's heads allow, fastest first."""
    key_heads = config.get("num_key_value_heads") or config["num_attention_heads"]

    def dividing(most: int) -> int:
        """The most groups, up to `most`, that the key heads fall into evenly."""
        return next(groups for groups in range(min(most, key_heads), 0, -1) if key_heads % groups == 0)

    sizes = dict.fromkeys(size._replace(head_groups=dividing(size.head_groups)) for size in SIZES)
    return [
        uniform_plan(
            policy, _n_layers(config), tile_tokens=min(tile_tokens, n_tokens), head_groups=groups, staged_qkv=staged_qkv
        )
        for tile_tokens, groups, staged_qkv in sizes
    ]


def _with_layers(plan: MemoryPlan, layers: list[LayerPlan]) -> MemoryPlan:
    return plan.model_copy(update={"policy": "auto", "layers": tuple(layers)})


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest count in 0..limit for which `fits` holds, given that it holds below whenever it holds above."""
    if fits(limit):  # short branches keep all: one question then, in place of one for every halving
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _sparse_layers(n_layers: int, stride: int, n_attention: int, n_on_device: int = 0) -> list[LayerPlan]:
    """Inputs of every `stride`-th layer and `n_attention` attention outputs, the dropped ones spread over the runs.

    They are on the host, of the last `n_on_device` layers on the device: backward frees those first.
    """
    kept = set(sorted(range(n_layers), key=lambda i: -(i % stride))[:n_attention])
    places: list[Place] = ["host" if i < n_layers - n_on_device else "device" for i in range(n_layers)]
    return [
        LayerPlan(input=place if i % stride == 0 else "recompute", attention=place if i in kept else "recompute")
        for i, place in enumerate(places)
    ]


def _sparse(
    config: Mapping[str, Any],
    n_tokens: int,
    plan: MemoryPlan,
    setup: Setup,
    budget: Budget,
    *,
    on_device: bool,
    least: bool = False,
) -> tuple[int, MemoryPlan] | None:
    """The cheapest plan that drops inputs and attention outputs until the rest fits, with its cost in operations a
    token: restoring an input 2 (D Hq E + 3 D F) (o_proj and MLP), an attention output 2 T Hq E. None: none fits.

    Args:
        on_device: what the host has no room for may stay on the device.
        least: any plan that fits will do.
    """
    sizes, n_layers = dimensions(config, setup), _n_layers(config)
    attention_cost = 2 * n_tokens * sizes.query_size
    input_cost = 2 * sizes.hidden_size * (sizes.query_size + 3 * sizes.mlp_size)
    best: tuple[int, MemoryPlan] | None = None
    for stride in range(1, n_layers + 1):
        if on_device and n_layers % stride:
            continue  # a search in two directions: fewer of them

        def candidate(n_attention: int, stride: int = stride) -> MemoryPlan:
            """With as many layers' on the host as fit there."""

            def layers(n_on_host: int) -> MemoryPlan:
                return _with_layers(plan, _sparse_layers(n_layers, stride, n_attention, n_layers - n_on_host))

            def fits(n_on_host: int) -> bool:
                return host_bytes_of(config, n_tokens, layers(n_on_host), setup) <= budget.host_bytes

            return layers(_most(n_layers, fits) if on_device else n_layers)

        def fits(n_attention: int, candidate: Callable[[int], MemoryPlan] = candidate) -> bool:
            return _fits(config, n_tokens, candidate(n_attention), setup, budget)

        n_restored = n_layers - -(-n_layers // stride)
        if best is not None and input_cost * n_restored >= best[0]:
            break  # longer strides restore more inputs still
        if not fits(0):
            continue
        if least:
            return 0, candidate(0)
        chosen = candidate(_most(n_layers, fits))
        cost = attention_cost * sum(layer.attention == "recompute" for layer in chosen.layers)
        cost += input_cost * sum(layer.input == "recompute" for layer in chosen.layers)
        if best is None or cost < best[0]:
            best = cost, chosen
    return best


def _within(
    config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, budget: Budget
) -> MemoryPlan | None:
    """The plan where it fits, or the one that computes least again of those that do, or None.

    What the host has no room for stays on the device where that saves a good part; a little it is not worth, since
    buffers for tiles and the wide projections need that memory as well.
    """
    if _fits(config, n_tokens, plan, setup, budget):
        return plan
    on_host = _sparse(config, n_tokens, plan, setup, budget, on_device=False)
    on_both = _sparse(config, n_tokens, plan, setup, budget, on_device=True)
    if on_both is not None and (on_host is None or on_both[0] < DEVICE_WORTH * on_host[0]):
        return on_both[1]
    return on_host[1] if on_host is not None else None


def _fits(config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, budget: Budget) -> bool:
    if host_bytes_of(config, n_tokens, plan, setup) > budget.host_bytes:
        return False
    return predict(config, n_tokens, plan, setup).peak_device_bytes <= budget.device_bytes


def _kept_on(plan: MemoryPlan, field: str, place: str, layers: Sequence[int]) -> MemoryPlan:
    chosen = set(layers)
    return _with_layers(
        plan, [layer.model_copy(update={field: place}) if i in chosen else layer for i, layer in enumerate(plan.layers)]
    )


def _with_tile_buffers(
    config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, budget: Budget
) -> MemoryPlan:
    """The plan with as many buffers for tiles from the host as fit, up to one for every tile of the branch."""
    n_tiles = -(-n_tokens // plan.tile_tokens)

    def more(count: int) -> MemoryPlan:
        return plan.model_copy(update={"tile_buffers": plan.tile_buffers + count})

    def fits(count: int) -> bool:
        return _fits(config, n_tokens, more(count), setup, budget)

    return more(_most(max(0, min(n_tiles, MAX_TILE_BUFFERS) - plan.tile_buffers), fits))


def _filled(config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, budget: Budget) -> MemoryPlan:
    """The plan with as much more kept as fits; on the device last layers first, since backward frees those first."""

    def most_kept(base: MemoryPlan, field: str, place: str, order: Sequence[int]) -> MemoryPlan:
        def fits(count: int) -> bool:
            return _fits(config, n_tokens, _kept_on(base, field, place, order[:count]), setup, budget)

        return _kept_on(base, field, place, order[: _most(len(order), fits)])

    last_first = list(reversed(range(len(plan.layers))))
    plan = most_kept(plan, "mid", "host", last_first)
    plan = most_kept(plan, "qkv", "host", last_first)
    plan = _with_tile_buffers(config, n_tokens, plan, setup, budget)
    device_only = most_kept(plan, "gate_up", "device", last_first)
    if n_tokens < BULK_OFFLOAD_TOKENS:
        return device_only
    shared = most_kept(plan, "gate_up", "host", range(0, len(plan.layers), BULK_OFFLOAD_STRIDE))
    free = [i for i in last_first if shared.layers[i].gate_up == "recompute"]
    shared = most_kept(shared, "gate_up", "device", free)
    return max(device_only, shared, key=lambda p: sum(layer.gate_up != "recompute" for layer in p.layers))


def _bases(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> Iterator[MemoryPlan]:
    """Plans with all on the host, in every size whose device part fits, fastest first."""
    for base in sized_plans(config, n_tokens, "attention_offload"):
        if predict(config, n_tokens, base, setup).peak_device_bytes <= budget.device_bytes:
            yield base


def _plan(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> MemoryPlan | None:
    found = (_within(config, n_tokens, base, setup, budget) for base in _bases(config, n_tokens, setup, budget))
    return next((plan for plan in found if plan is not None), None)


def _exists(config: Mapping[str, Any], n_tokens: int, setup: Setup, budget: Budget) -> bool:
    """Whether there is a plan."""
    return any(
        _sparse(config, n_tokens, base, setup, budget, on_device=on_device, least=True) is not None
        for base in _bases(config, n_tokens, setup, budget)
        for on_device in (False, True)
    )


def longest_branch(config: Mapping[str, Any], setup: Setup, *, device_bytes: int, host_bytes: int) -> int:
    """The longest branch in tokens (a multiple of 1,024) that some plan fits; 0 when none does."""
    budget, limit = Budget(int(device_bytes * ALLOCATOR_SHARE), host_bytes), 1
    while limit < SEARCHED_TOKENS // LENGTH_STEP_TOKENS and _exists(config, limit * LENGTH_STEP_TOKENS, setup, budget):
        limit *= 2
    return LENGTH_STEP_TOKENS * _most(limit, lambda n: n == 0 or _exists(config, n * LENGTH_STEP_TOKENS, setup, budget))


def _gib(n_bytes: float) -> str:
    """Three digits; whole and grouped from a hundred on, where .3g would turn to powers of ten."""
    gib = n_bytes / GIB
    return f"{gib:.3g}" if gib < 99.95 else f"{gib:,.0f}"


def _longest_text(config: Mapping[str, Any], setup: Setup, longest_tokens: int) -> str:
    if longest_tokens:
        at_least = "at least " if longest_tokens >= SEARCHED_TOKENS else ""
        return f"the longest that fits is {at_least}{longest_tokens:,} tokens"
    smallest = sized_plans(config, LENGTH_STEP_TOKENS, "layer_offload")[-1]
    ledger = predict(config, LENGTH_STEP_TOKENS, smallest, setup)
    return (
        f"{LENGTH_STEP_TOKENS:,} tokens take {_gib(ledger.peak_device_bytes / ALLOCATOR_SHARE)} GiB on the device, "
        f"{_gib(ledger.device_bytes_of('static'))} of it for weights and optimiser, and {_gib(ledger.host_bytes)} on "
        "the host"
    )


def choose_plan(
    config: Mapping[str, Any], n_tokens: int, setup: Setup, *, device_bytes: int, host_bytes: int
) -> tuple[MemoryPlan, Ledger]:
    """The `auto` policy for a branch of n_tokens; UserError, with the longest that would fit, when nothing does."""
    budget = Budget(int(device_bytes * ALLOCATOR_SHARE), host_bytes)
    plan = _plan(config, n_tokens, setup, budget)
    if plan is None:
        longest = longest_branch(config, setup, device_bytes=device_bytes, host_bytes=host_bytes)
        raise UserError(
            f"a branch of {n_tokens:,} tokens does not fit {_gib(device_bytes)} GiB on the device and "
            f"{_gib(host_bytes)} GiB on the host",
            fix=_longest_text(config, setup, longest),
        )
    plan = _filled(config, n_tokens, plan, setup, budget)
    return plan, predict(config, n_tokens, plan, setup)
