"""Weights made on the spot: a small Qwen3 from a seed, and GGUF files turned into an ordinary transformers folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import PreTrainedModel

from engine.weights import check_loaded


def tiny_qwen3_config(vocab_size: int, *, eos_token_id: int, pad_token_id: int) -> Qwen3Config:
    """Qwen3 in everything but its sizes: grouped-query attention (2 heads on 1), q and k norms, tied embeddings.

    Two narrow layers: attention over a real run of 50K tokens must end within a minute on two cores.
    """
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 1_000_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def build_tiny_qwen3(folder: Path, seed: int, *, vocab_size: int, eos_token_id: int, pad_token_id: int) -> int:
    """Writes config.json and model.safetensors of a randomly initialised tiny Qwen3, float32.

    The caller's random state is left as it was.

    Returns:
        the number of parameters.
    """
    config = tiny_qwen3_config(vocab_size, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return n_parameters(model)


def convert_gguf(gguf_path: Path, folder: Path) -> int:
    """Writes the dequantised float32 model of a GGUF file as a transformers folder.

    Returns:
        the number of parameters.

    Raises:
        UserError: the file lacks a tensor of its model.
    """
    kind: Any = AutoModelForCausalLM
    loaded, info = kind.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    check_loaded(loaded, info, gguf_path)
    config = loaded.config.to_dict()
    del config["quantization_config"]  # the weights are float32 now, but a model that remembers GGUF cannot be saved
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    return n_parameters(model)


def n_parameters(model: PreTrainedModel) -> int:
    """Parameters of a model; tied ones are counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_pickled(path: Path) -> int:
    """Parameters in a `.bin` weight file; the tensors' storage is never read."""
    state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return sum(tensor.numel() for tensor in state.values())
