"""What the engine benchmarks share: a random 8B model, scored positions, timing, and the machine's name card."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.memory import ALL_LINEARS, GIB

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 524288, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
N_SCORED = 4096


def config_dict(layers: int = 36) -> dict[str, Any]:
    return QWEN3_8B | {"num_hidden_layers": layers}


def random_nf4_model(config: dict[str, Any], *, rank: int = 16, residual_std: float = 0.02) -> Any:
    """A peft model with random weights: decoder linears NF4 (double-quantised) and the rest bfloat16, on the GPU.

    LoRA's B is random too, so that every gradient is non-zero.
    """
    import bitsandbytes

    quantised: Any = bitsandbytes.nn

    make_weight: Any = quantised.Params4bit
    torch.manual_seed(0)
    kind = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16, attn_implementation="sdpa")
    rotary = type(model.model.rotary_emb)(kind).to("cuda")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in ALL_LINEARS:
                old = getattr(part, name, None)
                if old is None:
                    continue
                new = quantised.Linear4bit(
                    old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                    compress_statistics=True, device="meta",
                )  # fmt: skip
                std = residual_std if name in ("o_proj", "down_proj") else 0.02
                weight = torch.randn(old.out_features, old.in_features, device="cuda", dtype=torch.bfloat16)
                packed: Any = make_weight(
                    weight.mul_(std),
                    requires_grad=False,
                    quant_type="nf4",
                    compress_statistics=True,
                )
                new.weight = packed.to("cuda")
                setattr(part, name, new)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                value = value.normal_(0, 0.02) if value.dim() > 1 else value.fill_(1)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    model.model.rotary_emb = rotary
    model.requires_grad_(False)
    return with_lora(model, rank)


def with_lora(model: nn.Module, rank: int = 16) -> Any:
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ALL_LINEARS), lora_dropout=0.0)
    wrapped = get_peft_model(model, lora)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    return wrapped


def scattered_positions(n_tokens: int, n_scored: int, device: str) -> Tensor:
    """About 16 spans of equal length spread over the branch, the last one at its end."""
    n_scored = min(n_scored, n_tokens - 1)
    length = max(1, n_scored // 16)
    spans = [range(end - length, end) for end in torch.linspace(length + 1, n_tokens, 16).long().tolist()]
    return torch.tensor(sorted({p for span in spans for p in span}), device=device)


def random_branch(n_tokens: int, n_scored: int, vocab_size: int, seed: int, device: str) -> tuple[Tensor, ...]:
    """Arguments of a scorer for one row."""
    generator = torch.Generator(device).manual_seed(seed)
    ids_1T = torch.randint(0, vocab_size, (1, n_tokens), device=device, generator=generator)
    positions_P = scattered_positions(n_tokens, n_scored, device)
    return ids_1T, torch.ones_like(ids_1T), torch.zeros_like(positions_P), positions_P


def tiny_tokenizer() -> Any:
    """The smallest tokenizer that loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<|endoftext|>", "<|im_end|>", "<|vision_pad|>", "<unk>", "a"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), eos_token="<|im_end|>",
        pad_token="<|endoftext|>", unk_token="<unk>",
    )  # fmt: skip


def warm(values: list[float]) -> list[float]:
    """All but the first where there are four or more; of three, the first and slowest does not decide the median."""
    return values[1:] if len(values) > 3 else values


def median(values: list[float]) -> float:
    return statistics.median(values)


def machine(commit: str = "") -> dict[str, Any]:
    """GPU, driver, versions and commit (given where the checkout has no git), for the head of every result file."""

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def output(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    packages = ("torch", "transformers", "peft", "bitsandbytes", "triton", "unsloth", "trl")
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: installed(name) for name in packages},
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def peaks() -> dict[str, float]:
    """Peak GiB of PyTorch's allocator since its statistics were reset."""
    if not torch.cuda.is_available():
        return {"allocated_gib": 0.0, "reserved_gib": 0.0}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
    }


def cap_device(gib: float) -> None:
    """Hold PyTorch's allocator to so many GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))


def append_result(path: Path, result: dict[str, Any]) -> None:
    """One JSON object a line, on the disk when this returns: a run that is cut short keeps what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(result) + "\n")
        lines.flush()
        os.fsync(lines.fileno())
    print(json.dumps(result), flush=True)
