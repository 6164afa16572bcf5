"""Unsloth on the same shape, lengths and scored positions: forward + backward + optimiser step.

    UNSLOTH_RETURN_LOGITS=1 HF_HUB_OFFLINE=1 python -m benchmarks.engine_unsloth OUT.jsonl 32768,4 65536,3

Unsloth's own loader, kernels and checkpointing ("unsloth": inputs offloaded to host memory). Its own loss would need
all logits, so the head runs at the scored positions only, in chunks, by `engine.scores`: a help to it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine_common import (
    N_SCORED,
    append_result,
    cap_device,
    config_dict,
    median,
    peaks,
    random_branch,
    tiny_tokenizer,
    warm,
)
from engine.memory import ALL_LINEARS
from engine.scores import chunked_logprobs, split_head


def write_random_checkpoint(folder: Path, config: dict[str, Any], device: str = "cuda") -> None:
    """bfloat16 weights, and the smallest tokenizer that loads."""
    torch.manual_seed(0)
    kind: Any = AutoConfig
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(described))
    del model
    torch.cuda.empty_cache()


def _case(text: str) -> tuple[int, int]:
    tokens, steps = text.split(",")
    return int(tokens), int(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", type=_case, help="TOKENS,STEPS")
    parser.add_argument("--allowed-gib", type=float, default=23.5)
    arguments = parser.parse_args()
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]

    config, longest = config_dict(), max(n_tokens for n_tokens, _ in arguments.cases)
    folder = Path(tempfile.mkdtemp())
    write_random_checkpoint(folder, config)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=longest, dtype=torch.bfloat16, load_in_4bit=True, fix_tokenizer=False
    )
    shutil.rmtree(folder)
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0.0, bias="none", target_modules=list(ALL_LINEARS),
        use_gradient_checkpointing="unsloth", max_seq_length=longest,
    )  # fmt: skip
    model.train()
    cap_device(arguments.allowed_gib)
    decoder, head = split_head(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    for n_tokens, steps in arguments.cases:
        result: dict[str, Any] = {"what": "unsloth", "tokens_attended": n_tokens, "allowed_gib": arguments.allowed_gib}
        seconds = []
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            for step in range(steps):
                ids_1T, _, rows_P, positions_P = random_branch(n_tokens, N_SCORED, config["vocab_size"], step, "cuda")
                torch.cuda.synchronize()
                start = time.perf_counter()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    hidden_1TD = decoder(input_ids=ids_1T, use_cache=False)[0]
                    logp_P = chunked_logprobs(
                        hidden_1TD[rows_P, positions_P - 1], ids_1T[rows_P, positions_P], head, 1024
                    )
                (-logp_P.mean()).backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            step_s = median(warm(seconds))
            result |= {"positions_scored": N_SCORED, "step_s": round(step_s, 4), "steps_timed": len(warm(seconds))}
            result |= {"steps_s": [round(value, 4) for value in seconds]}
            result |= {"tokens_per_s": round(n_tokens / step_s, 1), **peaks()}
        except torch.OutOfMemoryError as error:
            result |= {"what": "unsloth failed", "error": str(error)[:300]}
        append_result(arguments.out, result)


if __name__ == "__main__":
    main()
