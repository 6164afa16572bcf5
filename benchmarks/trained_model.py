"""The engine's and plain bfloat16's errors on a trained model, against float32, on a CPU.

    python -m benchmarks.trained_model OUT.jsonl --model FOLDER --text FILE --tokens 1024

FOLDER is a transformers folder (`traceforge run configs/smollm2.toml` writes one). All three runs start from the same
bfloat16 weights and LoRA matrices; of the last three quarters, nine stretches of 32 tokens are scored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine_common import append_result, machine, with_lora
from benchmarks.engine_correctness import compare, run, walk_scorer
from engine.scores import token_logprobs

SPAN_TOKENS = 32


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model with weights rounded to bfloat16, in dtype, and float32 LoRA matrices that are bfloat16 values."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    wrapped = with_lora(model.bfloat16().to(dtype).requires_grad_(False))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float().bfloat16().float()
    return wrapped


def batch_of(folder: Path, text: Path, n_tokens: int) -> tuple[Tensor, ...]:
    ids_1T = torch.tensor([AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"][:n_tokens]])
    n_tokens = ids_1T.shape[1]
    starts = range(n_tokens // 4, n_tokens - SPAN_TOKENS, n_tokens // 12)
    positions_P = torch.cat([torch.arange(start, start + SPAN_TOKENS) for start in starts])
    return ids_1T, torch.ones_like(ids_1T), torch.zeros_like(positions_P), positions_P


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    batch = batch_of(arguments.model, arguments.text, arguments.tokens)
    exact, rounded = (load(arguments.model, dtype) for dtype in (torch.float32, torch.bfloat16))
    rounded.load_state_dict({n: p for n, p in exact.named_parameters() if "lora_" in n}, strict=False)
    scorer = walk_scorer(rounded.config.num_hidden_layers, 256, 1)
    found = {
        "float32": run(exact, token_logprobs, batch),
        "engine": run(rounded, scorer, batch),
        "plain": run(rounded, token_logprobs, batch),
        "engine in float32": run(exact, scorer, batch),
    }
    facts = {"model": arguments.model.name, "tokens": batch[0].shape[1], "scored": len(batch[3])}
    append_result(arguments.out, {"what": "machine", **machine()})
    for one, other in (
        ("engine", "float32"),
        ("plain", "float32"),
        ("engine", "plain"),
        ("engine in float32", "float32"),
    ):
        append_result(arguments.out, {"what": f"{one} against {other}", **facts, **compare(found[one], found[other])})


if __name__ == "__main__":
    main()
