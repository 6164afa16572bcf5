"""What others do with the same model, lengths and scored positions: transformers + peft, and TRL's SFTTrainer.

Both with gradient checkpointing of every layer and PyTorch's own attention, in bfloat16 autocast, AdamW.

transformers  the loop a careful user writes: the model's own forward, logits at the scored positions only, in chunks
trl           SFTTrainer with its defaults and its own loss; only the completion (the scored tokens) has labels
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.engine_cases import Bench
from benchmarks.engine_common import median, peaks, tiny_tokenizer, warm
from engine.scores import chunked_logprobs, split_head

HEAD_CHUNK = 1024


def transformers_steps(bench: Bench, n_tokens: int, steps: int) -> list[float]:
    """Seconds of each step of the plain loop."""
    decoder, head = split_head(bench.model)
    optimiser = torch.optim.AdamW(bench.trained, lr=1e-5, fused=bench.device.type == "cuda")
    bench.model.train()
    bench.model.gradient_checkpointing_enable({"use_reentrant": False})
    seconds = []
    for step in range(steps):
        ids_1T, _, rows_P, positions_P = bench.branch(n_tokens, step)
        bench.synchronize()
        start = time.perf_counter()
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            hidden_1TD = decoder(input_ids=ids_1T, use_cache=False)[0]
            logp_P = chunked_logprobs(
                hidden_1TD[rows_P, positions_P - 1], ids_1T[rows_P, positions_P], head, HEAD_CHUNK
            )
        (-logp_P.mean()).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        bench.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


class _Clock(TrainerCallback):
    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize, self.seconds, self.started = synchronize, list[float](), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def trl_steps(bench: Bench, n_tokens: int, steps: int) -> list[float]:
    """Seconds of each step of TRL's SFTTrainer on rows whose scored tokens are their completion."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    for step in range(steps):
        ids_1T, _, _, positions_P = bench.branch(n_tokens, step)
        mask_T = torch.zeros(n_tokens, dtype=torch.long, device=ids_1T.device)
        mask_T[positions_P] = 1
        rows["input_ids"].append(ids_1T[0].tolist())
        rows["completion_mask"].append(mask_T.tolist())
    clock = _Clock(bench.synchronize)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=bench.model,
            args=SFTConfig(
                output_dir=folder, max_length=None, per_device_train_batch_size=1, max_steps=steps,
                gradient_checkpointing=True, bf16=bench.device.type == "cuda", use_cpu=bench.device.type == "cpu",
                learning_rate=1e-5, save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tiny_tokenizer(),
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    return clock.seconds


STEPS: dict[str, Callable[[Bench, int, int], list[float]]] = {"transformers": transformers_steps, "trl": trl_steps}


def run_peer(bench: Bench, name: str, n_tokens: int, gib: float, steps: int) -> dict[str, Any]:
    """Speed and memory of a peer; "failed" in place of them where it runs out of memory. Leaves the model as it was."""
    result: dict[str, Any] = {"what": "peer", "peer": name, "tokens_attended": n_tokens, "allowed_gib": gib}
    result |= {"positions_scored": bench.branch(n_tokens, 0)[3].numel()}
    bench.fresh(gib)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = STEPS[name](bench, n_tokens, steps)
        step_s = median(warm(seconds))
        result |= {"step_s": round(step_s, 4), "steps_s": [round(s, 4) for s in seconds]}
        result |= {"tokens_per_s": round(n_tokens / step_s, 1), **peaks()}
    except torch.OutOfMemoryError as error:
        result |= {"failed": str(error).splitlines()[0][:200]}
    bench.model.gradient_checkpointing_disable()
    for parameter in bench.trained:
        parameter.grad = None
        parameter.data = parameter.data.float()
    return result
