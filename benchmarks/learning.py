"""Do SFT and SimPO teach a model something that held-out tasks show? `python -m benchmarks.learning OUT --folder F`

Scripted agents really work on generated tasks; their runs are ingested, rendered, paired and trained on, as in a run of
the pipeline. Pair accuracy is the share of pairs of held-out tasks whose chosen run has the higher mean log-probability
per scored token; its interval resamples tasks (95 %, bootstrap).

The control trains on the same pairs after half of each kind of pair had chosen and rejected swapped: what is left then
is no preference, and it must stay at chance. It starts from a fresh adapter, which prefers neither side. From the SFT
adapter it would not: SimPO weighs the pairs it has wrong more, so balanced labels pull any initial margin to zero.
Held-out pairs are alike (a careful run against a careless one), so one control gets nearly all of them right or nearly
all wrong, by the luck of its draw. So there are several draws, each with its mirror image, in which just the other half
is swapped: luck cancels between the two, a pull that does not come from labels would not. The control's interval
resamples draws and tasks.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.store import Store
from artifacts.tables import open_table, write_table
from schemas.config import LoraConfig, ModelConfig, PairsConfig, RenderConfig, SourceConfig, SplitConfig
from schemas.refs import Ref
from schemas.reports import Paired
from schemas.tables import PAIRS
from schemas.training import OptimizerConfig, SftConfig, SimpoConfig
from tasks.ingest import ingest
from tasks.model import prepare_model
from tasks.pairs import build_pairs
from tasks.render import render
from tasks.sample.generate import generate_samples
from tasks.sft import sft
from tasks.simpo import simpo

MODEL = ModelConfig(name="tiny-qwen3")
LORA = LoraConfig(r=8, alpha=16.0)
SFT = SftConfig(epochs=1, optimizer=OptimizerConfig(learning_rate=4e-3))
SIMPO = SimpoConfig(epochs=2, accumulation=2, plan="sequential", optimizer=OptimizerConfig(learning_rate=2e-3))


def kind_of(pair: dict[str, Any]) -> tuple[str, bool]:
    """Pairs of one kind favour the same surface features, so a control must be balanced within each."""
    return pair["rule"], pair["chosen_n_tokens"] > pair["rejected_n_tokens"]


def with_shuffled_labels(paired: Paired, folder: Path, store: Store, seed: int, *, mirrored: bool) -> Paired:
    """The pairs with chosen and rejected swapped in half of the training pairs of each kind, or in the other half."""
    rows = open_table(paired.pairs).to_pylist()
    members: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row["split"] == "train":
            members[kind_of(row)].append(index)
    draw, swapped = np.random.default_rng(seed), set[int]()
    for indices in members.values():
        order, half = draw.permutation(indices).tolist(), len(indices) // 2
        swapped |= set(order[half:] if mirrored else order[:half])
    for index in swapped:
        row = rows[index]
        for name in ("branch_id", "n_tokens", "n_scored"):
            one, other = f"chosen_{name}", f"rejected_{name}"
            row[one], row[other] = row[other], row[one]
    path = folder / "shuffled.arrow"
    write_table(path, PAIRS, rows)
    return paired.model_copy(update={"pairs": store.add(path, "pairs", n_rows=len(rows))})


def heldout_pairs(paired: Paired) -> list[dict[str, Any]]:
    return [row for row in open_table(paired.pairs).to_pylist() if row["split"] == "heldout"]


def fresh_adapter(model: Ref, folder: Path, store: Store) -> Ref:
    """An adapter that changes nothing yet."""
    from engine.group import Group
    from engine.loading import load_base, new_adapter, save_adapter

    adapter = new_adapter(load_base(model, MODEL, Group().device, 0), LORA, seed=0)
    save_adapter(adapter, folder / "fresh", base_name=MODEL.name, model_sha256=model.sha256, stage="sft")
    return store.add(folder / "fresh", "adapter")


def mean_logps(model: Ref, adapter: Ref | None, tables: tuple[Ref, ...], names: list[str]) -> dict[str, float]:
    """branch_id -> mean log-probability per scored token under the base model with one adapter, or without."""
    from engine.data import BranchTable
    from engine.evaluate import score_branches
    from engine.group import Group
    from engine.loading import load_adapter, load_base
    from engine.scores import token_logprobs

    group = Group()
    loaded: Any = load_base(model, MODEL, group.device, 0)
    if adapter is not None:
        loaded = load_adapter(loaded, adapter, model, trainable=False)
    scores = score_branches(loaded.eval(), BranchTable(tables), names, 8192, group, token_logprobs)
    return {name: score.mean_logp for name, score in scores.items()}


def wins_by_task(pairs: list[dict[str, Any]], values: dict[str, float]) -> dict[str, list[float]]:
    """task_id -> 1 for each pair whose chosen run has the higher value, else 0."""
    wins: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        wins[pair["task_id"]].append(float(values[pair["chosen_branch_id"]] > values[pair["rejected_branch_id"]]))
    return dict(wins)


def share_with_interval(groups: list[dict[str, list[float]]], seed: int = 0, n_samples: int = 10_000) -> dict[str, Any]:
    """Mean over the pairs of all groups (draws), and its 95 % interval, groups and tasks resampled."""
    tasks = sorted(groups[0])
    sums_GK, sizes_GK = (
        np.array([[function(group[task]) for task in tasks] for group in groups]) for function in (np.sum, len)
    )
    draw = np.random.default_rng(seed)
    shares = []
    for _ in range(n_samples):
        drawn = np.ix_(draw.integers(len(groups), size=len(groups)), draw.integers(len(tasks), size=len(tasks)))
        shares.append(sums_GK[drawn].sum() / sizes_GK[drawn].sum())
    interval = np.quantile(shares, [0.025, 0.975])
    return {
        "share": round(float(sums_GK.sum() / sizes_GK.sum()), 4),
        "ci95": [round(float(edge), 4) for edge in interval],
    }


def gain(after: dict[str, list[float]], before: dict[str, list[float]]) -> dict[str, list[float]]:
    return {task: [a - b for a, b in zip(after[task], before[task], strict=True)] for task in after}


def mean_margin(pairs: list[dict[str, Any]], values: dict[str, float]) -> float:
    return float(np.mean([values[pair["chosen_branch_id"]] - values[pair["rejected_branch_id"]] for pair in pairs]))


def git_commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


def run(folder: Path, n_tasks: int, tokens: tuple[int, int], n_draws: int, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    store = Store(folder / "store")
    samples = generate_samples(folder / "samples", n_tasks=n_tasks, seed=seed, target_tokens=tokens)
    ingested = ingest(SourceConfig(paths=(str(folder / "samples"),)), store)
    model = prepare_model(MODEL, store).model
    split = SplitConfig(heldout_share=0.5)
    rendered = render(ingested.trajectories, model, RenderConfig(max_tokens=16_384), split, store)
    paired = build_pairs(rendered.branches, ingested.trajectories, PairsConfig(max_pairs_per_task=2), store)
    tables = (rendered.branches,) if paired.derived_branches is None else (rendered.branches, paired.derived_branches)
    pairs = heldout_pairs(paired)
    names = sorted({pair[f"{side}_branch_id"] for pair in pairs for side in ("chosen", "rejected")})

    def scored(adapter: Ref | None) -> dict[str, float]:
        return mean_logps(model, adapter, tables, names)

    first = sft(rendered.branches, model, SFT, LORA, MODEL, store, log=print)
    second = simpo(paired, rendered.branches, model, first.adapter, SIMPO, MODEL, store, log=print)
    values = {"base": scored(None), "sft": scored(first.adapter), "simpo": scored(second.adapter)}
    fresh = fresh_adapter(model, folder, store)
    controls: list[dict[str, Any]] = []
    groups: list[dict[str, list[float]]] = []
    for draw in range(n_draws):
        both: dict[str, list[float]] = defaultdict(list)
        for mirrored in (False, True):
            shuffled = with_shuffled_labels(paired, folder, store, seed + draw, mirrored=mirrored)
            control = simpo(shuffled, rendered.branches, model, fresh, SIMPO, MODEL, store, log=print)
            of_control = scored(control.adapter)
            wins = wins_by_task(pairs, of_control)
            for task, of_task in wins.items():
                both[task] += of_task
            shown = {"draw": draw, "mirrored": mirrored, "margin": mean_margin(pairs, of_control)}
            controls.append(shown | {"share": share_with_interval([wins])["share"]})
            print(json.dumps(controls[-1]), flush=True)
        groups.append(dict(both))
    wins = {name: wins_by_task(pairs, of_model) for name, of_model in values.items()}
    return {
        "seed": seed,
        "runs": samples.n_runs,
        "tasks": {"train": n_tasks - len(wins["base"]), "heldout": len(wins["base"])},
        "length_tokens": rendered.report.length_tokens,
        "pairs": {"train": paired.report.by_split.get("train", 0), "heldout": len(pairs)},
        "models": {
            name: {"pair_accuracy": share_with_interval([wins[name]]), "margin": mean_margin(pairs, of_model)}
            for name, of_model in values.items()
        },
        "gain_of_simpo": {
            f"over_{name}": share_with_interval([gain(wins["simpo"], wins[name])]) for name in ("base", "sft")
        },
        "control": {"pair_accuracy": share_with_interval(groups), "runs": controls},
        "sft_loss": [first.report.first_loss, first.report.last_loss],
        "simpo_margin": [second.report.first_margin, second.report.last_margin],
        "wall_s": round(time.monotonic() - started, 1),
        "settings": second.report.settings,
        "processor": platform.processor() or platform.machine(),
        "commit": git_commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the results, as JSON")
    parser.add_argument("--folder", type=Path, required=True, help="where runs and artifacts are made")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--tokens", type=int, nargs=2, default=(2_000, 6_500), metavar=("LOW", "HIGH"))
    parser.add_argument("--draws", type=int, default=3, help="of shuffled labels, each with its mirror image")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    low, high = options.tokens
    result = run(options.folder, options.tasks, (low, high), options.draws, options.seed)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("models", "gain_of_simpo", "control")}, indent=2))


if __name__ == "__main__":
    main()
