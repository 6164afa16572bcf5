"""Tiny random causal language models of each supported architecture, with LoRA whose B is not zero."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_config(architecture: str, **overrides: object):
    """Config with GQA (4 query, 2 key-value heads) and sizes that are multiples of nothing convenient."""
    sizes: dict[str, object] = {
        "vocab_size": 89,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8 if architecture in ("qwen3", "mistral", "llama") else 6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(architecture, **(sizes | overrides))


def tiny_model(
    architecture: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float64,
    rank: int = 3,
    seed: int = 0,
    **overrides: object,
) -> Any:
    """peft model on `tiny_config`, all weights random (norms and biases too), lora_alpha = 2 * rank."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **overrides)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(8)  # so that attention and gates leave their linear range
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def lora_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all trainable parameters by name; clears them on the model."""
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grads[name], parameter.grad = parameter.grad, None
    return grads


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())
