"""Choosing what to keep: the `auto` policy, and the longest branch that fits. Pure arithmetic on `engine.memory`.

Worth per byte, in operations saved by keeping one byte (Qwen3-8B shape, 64K tokens): attention output 64 k, layer
input 40 k, then q|k|v, mid and gate|up 4 k each. So: inputs and attention outputs on the host first, then mid and
q|k|v (their copies overlap with compute), then the wide MLP projections: in what device memory is left, and on the
host for one layer in three of long branches, which is as much as a PCIe link carries beside the rest. Where not even
the smallest tiles and groups of heads fit the device, q|k|v of the layer at work are staged through the host as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.memory import GIB, Ledger, Setup, dimensions, host_bytes_of, predict
from engine.plan import LayerPlan, MemoryPlan, PolicyName, uniform_plan
from schemas.errors import UserError


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
ALLOCATOR_SHARE = 0.97  # of the device memory allowed; the rest is for what the allocator cannot use (measured: 1.5 %)
LENGTH_STEP_TOKENS = 1024  # `longest_branch` answers in multiples of this


def _n_layers(config: Mapping[str, Any]) -> int:
    return config["num_hidden_layers"]


def sized_plans(config: Mapping[str, Any], n_tokens: int, policy: PolicyName) -> list[MemoryPlan]:
    """The policy on every layer, in every size that the model's heads allow, fastest first."""
    key_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return [
        uniform_plan(
            policy, _n_layers(config), tile_tokens=min(tile_tokens, n_tokens), head_groups=min(groups, key_heads),
            staged_qkv=staged_qkv,
        )
        for tile_tokens, groups, staged_qkv in SIZES
        if key_heads % min(groups, key_heads) == 0
    ]  # fmt: skip


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


def _sparse_layers(n_layers: int, stride: int, n_attention: int) -> list[LayerPlan]:
    """Inputs of every `stride`-th layer and `n_attention` attention outputs, the dropped ones spread over the runs."""
    kept = set(sorted(range(n_layers), key=lambda i: -(i % stride))[:n_attention])
    return [
        LayerPlan(input="host" if i % stride == 0 else "recompute", attention="host" if i in kept else "recompute")
        for i in range(n_layers)
    ]


def _within_host(
    config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, host_bytes: int
) -> MemoryPlan | None:
    """The plan, or the one that recomputes least among those whose host part fits, or None.

    Operations a token: restoring an input 2 (D Hq E + 3 D F) (o_proj and MLP), an attention output 2 T Hq E.
    """
    if host_bytes_of(config, n_tokens, plan, setup) <= host_bytes:
        return plan
    sizes, n_layers = dimensions(config, setup), _n_layers(config)
    attention_cost = 2 * n_tokens * sizes.query_size
    input_cost = 2 * sizes.hidden_size * (sizes.query_size + 3 * sizes.mlp_size)
    best: tuple[int, MemoryPlan] | None = None
    for stride in range(1, n_layers + 1):

        def candidate(n_attention: int, stride: int = stride) -> MemoryPlan:
            return _with_layers(plan, _sparse_layers(n_layers, stride, n_attention))

        def fits(n_attention: int, candidate: Callable[[int], MemoryPlan] = candidate) -> bool:
            return host_bytes_of(config, n_tokens, candidate(n_attention), setup) <= host_bytes

        n_restored = n_layers - -(-n_layers // stride)
        if best is not None and input_cost * n_restored >= best[0]:
            break  # longer strides restore more inputs still
        if not fits(0):
            continue
        chosen = candidate(_most(n_layers, fits))
        cost = attention_cost * sum(layer.attention == "recompute" for layer in chosen.layers)
        cost += input_cost * sum(layer.input == "recompute" for layer in chosen.layers)
        if best is None or cost < best[0]:
            best = cost, chosen
    return best[1] if best else None


def _kept_on(plan: MemoryPlan, field: str, place: str, layers: Sequence[int]) -> MemoryPlan:
    chosen = set(layers)
    return _with_layers(
        plan, [layer.model_copy(update={field: place}) if i in chosen else layer for i, layer in enumerate(plan.layers)]
    )


def _with_tile_buffers(
    config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, device_bytes: int
) -> MemoryPlan:
    """The plan with as many buffers for tiles from the host as fit, up to one for every tile of the branch."""
    n_tiles = -(-n_tokens // plan.tile_tokens)

    def more(count: int) -> MemoryPlan:
        return plan.model_copy(update={"tile_buffers": plan.tile_buffers + count})

    def fits(count: int) -> bool:
        return predict(config, n_tokens, more(count), setup).peak_device_bytes <= device_bytes

    return more(_most(max(0, min(n_tiles, MAX_TILE_BUFFERS) - plan.tile_buffers), fits))


def _filled(
    config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, device_bytes: int, host_bytes: int
) -> MemoryPlan:
    """The plan with as much more kept as fits; on the device last layers first, since backward frees those first."""

    def most_kept(base: MemoryPlan, field: str, place: str, order: Sequence[int]) -> MemoryPlan:
        def fits(count: int) -> bool:
            ledger = predict(config, n_tokens, _kept_on(base, field, place, order[:count]), setup)
            return ledger.peak_device_bytes <= device_bytes and ledger.host_bytes <= host_bytes

        return _kept_on(base, field, place, order[: _most(len(order), fits)])

    last_first = list(reversed(range(len(plan.layers))))
    plan = most_kept(plan, "mid", "host", last_first)
    plan = most_kept(plan, "qkv", "host", last_first)
    plan = _with_tile_buffers(config, n_tokens, plan, setup, device_bytes)
    device_only = most_kept(plan, "gate_up", "device", last_first)
    if n_tokens < BULK_OFFLOAD_TOKENS:
        return device_only
    shared = most_kept(plan, "gate_up", "host", range(0, len(plan.layers), BULK_OFFLOAD_STRIDE))
    free = [i for i in last_first if shared.layers[i].gate_up == "recompute"]
    shared = most_kept(shared, "gate_up", "device", free)
    return max(device_only, shared, key=lambda p: sum(layer.gate_up != "recompute" for layer in p.layers))


def _plan(
    config: Mapping[str, Any], n_tokens: int, setup: Setup, device_bytes: int, host_bytes: int
) -> MemoryPlan | None:
    for base in sized_plans(config, n_tokens, "attention_offload"):
        if predict(config, n_tokens, base, setup).peak_device_bytes > device_bytes:
            continue
        plan = _within_host(config, n_tokens, base, setup, host_bytes)
        if plan is not None and predict(config, n_tokens, plan, setup).peak_device_bytes <= device_bytes:
            return plan
    return None


def longest_branch(config: Mapping[str, Any], setup: Setup, *, device_bytes: int, host_bytes: int) -> int:
    """The longest branch in tokens (a multiple of 1,024) that some plan fits; 0 when none does."""
    device_bytes, limit = int(device_bytes * ALLOCATOR_SHARE), 1
    while limit < 2**14 and _plan(config, limit * LENGTH_STEP_TOKENS, setup, device_bytes, host_bytes) is not None:
        limit *= 2
    return LENGTH_STEP_TOKENS * _most(
        limit,
        lambda n: n == 0 or _plan(config, n * LENGTH_STEP_TOKENS, setup, device_bytes, host_bytes) is not None,
    )


def choose_plan(
    config: Mapping[str, Any], n_tokens: int, setup: Setup, *, device_bytes: int, host_bytes: int
) -> tuple[MemoryPlan, Ledger]:
    """The `auto` policy for a branch of n_tokens; UserError, with the longest that would fit, when nothing does."""
    allowed_bytes, device_bytes = device_bytes, int(device_bytes * ALLOCATOR_SHARE)
    plan = _plan(config, n_tokens, setup, device_bytes, host_bytes)
    if plan is None:
        longest = longest_branch(config, setup, device_bytes=allowed_bytes, host_bytes=host_bytes)
        raise UserError(
            f"a branch of {n_tokens:,} tokens does not fit {allowed_bytes / GIB:.1f} GiB on the device and "
            f"{host_bytes / GIB:.1f} GiB on the host",
            fix=f"the longest that fits is {longest:,} tokens",
        )
    plan = _filled(config, n_tokens, plan, setup, device_bytes, host_bytes)
    return plan, predict(config, n_tokens, plan, setup)
