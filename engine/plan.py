"""What is kept for backward, where, and in which sizes a walk works: the words shared by the ledger and the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Place = Literal["device", "host", "recompute"]
PolicyName = Literal["none", "mlp", "mlp_attention", "layer", "attention_offload", "layer_offload", "auto"]


class LayerPlan(BaseModel):
    """Where each activation of one layer is between forward and backward ("recompute": nowhere)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Place = "recompute"
    mid: Place = "recompute"  # the residual stream between attention and MLP
    qkv: Place = "recompute"  # raw projections, before per-head norm and RoPE
    attention: Place = "recompute"  # attention output and log-sum-exp
    gate_up: Place = "recompute"  # the MLP's two wide projections


FIELDS = ("input", "attention", "mid", "qkv", "gate_up")

POLICIES: dict[str, LayerPlan] = {
    "none": LayerPlan(input="device", mid="device", qkv="device", attention="device", gate_up="device"),
    "mlp": LayerPlan(input="device", mid="device", qkv="device", attention="device"),
    "mlp_attention": LayerPlan(input="device", attention="device"),
    "layer": LayerPlan(input="device"),
    "attention_offload": LayerPlan(input="host", attention="host"),
    "layer_offload": LayerPlan(input="host"),
}


class MemoryPlan(BaseModel):
    """One layer plan per decoder layer, and the sizes of tiles and head groups.

    A layer whose input is dropped is restored from the nearest kept one before it, through scratch slots. Attention
    outputs computed again on that way wait in scratch for their layer, so no attention is computed more than twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName
    layers: tuple[LayerPlan, ...] = Field(min_length=1)
    tile_tokens: int = Field(ge=1)
    head_groups: int = Field(ge=1, description="groups of key-value heads, attention runs on one group at a time")
    tile_buffers: int = Field(
        default=2,
        ge=2,
        description="device buffers that tiles of inputs, and of mid residuals, come back from the host in; with more "
        "than two they arrive while an attention runs, where the link is idle",
    )
    staged_qkv: bool = Field(
        default=False,
        description="raw q, k, v of the layer at work, and then their gradients, lie on the host, group by group; on "
        "the device are those of the group at work and of the next one",
    )

    @model_validator(mode="after")
    def _consistent(self) -> MemoryPlan:
        if self.layers[0].input == "recompute":
            raise ValueError("the first layer must keep its input: every restoration starts there")
        if self.staged_qkv and any(layer.qkv == "device" for layer in self.layers):
            raise ValueError("q, k, v that are staged through the host are kept there or not at all")
        return self

    @property
    def scratch_inputs(self) -> int:
        """Longest run of dropped layer inputs: restored together, into this many scratch slots."""
        longest = run = 0
        for layer in self.layers[1:]:
            run = run + 1 if layer.input == "recompute" else 0
            longest = max(longest, run)
        return longest

    @property
    def scratch_attention(self) -> int:
        """Most attention outputs computed again within one run of layers that is restored together."""
        most = run = 0
        for layer in self.layers:
            run = (0 if layer.input != "recompute" else run) + (layer.attention == "recompute")
            most = max(most, run)
        return most


def uniform_plan(
    policy: PolicyName, n_layers: int, *, tile_tokens: int, head_groups: int, staged_qkv: bool = False
) -> MemoryPlan:
    """The named policy on every layer ("auto" is made by `engine.choose.choose_plan`)."""
    layers = (POLICIES[policy],) * n_layers
    return MemoryPlan(
        policy=policy, layers=layers, tile_tokens=tile_tokens, head_groups=head_groups, staged_qkv=staged_qkv
    )


class Dimensions(BaseModel):
    """Sizes of one decoder with its adapters, as the walk lays it out. Counts of features unless said otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_layers: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    n_query_heads: int
    n_key_heads: int
    head_size: int
    itemsize: int  # bytes of one activation
    extra_qkv: int  # LoRA (and bias) columns beside q|k|v, padded
    extra_out: int
    extra_gate_up: int
    extra_down: int

    @property
    def query_size(self) -> int:
        return self.n_query_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        return (self.n_query_heads + 2 * self.n_key_heads) * self.head_size

    @property
    def sum_itemsize(self) -> int:
        return max(self.itemsize, 4)


class KeptShape(BaseModel):
    """One tensor kept between forward and backward. `layer` is -1 for scratch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    field: str  # a LayerPlan field, or "lse"
    place: Place
    n_rows: int
    width: int
    itemsize: int

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.width * self.itemsize


def _attention_shapes(sizes: Dimensions, n_groups: int, n_tokens: int, layer: int, place: Place) -> list[KeptShape]:
    heads = sizes.n_query_heads // n_groups
    output = KeptShape(
        layer=layer, field="attention", place=place, n_rows=n_tokens, width=heads * sizes.head_size,
        itemsize=sizes.itemsize,
    )  # fmt: skip
    lse = KeptShape(layer=layer, field="lse", place=place, n_rows=heads, width=n_tokens, itemsize=sizes.sum_itemsize)
    return [output] * n_groups + [lse] * n_groups


def _qkv_shapes(sizes: Dimensions, plan: MemoryPlan, n_tokens: int, layer: int, place: Place) -> list[KeptShape]:
    """One packed tensor, bordered for its LoRA gradients; staged: one for each group of heads, on the host."""
    n_groups = plan.head_groups if plan.staged_qkv else 1
    width = sizes.qkv_size // n_groups if plan.staged_qkv else sizes.qkv_size + sizes.extra_qkv
    shape = KeptShape(layer=layer, field="qkv", place=place, n_rows=n_tokens, width=width, itemsize=sizes.itemsize)
    return [shape] * n_groups


def kept_shapes(
    sizes: Dimensions, plan: MemoryPlan, n_tokens: int, n_last_rows: int | None = None, *, keeps: bool = True
) -> list[KeptShape]:
    """Every tensor the plan keeps for a branch of n_tokens, scratch last. Engine and ledger both read this list.

    The last layer computes n_last_rows rows (None: all) beyond its keys and values, and keeps as many. keeps=False: a
    branch that is only scored, of which nothing is kept; staged q, k, v have their scratch all the same.
    """
    staging = _qkv_shapes(sizes, plan, n_tokens, -1, "host") if plan.staged_qkv else []
    if not keeps:
        return staging
    widths = {
        "input": sizes.hidden_size,
        "mid": sizes.hidden_size,
        "gate_up": 2 * sizes.mlp_size + sizes.extra_gate_up,
    }
    shapes: list[KeptShape] = []
    for index, layer in enumerate(plan.layers):
        n_queries = n_tokens if n_last_rows is None or index + 1 < len(plan.layers) else n_last_rows
        for field, width in widths.items():
            place: Place = getattr(layer, field)
            n_rows = n_tokens if field == "input" else n_queries
            if place != "recompute":
                shapes.append(
                    KeptShape(
                        layer=index, field=field, place=place, n_rows=n_rows, width=width, itemsize=sizes.itemsize
                    )
                )
        if layer.qkv != "recompute":
            shapes += _qkv_shapes(sizes, plan, n_tokens, index, layer.qkv)
        if layer.attention != "recompute":
            shapes += _attention_shapes(sizes, plan.head_groups, n_queries, index, layer.attention)
    scratch_place = plan.layers[0].input
    shapes += [
        KeptShape(
            layer=-1, field="input", place=scratch_place, n_rows=n_tokens, width=sizes.hidden_size,
            itemsize=sizes.itemsize,
        )
    ] * plan.scratch_inputs  # fmt: skip
    for _ in range(plan.scratch_attention):
        shapes += _attention_shapes(sizes, plan.head_groups, n_tokens, -1, scratch_place)
    if any(layer.qkv == "recompute" for layer in plan.layers):
        shapes += staging
    return shapes
