"""Whether weights and config.json belong together.

transformers fills in what it misses with random values and leaves out what it has no place for; both are only said in a
log. Here they are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.model_folder import AGAIN, is_quantized, quiet_transformers, read_json, reading
from schemas.errors import UserError

_OTHER_CONFIG = "give the config.json that belongs to these weights"


def check_folder(folder: Path) -> None:
    """Loads the model as transformers does, but onto the meta device: every rule for names and shapes is applied, no
    weight is read. Takes a second for an 8B model. Weights stored quantised are left to the loading itself.

    Raises:
        UserError: config or weights are damaged, or do not belong together.
    """
    if (folder / "config.json").is_file() and is_quantized(read_json(folder / "config.json")):
        return
    with quiet_transformers(), reading("not a loadable model", folder, AGAIN):  # no table of what did not fit
        answer: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        model, info = answer
        check_loaded(model, info, folder)


def check_loaded(model: PreTrainedModel, info: dict[str, Any], folder: Path) -> list[str]:
    """Checks what `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)` says of its work.

    Tied weights that are stored once, and what a family is known to store beside its model (rotary buffers, heads that
    predict several tokens), transformers has taken out of it.

    Returns:
        tensors that the model has no place for, although it seems to be the right one: more layers, a vision tower.

    Raises:
        UserError: a tensor is missing or of another shape, or a layer has weights that this architecture does not use.
    """
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"the weights lack {counted(missing)}", where=folder, fix=AGAIN)
    if different := sorted(info["mismatched_keys"]):
        _, stored, expected = different[0]
        raise UserError(
            f"the shapes of config.json and weights differ in {counted([name for name, *_ in different])}: "
            f"{list(expected)} and {list(stored)}",
            where=folder,
            fix=_OTHER_CONFIG,
        )
    unexpected = sorted(info["unexpected_keys"])
    if foreign := _of_its_layers(unexpected, model):
        raise UserError(
            f"a {model.config.model_type} model, as config.json has it, has no place for {counted(foreign)}",
            where=folder,
            fix=_OTHER_CONFIG,
        )
    return unexpected


def counted(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors, first {names[0]}"


def _of_its_layers(unexpected: list[str], model: PreTrainedModel) -> list[str]:
    """Those that stand within a layer which the model has: that layer would not compute what it was trained to.

    Of another kind than weights are masks and tables that old checkpoints hold. Where the weights are stored
    quantised, scales are there that only other engines use.
    """
    if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        return []
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules()}

    def is_foreign(name: str) -> bool:
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[0]
        in_layer = layer in modules and any(part.isdecimal() for part in layer.split("."))
        return in_layer and (kind == "weight" or f"{module}.weight" in own)

    return [name for name in unexpected if is_foreign(name)]
