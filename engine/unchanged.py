"""What a walk reads of a model, so that backward can tell whether it still is what forward computed with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from engine.linears import base_linear
from engine.memory import ALL_LINEARS


class Used(NamedTuple):
    """A tensor that both passes read, as it was then; of LoRA matrices also what they are scaled by."""

    tensor: Tensor
    version: int
    scaling: float
    trained: bool


def layer_linears(decoder: Any) -> Iterator[tuple[str, Any]]:
    """Every linear of the layers, or the peft layer in its place, by its name in the decoder."""
    for index, layer in enumerate(decoder.layers):
        for block, names in (("self_attn", ALL_LINEARS[:4]), ("mlp", ALL_LINEARS[4:])):
            owner = getattr(layer, block)
            for name in names:
                yield f"layers.{index}.{block}.{name}", getattr(owner, name)


def adapters_in_effect(module: Any) -> list[str]:
    """Names of the adapters by which a peft layer now differs from its base layer."""
    if module.disable_adapters or module.merged:
        return []
    parts = module.adapter_layer_names
    return [name for name in module.active_adapters if any(name in getattr(module, part) for part in parts)]


def used_tensors(decoder: Any, head_weight: Tensor) -> dict[str, list[Used]]:
    """What a walk reads, in both passes, of every linear, norm and table. Cheap: asked for at every call.

    Changes through `.data` are not seen: they leave the version as it was.
    """

    def used(tensor: Tensor, scaling: float = 1.0) -> Used:
        return Used(tensor, 0 if tensor.is_inference() else tensor._version, scaling, tensor.requires_grad)

    found: dict[str, list[Used]] = {}
    for name, module in layer_linears(decoder):
        base = base_linear(module)
        found[name] = [used(tensor) for tensor in (base.weight, base.bias) if tensor is not None]
        for adapter in adapters_in_effect(module) if base is not module else ():
            pair = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            found[name] += [used(matrix, module.scaling[adapter]) for matrix in pair]
    for index, layer in enumerate(decoder.layers):
        attn = layer.self_attn
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attn, name) for name in ("q_norm", "k_norm") if hasattr(attn, name)]
        found[f"a norm of layers.{index}"] = [used(norm.weight) for norm in norms]
    ends = {"the embedding": decoder.embed_tokens.weight, "the last norm": decoder.norm.weight, "the head": head_weight}
    return found | {name: [used(weight)] for name, weight in ends.items()}


def _change(before: list[Used], now: list[Used]) -> str | None:
    """What happened to one module since; None: nothing that matters to the gradient."""
    if len(before) != len(now) or any(old.tensor is not new.tensor for old, new in zip(before, now, strict=True)):
        return "has other weights or adapters (switched, merged or disabled)"
    pairs = list(zip(before, now, strict=True))
    if any((old.version, old.scaling) != (new.version, new.scaling) for old, new in pairs):
        return "was changed in place"
    return "was frozen" if any(old.trained and not new.trained for old, new in pairs) else None


def check_unchanged(before: dict[str, list[Used]], now: dict[str, list[Used]]) -> None:
    """RuntimeError where backward would not differentiate what forward computed: autograd sees nothing of it."""
    for name, used in before.items():
        if what := _change(used, now[name]):
            raise RuntimeError(f"{name} {what} between forward and backward of the long-context engine")
