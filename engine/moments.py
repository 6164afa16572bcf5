"""Device bytes of the moments of a walk that never coincide, by component, beside what is static or kept.

They are the forward of a layer, the head, attention computed again before a layer's backward, the two halves of that
backward, and its attention in the last layer where only windows of it are queries. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention_memory import attention_workspace_bytes, math_workspace_bytes
from engine.plan import FIELDS, Dimensions, MemoryPlan
from engine.segments import WINDOWS_SHARE

if TYPE_CHECKING:
    from engine.memory import Setup

_MID_RING_TILES = 3
INT8_ROWS = 256  # rows of an int8 weight that are in float32 at once
SUM_ROWS = 1024  # rows of a block's results that are added to others at once


def _matrices_bytes(sizes: Dimensions) -> int:
    hidden, mlp, query = sizes.hidden_size, sizes.mlp_size, sizes.query_size
    shapes = [
        (sizes.qkv_size, hidden, sizes.extra_qkv), (hidden, query, sizes.extra_out),
        (2 * mlp, hidden, sizes.extra_gate_up), (hidden, mlp, sizes.extra_down),
    ]  # fmt: skip
    return sum((n_out + extra) * (n_in + extra) for n_out, n_in, extra in shapes) * sizes.itemsize


def moments_of(sizes: Dimensions, plan: MemoryPlan, setup: Setup, n_tokens: int) -> dict[str, dict[str, int]]:
    """Device bytes of a branch of n_tokens: by moment, then by component."""
    unit, hidden = sizes.itemsize, sizes.hidden_size
    rows = min(plan.tile_tokens, n_tokens)
    n_tiles = -(-n_tokens // plan.tile_tokens)
    heads, key_heads = sizes.n_query_heads // plan.head_groups, sizes.n_key_heads // plan.head_groups
    group_tokens = n_tokens * sizes.head_size * unit  # one head of all tokens
    tile = {
        "normed": hidden + max(sizes.extra_qkv, sizes.extra_gate_up),
        "gate and up": 2 * sizes.mlp_size + sizes.extra_gate_up,
        "MLP hidden": sizes.mlp_size + sizes.extra_down,
        "attended": sizes.query_size + sizes.extra_out,
        "mid ring": min(_MID_RING_TILES, n_tiles) * hidden,
    }
    workspace = {
        "dense weights of one layer": _matrices_bytes(sizes),
        "packed q|k|v": (rows if plan.staged_qkv else n_tokens) * (sizes.qkv_size + sizes.extra_qkv) * unit,
        "tiles": rows * sum(tile.values()) * unit,
        "RoPE tables": n_tokens * sizes.head_size * sizes.sum_itemsize,
    }
    output_and_grad = hidden + max(sizes.extra_out, sizes.extra_down)
    on_host = {field: any(getattr(layer, field) == "host" for layer in plan.layers) for field in FIELDS}
    again = plan.scratch_attention > 0 and on_host["input"]
    first = max(hidden * on_host["mid"], hidden * on_host["input"] + sizes.query_size * (on_host["attention"] or again))
    if plan.staged_qkv:
        in_flight = min(2, plan.head_groups) * (sizes.qkv_size // plan.head_groups)
        workspace["staged q|k|v"] = (2 * rows * sizes.qkv_size + n_tokens * in_flight) * unit
    if on_host["gate_up"]:
        workspace["gate|up in flight"] = n_tokens * (2 * sizes.mlp_size + sizes.extra_gate_up) * unit
    attended = {
        "attention outputs": n_tokens * sizes.query_size * unit,
        "group q, k, v": group_tokens * (heads + 2 * key_heads),
        "log-sum-exp": n_tokens * sizes.n_query_heads * sizes.sum_itemsize,
    }
    scored = setup.n_scored * hidden * unit
    head = {
        "scored hidden states": 3 * scored,
        "logits of a chunk": min(setup.chunk_positions, setup.n_scored) * sizes.vocab_size * (2 * sizes.sum_itemsize),
    }
    staged_groups = min(2, plan.head_groups) * (on_host["attention"] or again)
    backward = {
        "gradient": n_tokens * output_and_grad * unit,
        "tiles from the host": plan.tile_buffers * rows * (first + hidden * on_host["input"]) * unit,
        "group outputs": n_tokens * heads * (sizes.head_size * unit + sizes.sum_itemsize) * staged_groups,
    }
    backward_mlp = backward | {"gradient of normed": rows * hidden * unit}
    backward_attention = backward | {
        "group q, k, v": group_tokens * (heads + 2 * key_heads),
        "group gradients": group_tokens * (2 * heads + 2 * key_heads),
        "attention workspace": attention_workspace_bytes(
            n_tokens, heads, key_heads, sizes.head_size, ordered_on=setup.ordered_on
        )
        if unit == 2
        else math_workspace_bytes(n_tokens, heads, sizes.head_size, unit, n_blocks=2),
    }
    if unit != 2:  # fused kernels, which take 16-bit numbers only, need none in forward
        attended["attention workspace"] = math_workspace_bytes(n_tokens, heads, sizes.head_size, unit, n_blocks=1)
    if setup.several_blocks:
        # Beside a group's results those of one block from one range of keys, up to all tokens (a pack of one long row,
        # a second tail much longer than the first branch). They are added to the others in float32, by rows, with five
        # log-sum-exps; dk and dv of all tokens are summed in float32.
        part = group_tokens * heads
        lse = n_tokens * heads * sizes.sum_itemsize
        added = 2 * min(SUM_ROWS, n_tokens) * heads * sizes.head_size * sizes.sum_itemsize
        attended |= {"block outputs": part + 5 * lse + added}
        key_sums = n_tokens * 2 * key_heads * sizes.head_size * sizes.sum_itemsize
        backward_attention |= {"block gradients": part + lse + key_sums}
    moments = {"backward_mlp": backward_mlp, "backward_attention": backward_attention}
    n_queries = n_tokens if setup.n_last_rows is None else min(setup.n_last_rows, n_tokens)
    if not setup.several_blocks and (setup.n_last_rows is None or n_queries <= WINDOWS_SHARE * n_tokens):
        # The last layer's attention where its queries are windows: in blocks, each of which may have all keys. One
        # block's dq, dk and dv stand beside those of all, and dk and dv of all are sums in float32.
        n_queries = min(n_queries, int(WINDOWS_SHARE * n_tokens))
        per_query, of_keys = sizes.head_size * unit * heads, group_tokens * 2 * key_heads
        moments["backward_windows"] = backward_attention | {
            "gradient": n_queries * output_and_grad * unit,
            "group gradients": group_tokens * heads + n_queries * per_query,
            "block gradients": n_queries * (per_query + heads * sizes.sum_itemsize)
            + of_keys
            + of_keys * sizes.sum_itemsize // unit,
        }
        if unit == 2:
            moments["backward_windows"]["attention workspace"] = attention_workspace_bytes(
                n_tokens, heads, key_heads, sizes.head_size, n_queries=n_queries, ordered_on=setup.ordered_on
            )
    moments["forward"] = attended | {"hidden states": n_tokens * hidden * unit}
    if any(layer.attention == "recompute" for layer in plan.layers):
        in_flight = n_tokens * heads * sizes.head_size * unit * min(2, plan.head_groups)
        moments["backward_restore"] = attended | backward | {"attention outputs": in_flight}
    moments = {name: workspace | amounts for name, amounts in moments.items()}
    if setup.base == "nf4":
        moments["forward"]["dequantisation"] = hidden * max(sizes.mlp_size, sizes.query_size) * 2
    if setup.base == "int8":  # codes and products in float32, when a layer's weights are loaded
        for name in moments.keys() - {"backward_attention", "backward_windows"}:
            moments[name]["dequantisation"] = INT8_ROWS * max(hidden, sizes.mlp_size, sizes.query_size) * 2 * 4
    return moments | {"head": head}
