"""Base model, tokenizer and adapter, loaded and saved so that equal content gives equal bytes."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from artifacts.store import fsync, refusal, write_atomically
from engine.model_folder import cause, reading
from engine.weights import check_folder, check_loaded, counted
from schemas.base import first_problem
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import ORIGIN_FILE, Ref

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_RETRAIN = "train the adapter again, or give one that is whole"


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
        UserError: the model has no layer of the names in `target_modules`, one that takes no adapter, or one that is
            its embedding or its head (the schema knows these of Qwen and Llama; other families call them otherwise).
    """
    names = {name.rsplit(".", 1)[-1] for name, _ in base.named_modules()}
    missing = sorted(set(config.target_modules) - names)
    if missing:
        raise UserError(f"the model has no layer named {', '.join(missing)}", where="lora.target_modules")
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    outside = {name.rsplit(".", 1)[-1] for name, module in base.named_modules() if any(module is end for end in ends)}
    if taken := sorted(outside & set(config.target_modules)):
        raise UserError(
            f"{taken[0]} is the model's embedding or head, outside of its layers",
            where="lora.target_modules",
            fix="name linears of the layers",
        )
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


def load_adapter(base: nn.Module, adapter: Ref, model: Ref, *, trainable: bool, name: str = "default") -> PeftModel:
    """Wraps the base with a stored adapter; one that is wrapped already gets it beside those that it has.

    Raises:
        UserError: the adapter was trained on another base model, a file of it is missing or damaged, or its tensors
            are not those that its config and the base ask for.
    """
    check_origin(adapter, model)
    folder = Path(adapter.path)
    adapter_config(folder)
    stored = _stored_weights(folder)
    with warnings.catch_warnings(), _fits(folder):
        for said_below in ("Found missing adapter keys", "Some weights of"):
            warnings.filterwarnings("ignore", message=said_below)
        if isinstance(base, PeftModel):
            loaded = base
            loaded.load_adapter(folder, name, is_trainable=trainable, ignore_mismatched_sizes=True)
        else:
            loaded = PeftModel.from_pretrained(
                base,
                folder,
                name,
                is_trainable=trainable,
                ignore_mismatched_sizes=True,  # type: ignore[arg-type]
            )
    own = get_peft_model_state_dict(loaded, adapter_name=name, save_embedding_layers=False)
    _compare_shapes(folder / ADAPTER_WEIGHTS, stored, {name: list(tensor.shape) for name, tensor in own.items()})
    # the stored name is no path; peft reads the base model's config from here when it writes a checkpoint
    loaded.peft_config[name].base_model_name_or_path = loaded.get_base_model().config._name_or_path  # type: ignore
    return loaded


@contextmanager
def _fits(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # not what a GPU without memory raises
        raise UserError(f"not an adapter for this model: {cause(error)}", where=folder, fix=_RETRAIN) from error


def adapter_config(folder: Path) -> LoraConfig:
    """Rank, targets and dropout of a stored adapter.

    Raises:
        UserError: its config is missing, damaged, or not that of a LoRA on named layers.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError("the file is missing", where=path, fix=_RETRAIN)
    with reading("it describes no adapter that can be used", path, _RETRAIN):
        stored = json.loads(path.read_bytes())
        if stored["peft_type"] != "LORA" or not isinstance(stored["target_modules"], list):
            raise ValueError("not that of a LoRA on named layers")
        if stored.get("bias", "none") != "none":
            raise ValueError("it trains biases, which stay when the adapter is taken off")
        try:
            return LoraConfig(
                r=stored["r"],
                dropout=stored.get("lora_dropout", 0.0),
                target_modules=tuple(stored["target_modules"]),
            )
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error


def _stored_weights(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of a stored adapter's tensors.

    Raises:
        UserError: a file is missing or damaged, or a value is not finite.
    """
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise UserError("the file is missing", where=weights, fix=_RETRAIN)
    with reading("the file is damaged", weights, _RETRAIN):
        tensors = load_file(weights)
    if broken := [name for name, tensor in sorted(tensors.items()) if not torch.isfinite(tensor).all()]:
        raise UserError(f"not finite: {counted(broken)}", where=weights, fix=_RETRAIN)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _compare_shapes(weights: Path, stored: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """peft keeps random values where a tensor is missing, and passes over one that it has no place for."""
    if missing := sorted(expected.keys() - stored.keys()):
        raise UserError(f"the adapter lacks {counted(missing)}", where=weights, fix=_RETRAIN)
    # beside an adapter of the head or the embeddings peft stores the layer's own weight, which is the base model's
    if unexpected := sorted(name for name in stored.keys() - expected.keys() if ".base_layer." not in name):
        raise UserError(f"the model has no place for {counted(unexpected)}", where=weights, fix=_RETRAIN)
    if different := sorted(name for name in expected if stored[name] != expected[name]):
        first = different[0]
        raise UserError(
            f"the shapes of {ADAPTER_CONFIG} and weights differ in {counted(different)}: {expected[first]} and "
            f"{stored[first]}",
            where=weights,
            fix=_RETRAIN,
        )


def check_origin(adapter: Ref, model: Ref) -> None:
    """UserError unless the adapter says it was trained on exactly this base model."""
    origin = Path(adapter.path) / ORIGIN_FILE
    if not origin.is_file():
        raise UserError(f"not an adapter of traceforge: no {ORIGIN_FILE}", where=adapter.path)
    with reading("the file is damaged", origin, _RETRAIN):
        said = json.loads(origin.read_bytes())
    trained_on = said.get("model_sha256") if isinstance(said, dict) else None
    if not isinstance(trained_on, str):
        raise UserError("it does not say which model the adapter was trained on", where=origin, fix=_RETRAIN)
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
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        fsync(folder / ADAPTER_WEIGHTS)
        write_atomically(folder / ADAPTER_CONFIG, json.dumps(plain, indent=2, sort_keys=True, default=str) + os.linesep)
        write_atomically(folder / ORIGIN_FILE, json.dumps(origin, indent=2, sort_keys=True) + os.linesep)
        fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        why, advice = refusal(error, folder.parent)
        raise StageError(f"the adapter could not be written ({why}). {advice} and start again") from error
