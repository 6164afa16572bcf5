"""Base model, tokenizer and adapter, loaded and saved so that equal content gives equal bytes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from artifacts.store import fsync, write_atomically
from engine.model_folder import cause, reading
from engine.weights import check_folder, check_loaded
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import ORIGIN_FILE, Ref


def pick_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_base(model: Ref, config: ModelConfig, device: torch.device, max_tokens: int) -> PreTrainedModel:
    """The base model on `device`, frozen.

    Args:
        max_tokens: the longest row that will be seen; unsloth sizes its buffers by it.

    Raises:
        UserError: the folder is damaged, its weights are not all there or of another architecture, or the backend or
            quantisation is not available here.
    """
    if config.backend == "unsloth":
        return _load_unsloth(model, config, max_tokens)
    quantization = {
        "none": None,
        "nf4": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[config.quantization]
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "attn_implementation": "sdpa"}
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    folder = Path(model.path)
    check_folder(folder)  # first: a load that quantises takes a tensor of any shape
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UserError(f"not a loadable model: {cause(error)}", where=folder) from error
    loaded, info = answer
    if unused := check_loaded(loaded, info, folder):
        print(f"{folder}: {len(unused)} stored tensors have no place in the model, first {unused[0]}", flush=True)
    if quantization is None:
        nn.Module.to(loaded, device)
    module: Any
    for module in loaded.modules():
        # in evaluation mode on a CPU bitsandbytes repacks its weights for a kernel that has no backward pass
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    loaded.requires_grad_(False)
    return loaded


def _load_unsloth(model: Ref, config: ModelConfig, max_tokens: int) -> PreTrainedModel:
    try:
        from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "model.backend is unsloth, which is not installed", where="model.backend", fix="pip install '.[gpu]'"
        ) from error
    loaded, _ = FastLanguageModel.from_pretrained(
        model_name=model.path,
        max_seq_length=max_tokens,
        dtype=getattr(torch, config.dtype),
        load_in_4bit=config.quantization == "nf4",
        load_in_8bit=config.quantization == "int8",
    )
    loaded.requires_grad_(False)
    return loaded


def load_tokenizer(model: Ref) -> Any:
    """The tokenizer that lies beside the weights."""
    with reading("no tokenizer", model.path):
        return AutoTokenizer.from_pretrained(model.path, local_files_only=True)


def new_adapter(base: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Wraps the base with a fresh LoRA: A drawn from `seed`, B zero, so the start equals the base.

    Raises:
        UserError: the model has no layer of the names in `target_modules`, or one that takes no adapter.
    """
    names = {name.rsplit(".", 1)[-1] for name, _ in base.named_modules()}
    missing = sorted(set(config.target_modules) - names)
    if missing:
        raise UserError(f"the model has no layer named {', '.join(missing)}", where="lora.target_modules")
    torch.manual_seed(seed)
    peft_config = PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft scales by alpha / r, whole or not
        lora_dropout=config.dropout,
        target_modules=sorted(config.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(base, peft_config)  # type: ignore[return-value]
    except ValueError as error:  # a norm, or a block of layers
        raise UserError(f"peft makes no adapter: {cause(error)}", where="lora.target_modules") from error


def load_adapter(base: PreTrainedModel, adapter: Ref, model: Ref, *, trainable: bool) -> PeftModel:
    """Wraps the base with a stored adapter.

    Raises:
        UserError: the adapter was trained on another base model.
    """
    check_origin(adapter, model)
    loaded = PeftModel.from_pretrained(base, adapter.path, is_trainable=trainable)
    # the stored name is no path; peft reads the base model's config from here when it writes a checkpoint
    loaded.peft_config["default"].base_model_name_or_path = base.config._name_or_path
    return loaded


def check_origin(adapter: Ref, model: Ref) -> None:
    """UserError unless the adapter says it was trained on exactly this base model."""
    origin = Path(adapter.path) / ORIGIN_FILE
    if not origin.is_file():
        raise UserError(f"not an adapter of traceforge: no {ORIGIN_FILE}", where=adapter.path)
    trained_on = json.loads(origin.read_text())["model_sha256"]
    if trained_on != model.sha256:
        raise UserError(
            f"the adapter was trained on model {trained_on[:16]}, this one is {model.sha256[:16]}",
            where=adapter.path,
            fix="train a new adapter, or give the model it belongs to",
        )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, sorted by name: the one order that flat buffers and digests use."""
    return dict(sorted((name, p) for name, p in model.named_parameters() if p.requires_grad))


def save_adapter(model: PeftModel, folder: Path, *, base_name: str, model_sha256: str, stage: str) -> None:
    """Writes weights, peft's config and the origin file, safe against a crash. No path, time or host gets into the
    bytes.

    Raises:
        StageError: a weight is not finite, or the disk takes no more; no folder is left.
    """
    # "auto" would look for the base model's config on a hub, by name
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(state.items())}
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise StageError(f"the adapter is not finite and was not saved; first tensor: {broken[0]}")
    peft_config = model.peft_config["default"].to_dict()
    peft_config |= {"base_model_name_or_path": base_name, "inference_mode": True, "revision": None}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in peft_config.items()}
    origin = {"model_sha256": model_sha256, "stage": stage}
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that ended between this and its report
    try:
        folder.mkdir(parents=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        fsync(folder / "adapter_model.safetensors")
        write_atomically(
            folder / "adapter_config.json", json.dumps(plain, indent=2, sort_keys=True, default=str) + os.linesep
        )
        write_atomically(folder / ORIGIN_FILE, json.dumps(origin, indent=2, sort_keys=True) + os.linesep)
        fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StageError(
            f"the adapter could not be written ({cause(error)}). Free some space at {folder.parent} and start again"
        ) from error
