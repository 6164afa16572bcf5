"""The ledger: bytes of every component of a long branch, from a model's config alone, before anything is allocated.

Letters: T tokens, D hidden size, F MLP size, V vocabulary, P scored positions, r LoRA rank. Imports no model and no
torch. The peak is the static part (weights, adapters, optimiser) plus the largest of the moments that never coincide
(`engine.moments`). Host bytes are exact; device bytes count what the engine allocates, by the list that it allocates
from (`kept_shapes`).

Backward frees what a layer kept on the device and adds that layer's LoRA gradients. So its peak is at the first layers
it comes to where these keep much, and at the last where they keep nothing; the ledger takes the worst one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.moments import moments_of
from engine.plan import Dimensions, KeptShape, MemoryPlan, kept_shapes

BaseFormat = Literal["nf4", "int8", "bf16", "fp32", "fp64"]
Optimiser = Literal["none", "adamw", "adamw_8bit"]

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GIB = 2**30
_PAGE_BYTES = 4096  # alignment of a slot in the host buffer
# NF4 in blocks of 64 with double quantisation: half a byte, one byte of scale per block, four per 256 blocks.
_BYTES_PER_WEIGHT = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0, "bf16": 2.0, "fp32": 4.0, "fp64": 8.0}
_OPTIMISER_BYTES = {"none": 0, "adamw": 8, "adamw_8bit": 2}  # per trained parameter
_LIBRARY_BYTES = 64 * 2**20  # cuBLAS workspaces, allocated through PyTorch
_LORA_ITEMSIZE = 4  # peft keeps adapters in float32


class Setup(BaseModel):
    """What is trained, beside the model's config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: BaseFormat = "nf4"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ALL_LINEARS
    optimiser: Optimiser = "adamw"
    n_scored: int = 4096
    chunk_positions: int = 256
    accumulating: bool = False  # gradients of an earlier branch are alive during backward
    align: int = 64  # LoRA columns are padded to this many (1 off the GPU)
    n_last_rows: int | None = None  # rows the last layer computes beyond keys and values; None: all (an upper bound)
    ordered_on: int = 0  # streaming multiprocessors of a GPU that is to add in a fixed order (0: in any)
    several_blocks: bool = False  # rows packed, or two tails behind a prefix: attention in blocks, merged

    def in_blocks(self) -> Setup:
        """Of a pack, or of a pair behind its common prefix: the scored tokens of both its sides are held together."""
        return self.model_copy(update={"several_blocks": True, "n_scored": 2 * self.n_scored})


Moment = Literal[
    "static", "kept", "forward", "head", "backward_restore", "backward_mlp", "backward_windows", "backward_attention"
]


class LedgerRow(BaseModel):
    """One component at the moment it is alive in; "static" is alive always."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    moment: Moment
    component: str
    device_bytes: int = 0
    host_bytes: int = 0


class Ledger(BaseModel):
    """Predicted bytes of one forward and backward of a branch of n_tokens under `plan`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_tokens: int
    plan: MemoryPlan
    rows: tuple[LedgerRow, ...]

    def device_bytes_of(self, moment: str) -> int:
        return sum(row.device_bytes for row in self.rows if row.moment == moment)

    @property
    def peak_moment(self) -> str:
        return max((row.moment for row in self.rows if row.moment not in ("static", "kept")), key=self.device_bytes_of)

    @property
    def peak_device_bytes(self) -> int:
        return sum(self.device_bytes_of(moment) for moment in ("static", "kept", self.peak_moment))

    @property
    def host_bytes(self) -> int:
        return sum(row.host_bytes for row in self.rows)

    def table(self) -> str:
        """The rows in MiB, one a line, with the sums below."""
        lines = [f"{'moment':<20}{'component':<34}{'device MiB':>12} {'host MiB':>15}"]
        for row in self.rows:
            device, host = row.device_bytes / 2**20, row.host_bytes / 2**20
            lines.append(f"{row.moment:<20}{row.component:<34}{device:>12,.1f} {host:>15,.1f}")
        device, host = self.peak_device_bytes / 2**20, self.host_bytes / 2**20
        lines.append(f"{'peak':<20}{'at ' + self.peak_moment:<34}{device:>12,.1f} {host:>15,.1f}")
        return "\n".join(lines)


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _linears(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(input, output) features of one layer's linears."""
    hidden, mlp, size = config["hidden_size"], config["intermediate_size"], _head_size(config)
    query = config["num_attention_heads"] * size
    key = (config.get("num_key_value_heads") or config["num_attention_heads"]) * size
    return {
        "q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden),
        "gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden),
    }  # fmt: skip


def _qkv_bias(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "qwen2" or bool(config.get("attention_bias"))


def dimensions(config: Mapping[str, Any], setup: Setup) -> Dimensions:
    """Sizes of the walk for a transformers config (as a dict) of the Llama, Mistral, Qwen2 or Qwen3 family."""

    def extra(names: tuple[str, ...], biased: bool) -> int:
        used = setup.lora_rank * sum(name in setup.lora_targets for name in names) + int(biased)
        return -(-used // setup.align) * setup.align

    out_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return Dimensions(
        n_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], mlp_size=config["intermediate_size"],
        vocab_size=config["vocab_size"], n_query_heads=config["num_attention_heads"],
        n_key_heads=config.get("num_key_value_heads") or config["num_attention_heads"], head_size=_head_size(config),
        itemsize={"fp32": 4, "fp64": 8}.get(setup.base, 2),
        extra_qkv=extra(("q_proj", "k_proj", "v_proj"), _qkv_bias(config)), extra_out=extra(("o_proj",), out_bias),
        extra_gate_up=extra(("gate_proj", "up_proj"), mlp_bias), extra_down=extra(("down_proj",), mlp_bias),
    )  # fmt: skip


def trained_parameters(config: Mapping[str, Any], setup: Setup) -> int:
    """Number of LoRA parameters."""
    shapes = [shape for name, shape in _linears(config).items() if name in setup.lora_targets]
    return config["num_hidden_layers"] * setup.lora_rank * sum(n_in + n_out for n_in, n_out in shapes)


def _static_rows(config: Mapping[str, Any], setup: Setup, sizes: Dimensions) -> list[LedgerRow]:
    weights = sizes.n_layers * sum(n_in * n_out for n_in, n_out in _linears(config).values())
    tables = 1 if config.get("tie_word_embeddings") else 2
    trained = trained_parameters(config, setup)
    lora_itemsize = max(_LORA_ITEMSIZE, sizes.itemsize)
    amounts = {
        "decoder weights": int(weights * _BYTES_PER_WEIGHT[setup.base]),
        "embedding and head": tables * sizes.vocab_size * sizes.hidden_size * sizes.itemsize,
        "adapters": trained * lora_itemsize,
        "gradients": trained * lora_itemsize * setup.accumulating,
        "optimiser": trained * _OPTIMISER_BYTES[setup.optimiser],
        "matmul library": _LIBRARY_BYTES if setup.align > 1 else 0,
    }
    return [LedgerRow(moment="static", component=name, device_bytes=value) for name, value in amounts.items()]


def _shapes(sizes: Dimensions, plan: MemoryPlan, setup: Setup, n_tokens: int, keeps: bool) -> list[KeptShape]:
    n_last_rows = None if setup.n_last_rows is None else min(setup.n_last_rows, n_tokens)
    return kept_shapes(sizes, plan, n_tokens, n_last_rows, keeps=keeps)


def _kept_rows(shapes: list[KeptShape]) -> list[LedgerRow]:
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for shape in shapes:
        name = f"kept {shape.field}" if shape.layer >= 0 else f"scratch {shape.field}"
        target, unit = (host, _PAGE_BYTES) if shape.place == "host" else (device, 1)
        target[name] = target.get(name, 0) + -(-shape.n_bytes // unit) * unit
    return [
        LedgerRow(moment="kept", component=name, device_bytes=device.get(name, 0), host_bytes=host.get(name, 0))
        for name in sorted(device.keys() | host.keys())
    ]


def _gradient_bytes(config: Mapping[str, Any], setup: Setup, sizes: Dimensions, shapes: list[KeptShape]) -> int:
    """What gradients add to all that is kept, at the layer of backward where that is most.

    At a layer, those above it have their gradients and nothing kept any more, and it has its own sums: the A's of each
    packed matrix padded to its border, the B's as they are, in float32 (`engine.linears.AdapterGradients`).
    """
    per_layer = trained_parameters(config, setup) // sizes.n_layers * max(_LORA_ITEMSIZE, sizes.itemsize)
    linears, rank = _linears(config), setup.lora_rank
    borders = (sizes.extra_qkv, sizes.extra_out, sizes.extra_gate_up, sizes.extra_down)
    inputs = (sizes.hidden_size, sizes.query_size, sizes.hidden_size, sizes.mlp_size)
    sums = sum(border * n_in for border, n_in in zip(borders, inputs, strict=True))
    sums += rank * sum(linears[name][1] for name in setup.lora_targets)
    most, freed = 0, 0
    for index in reversed(range(sizes.n_layers)):
        most = max(most, (sizes.n_layers - 1 - index) * per_layer - freed)
        freed += sum(shape.n_bytes for shape in shapes if shape.layer == index and shape.place == "device")
    return most + sums * sizes.sum_itemsize


def host_bytes_of(config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup) -> int:
    """As `predict` has them, without the device's: a search asks for them some hundred times a plan."""
    return sum(row.host_bytes for row in _kept_rows(_shapes(dimensions(config, setup), plan, setup, n_tokens, True)))


def predict(config: Mapping[str, Any], n_tokens: int, plan: MemoryPlan, setup: Setup, *, keeps: bool = True) -> Ledger:
    """The ledger of one branch of n_tokens; keeps=False: of one that is only scored, and so keeps nothing."""
    sizes = dimensions(config, setup)
    shapes = _shapes(sizes, plan, setup, n_tokens, keeps)
    rows = _static_rows(config, setup, sizes) + _kept_rows(shapes)
    gradients = {"gradients of this branch": _gradient_bytes(config, setup, sizes, shapes)}
    for moment, amounts in moments_of(sizes, plan, setup, n_tokens).items():
        if moment.startswith("backward"):
            if not keeps:
                continue
            amounts |= gradients
        rows += [
            LedgerRow(moment=moment, component=name, device_bytes=value)  # type: ignore[arg-type]
            for name, value in amounts.items()
        ]
    return Ledger(n_tokens=n_tokens, plan=plan, rows=tuple(rows))
