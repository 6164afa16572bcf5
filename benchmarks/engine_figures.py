"""Draws docs/img/engine_longcontext.svg from the committed results: python -m benchmarks.engine_figures"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.engine_common import config_dict
from benchmarks.engine_floor import floor_s

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "traceforge"

import matplotlib.pyplot as plt  # noqa: E402  (the drawing backend is chosen first)

ROOT = Path(__file__).parent.parent


def best_by_length(cases: list[dict[str, Any]], limit_gib: float = 23.5) -> list[dict[str, Any]]:
    """The fastest case of each length within the memory of one 24 GiB card."""
    best: dict[int, dict[str, Any]] = {}
    for case in cases:
        length = case["tokens_attended"]
        if case["allowed_gib"] <= limit_gib and case["step_s"] < best.get(length, {"step_s": 1e9})["step_s"]:
            best[length] = case
    return [best[length] for length in sorted(best)]


def main() -> None:
    results = json.loads((ROOT / "benchmarks/results/engine_h200.json").read_text())
    cases = best_by_length([case for case in results["cases"] if case["what"] == "walk"])
    lengths = [case["tokens_attended"] / 1024 for case in cases]
    peaks = results["runs"][max(case["run"] for case in cases)]["peaks_tflops"]
    floor_lengths = [2 ** (i / 4) for i in range(36)]
    floor = [1024 * n / floor_s(config_dict(), int(1024 * n), peaks) for n in floor_lengths]
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    speed.plot(floor_lengths, floor, color="0.6", label="floor at measured peaks")
    speed.plot(lengths, [case["tokens_per_s"] for case in cases], "o-", label="traceforge")
    names = {"trl": "TRL", "transformers": "transformers + peft"}
    others: dict[str, list[dict[str, Any]]] = {}
    for row in [row for row in results["unsloth"] + results["peers"] if "step_s" in row]:
        others.setdefault(names[row["peer"]] if "peer" in row else "Unsloth", []).append(row)
    for (name, rows), marker in zip(others.items(), "s^v", strict=False):
        speed.plot(
            [row["tokens_attended"] / 1024 for row in rows], [row["tokens_per_s"] for row in rows], marker, label=name
        )
    speed.set(xscale="log", yscale="log", xlabel="K tokens of one branch", ylabel="tokens / s, one whole step")
    memory.plot(lengths, [case["ledger_gib"] for case in cases], "x", color="C3", zorder=3, label="ledger")
    memory.plot(lengths, [case["allocated_gib"] for case in cases], "o", label="allocated")
    memory.plot(lengths, [case["allowed_gib"] for case in cases], "_", markersize=14, color="k", label="allowed")
    memory.set(xscale="log", ylim=(0, 25), xlabel="K tokens of one branch", ylabel="GiB on the device")
    for axes in (speed, memory):
        axes.set_xticks([1, 4, 16, 64, 128, 384], [1, 4, 16, 64, 128, 384])
        axes.legend(frameon=False, loc="lower left")
        axes.grid(alpha=0.3)
    target = ROOT / "docs/img/engine_longcontext.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
