"""The training stages on Qwen3-8B NF4 and two GPUs, started as the pipeline starts them, on made-up runs.

    python -m benchmarks.pairs_two_gpus prepare --folder F
    python -m benchmarks.pairs_two_gpus run OUT.jsonl --folder F long mix-in-order mix-auto ...
    python -m benchmarks.pairs_two_gpus compare OUT.jsonl --folder F exact-two exact-one

`benchmarks/pairs_two_gpus.sh` runs what is to be known, most wanted first, in one go.

The configuration is `configs/qwen3-8b-2x24g.toml`, weights are random, and PyTorch's allocator is held to 23.5 GiB a
card, so memory means a 24 GiB card and speed means the card it ran on. Each case is a process group of its own:
`torch.distributed.run -m engine.train spec.json`. A line of JSON is written as soon as something is known. With
`--dry` the same code runs on a CPU: a tiny model, lengths divided by 128.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from artifacts.store import payload_digest, write_atomically
from benchmarks.engine_common import QWEN3_8B, append_result, machine
from benchmarks.engine_unsloth import write_random_checkpoint
from benchmarks.made_up import Lengths, ref_of, write_pairs
from benchmarks.pairs_cases import CASES, Case
from engine.schedule import training_windows
from schemas.config import ModelConfig, RunConfig
from schemas.errors import StageError, UserError
from schemas.load import load_config
from schemas.refs import Ref
from schemas.reports import TrainPoint, TrainReport
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig
from tasks.launch import launch

CONFIG = Path("configs/qwen3-8b-2x24g.toml")
CARD_GIB = 23.5
STOP_GRACE_S = 35.0
"""What stopping a case that ran out of time may take."""

DRY_MODEL = QWEN3_8B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
DRY_DIVISOR = 128
GIB = 2**30


def config_of(folder: Path, case: Case, dry: bool) -> RunConfig:
    """The committed configuration with the case's changes, a step a pair unless it says otherwise."""
    config = load_config(CONFIG)
    places = {"name": str(folder / "model"), "gpu_gib": CARD_GIB, "host_gib": case.host_gib}
    base = config.model.model_dump() | places | case.base
    if dry:
        base |= {"dtype": "float32", "quantization": "none", "backend": "transformers", "gpu_gib": None}
    optimizer = config.sft.optimizer.model_copy(update={"optimizer": "adamw_torch" if dry else "adamw_bnb_8bit"})
    few = {"accumulation": 1, "margin_pairs": 1, "trackers": (), "n_processes": case.n_processes}
    sections = {
        "model": ModelConfig(**base),
        "simpo": SimpoConfig(**config.simpo.model_dump() | few | case.simpo),
        "sft": config.sft.model_copy(update={"accumulation": 2, "trackers": (), "optimizer": optimizer}),
    }
    return config.model_copy(update=sections)


def prepare(folder: Path, dry: bool) -> None:
    """Random weights as a model folder, and an adapter whose B is random too, so that no gradient is zero."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from engine.loading import save_adapter

    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if dry else "cuda"
    write_random_checkpoint(folder / "model", DRY_MODEL if dry else QWEN3_8B, device)
    model = _model_ref(folder)
    lora = load_config(CONFIG).lora
    with torch.device("meta"):
        shape: Any = AutoModelForCausalLM.from_config(_transformers_config(folder))
        wrapped: Any = get_peft_model(
            shape, PeftLoraConfig(r=lora.r, lora_alpha=int(lora.alpha), target_modules=sorted(lora.target_modules))
        )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(wrapped.named_parameters()):
        if parameter.requires_grad:
            owner, leaf = wrapped.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            drawn = torch.empty(parameter.shape).normal_(0, 0.01, generator=generator)
            setattr(owner, leaf, torch.nn.Parameter(drawn))
    save_adapter(wrapped, folder / "start", base_name="random", model_sha256=model.sha256, stage="sft")


def _transformers_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder / "model")


def _model_ref(folder: Path) -> Ref:
    sha256, n_bytes = payload_digest(folder / "model", "listing")
    return Ref(kind="model", path=str(folder / "model"), sha256=sha256, n_bytes=n_bytes, digest="listing")


def _spec(folder: Path, out: Path, case: Case, lengths: Lengths, config: RunConfig) -> TrainSpec:
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    n_shared = case.n_shared * min(min(pair) for pair in lengths) // min(min(pair) for pair in case.lengths)
    split = "heldout" if case.stage == "evaluate" else "train"
    branches, pairs = write_pairs(out, lengths, vocab_size, split=split, n_shared=n_shared)
    start = ref_of(folder / "start", "adapter")
    return TrainSpec(
        stage=case.stage,  # type: ignore[arg-type]
        branches=(branches,),
        pairs=pairs,
        model=_model_ref(folder),
        base=config.model,
        lora=config.lora if case.stage == "sft" else None,
        adapters={} if case.stage == "sft" else {"start" if case.stage == "simpo" else "sft": start},
        sft=config.sft if case.stage == "sft" else None,
        simpo=config.simpo if case.stage == "simpo" else None,
        evaluate=config.evaluate if case.stage == "evaluate" else None,
    )


def _step(point: TrainPoint, tokens: Sequence[int] | None, world_size: int) -> dict[str, Any]:
    shown = {"loss", "margin", "grad_norm", "learning_rate", "idle_share", "exchange_share", "tflops_per_s"}
    step = point.model_dump(include=shown, exclude_none=True)
    step["tokens_per_s_per_gpu"] = round(point.tokens_per_s / world_size, 1)
    if tokens is not None:
        step |= {"tokens": sum(tokens), "step_s": round(sum(tokens) / point.tokens_per_s, 4)}
    for name in ("allocated", "reserved"):
        n_bytes = getattr(point, f"{name}_bytes")
        if n_bytes is not None:
            step[f"{name}_gib"] = round(n_bytes / GIB, 3)
    return step


def _result(text: str, spec: TrainSpec, lengths: Lengths) -> dict[str, Any]:
    if spec.stage == "evaluate":
        return {"report": json.loads(text)}
    report = TrainReport.model_validate_json(text)
    windows = training_windows(spec.simpo, len(lengths)) if spec.simpo else [None] * report.n_steps
    tokens = [[sum(lengths[index]) for index in window] if window else None for window in windows]
    kept = ("plan", "backend", "world_size", "n_tokens_seen", "n_tokens_scored", "wall_s", "idle_share")
    return {
        **{name: getattr(report, name) for name in kept},
        "allocated_gib": round(report.peak_memory_bytes / GIB, 3),
        "reserved_gib": round((report.peak_reserved_bytes or 0) / GIB, 3),
        "nvml_peak_gib": {use.rank: round(use.peak_used_bytes / GIB, 2) for use in report.gpus},
        "margins": [report.first_margin, report.last_margin],
        "steps": [_step(*step, report.world_size) for step in zip(report.curve, tokens, strict=True)],
        "settings": report.settings,
    }


_STEP = re.compile(r"step \d+/\d+ .*")


def run_case(name: str, folder: Path, results: Path, timeout_s: float, dry: bool) -> None:
    """Runs a case and appends what came of it, an error included."""
    case, out = CASES[name], folder / name
    out.mkdir(parents=True)
    lengths = [(max(64, a // DRY_DIVISOR), max(64, b // DRY_DIVISOR)) for a, b in case.lengths] if dry else case.lengths
    config = config_of(folder, case, dry)
    spec = _spec(folder, out, case, lengths, config)
    write_atomically(out / "spec.json", spec.model_dump_json(indent=2))
    started = time.monotonic()

    def log(line: str) -> None:
        with (out / "log.txt").open("a") as file:
            file.write(f"{time.monotonic() - started:7.1f} {line}\n")
        if found := _STEP.search(line):
            append_result(results, {"what": "step", "case": name, "after_s": _since(started), "line": found[0]})

    head = {"case": name, "lengths": lengths, "allowed_gib": config.model.gpu_gib, "host_gib": config.model.host_gib}
    try:
        launch(out / "spec.json", n_processes=case.n_processes, log=log, timeout_s=timeout_s)
    except (StageError, UserError) as error:
        if not (out / "report.json").is_file():  # it is there when the case ended while it was being stopped
            notes = "".join(getattr(error, "__notes__", []))[-3000:]
            append_result(results, {"what": "failed", **head, "error": str(error)[-3000:], "notes": notes})
            return
    found = _result((out / "report.json").read_text(), spec, lengths)
    append_result(results, {"what": "case", **head, "process_s": _since(started), **found})


def _since(started_s: float) -> float:
    return round(time.monotonic() - started_s, 1)


def first_gradient(out: Path) -> torch.Tensor:
    """The clipped gradient of step 1, all parameters in one vector: AdamW's first moment is (1 - beta1) times it."""
    saved = torch.load(out / "checkpoint-1" / "optimizer.pt", map_location="cpu", weights_only=True)
    moments = saved["state"]
    scale = 1 - saved["param_groups"][0]["betas"][0]
    return torch.cat([moments[index]["exp_avg"].double().flatten() for index in sorted(moments)]) / scale


def adapter_values(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def compare(one: str, other: str, folder: Path) -> dict[str, Any]:
    """Two one-step runs from the same adapter: gradients, parameters, and how far the step went."""
    gradients = [first_gradient(folder / name) for name in (one, other)]
    start, *after = (
        adapter_values(path) for path in (folder / "start", *(folder / n / "adapter" for n in (one, other)))
    )
    cosine = torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0)
    distance = gradients[0] - gradients[1]
    return {
        "what": "comparison",
        "cases": [one, other],
        "gradient_cosine": float(cosine),
        "gradient_relative_difference": float(distance.norm() / gradients[1].norm()),
        "largest_parameter_difference": float((after[0] - after[1]).abs().max()),
        "share_of_parameters_that_differ": float((after[0] != after[1]).double().mean()),
        "largest_step": float((after[0] - start).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    with_folder = argparse.ArgumentParser(add_help=False)
    with_folder.add_argument("--folder", type=Path, required=True)
    with_folder.add_argument("--dry", action="store_true")
    actions.add_parser("prepare", parents=[with_folder])
    for name in ("run", "compare"):
        action = actions.add_parser(name, parents=[with_folder])
        action.add_argument("out", type=Path)
        action.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
        action.add_argument("--commit", default="")
        action.add_argument("--deadline-s", type=float, default=3600, help="no case runs beyond this")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.action == "prepare":
        prepare(folder, options.dry)
    elif options.action == "compare":
        one, other = options.cases
        append_result(options.out, compare(one, other, folder))
    else:
        ends = time.monotonic() + options.deadline_s
        append_result(options.out, {"what": "machine", "gpus": torch.cuda.device_count(), **machine(options.commit)})
        for name in options.cases:
            left_s = ends - time.monotonic() - STOP_GRACE_S
            if left_s > 0:
                run_case(name, folder, options.out, left_s, options.dry)
            else:
                append_result(options.out, {"what": "not run", "case": name, "why": "no time was left"})


if __name__ == "__main__":
    main()
