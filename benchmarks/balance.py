"""How long ranks wait for one another: `python -m benchmarks.balance OUT.json --folder FOLDER`

The preference stage, started as the pipeline starts it, on pairs of uneven branches: dealt in order, split and
balanced, and by plan auto. Idle share is the share of the ranks' time spent waiting, as each step measures it and as
the cost model predicted it; the first step, which warms up, is left out. A rank needs a core (or GPU) of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from artifacts.store import Store, write_atomically
from benchmarks.made_up import Lengths, log_uniform, ref_of, write_pairs
from engine.loading import load_base, new_adapter, save_adapter
from schemas.config import LoraConfig, ModelConfig
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SimpoConfig
from tasks.launch import launch
from tasks.model import prepare_model

DEALINGS: dict[str, dict[str, Any]] = {
    "in order": {"plan": "parallel", "balanced": False},
    "split, balanced": {"plan": "parallel", "balanced": True},
    "auto": {"plan": "auto", "balanced": True},
}


def make_spec(folder: Path, lengths: Lengths, model_config: ModelConfig) -> TrainSpec:
    model = prepare_model(model_config, Store(folder / "store")).model
    vocab_size = json.loads((Path(model.path) / "config.json").read_text())["vocab_size"]
    branches, pairs = write_pairs(folder, lengths, vocab_size)
    base = load_base(model, model_config, torch.device("cpu"), 0)
    adapter = new_adapter(base, LoraConfig(), 0)
    save_adapter(adapter, folder / "start", base_name=model_config.name, model_sha256=model.sha256, stage="sft")
    return TrainSpec(
        stage="simpo",
        branches=(branches,),
        pairs=pairs,
        model=model,
        base=model_config,
        adapters={"start": ref_of(folder / "start", "adapter")},
    )


def measure(spec: TrainSpec, folder: Path, dealing: dict[str, Any], accumulation: int) -> dict[str, Any]:
    optimizer = OptimizerConfig(learning_rate=1e-5)
    config = SimpoConfig(accumulation=accumulation, n_processes=2, optimizer=optimizer, **dealing)
    folder.mkdir(parents=True)
    write_atomically(folder / "spec.json", spec.model_copy(update={"simpo": config}).model_dump_json())
    launch(folder / "spec.json", n_processes=2, log=print)
    report = TrainReport.model_validate_json((folder / "report.json").read_text())
    steps = report.curve[1:]
    return {
        "plan": report.plan,
        "idle_share": round(statistics.mean(step.idle_share or 0.0 for step in steps), 4),
        "exchange_share": round(statistics.mean(step.exchange_share or 0.0 for step in steps), 4),
        "tokens_per_s": round(report.n_tokens_seen / report.wall_s, 1),
        "steps": len(steps),
        "device": report.settings["device"],
        "engine": report.settings["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="new folder for inputs and runs")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs=2, default=(1_000, 10_000), metavar=("LOW", "HIGH"))
    parser.add_argument("--model", default="tiny-qwen3")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    spec = make_spec(options.folder, log_uniform(options.pairs, *options.tokens), ModelConfig(name=options.model))
    result = {
        "pairs": options.pairs,
        "pairs_per_step": options.accumulation,
        "tokens": list(options.tokens),
        "load_average": os.getloadavg()[0],
        "dealings": {
            name: measure(
                spec, options.folder / name.replace(", ", "-").replace(" ", "-"), dealing, options.accumulation
            )
            for name, dealing in DEALINGS.items()
        },
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
