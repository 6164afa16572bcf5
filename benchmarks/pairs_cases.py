"""What `benchmarks.pairs_two_gpus` runs: lengths of the pairs, and what differs from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.made_up import Lengths, log_uniform
from engine.schedule import training_windows
from schemas.training import SimpoConfig


@dataclass(frozen=True)
class Case:
    """One run of a stage: the lengths of its pairs, and what differs from the configuration."""

    lengths: Lengths
    n_processes: int = 2
    stage: str = "simpo"
    simpo: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    host_gib: float = 48
    n_shared: int = 0


def seen_in_order(lengths: Lengths) -> Lengths:
    """The pairs in the order of the table that makes the stage, which shuffles, work on them in the given order."""
    order = training_windows(SimpoConfig(), len(lengths))
    table: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for pair, (place,) in zip(lengths, order, strict=True):
        table[place] = pair
    return table


SHORT = [(2048, 1800)]
MIX = log_uniform(24, 1024, 16_384)
UNEVEN = log_uniform(24, 4096, 49_152)
FEW_SHORT = log_uniform(10, 1024, 2048)
EVEN = [(16_384, 16_384)] * 3 + [(32_768, 32_768)] * 3
LONG = [(81_851, 81_851)] * 5 + [(131_072, 131_072)] * 5
ONE_STEP = {"save_steps": 1}
WALK = {"engine": "long_context"}
SEQUENTIAL = {"plan": "sequential"}
CASES: dict[str, Case] = {
    "long": Case(seen_in_order(LONG), host_gib=160),
    "long-shared": Case(seen_in_order(LONG), host_gib=96),
    "card-12gib": Case([(81_851, 81_851)], 1, simpo=SEQUENTIAL, base={"gpu_gib": 11.5}, host_gib=56),
    "card-12gib-left": Case([(81_851, 81_851)] * 2, 1, simpo=SEQUENTIAL, base={"gpu_gib": 10.2}, host_gib=56),
    "even-two": Case(seen_in_order(EVEN), simpo={"plan": "parallel"}, host_gib=59),
    "even-one": Case(seen_in_order(EVEN), 1, simpo=SEQUENTIAL, host_gib=59),
    "mix-in-order": Case(MIX, simpo={"plan": "parallel", "balanced": False, "accumulation": 8}),
    "mix-auto": Case(MIX, simpo={"accumulation": 8}),
    "uneven-in-order": Case(UNEVEN, simpo={"plan": "parallel", "balanced": False, "accumulation": 8}, host_gib=96),
    "uneven-auto": Case(UNEVEN, simpo={"accumulation": 8}, host_gib=96),
    "exact-two": Case(SHORT, simpo={"plan": "parallel"} | ONE_STEP),
    "exact-one": Case(SHORT, 1, simpo=SEQUENTIAL | ONE_STEP),
    "exact-one-again": Case(SHORT, 1, simpo=SEQUENTIAL | ONE_STEP),
    "walk-two": Case(SHORT, simpo={"plan": "parallel"} | ONE_STEP, base=WALK),
    "walk-one": Case(SHORT, 1, simpo=SEQUENTIAL | ONE_STEP, base=WALK),
    "fixed-two": Case(SHORT, simpo={"plan": "parallel"} | ONE_STEP, base=WALK | {"deterministic": True}),
    "fixed-one": Case(SHORT, 1, simpo=SEQUENTIAL | ONE_STEP, base=WALK | {"deterministic": True}),
    "fifty-steps": Case(log_uniform(50, 1024, 2048), simpo={"plan": "parallel", "save_steps": 50}),
    "short-plain": Case(FEW_SHORT, 1, simpo=SEQUENTIAL, base={"engine": "plain"}),
    "short-walk": Case(FEW_SHORT, 1, simpo=SEQUENTIAL, base=WALK),
    "sft": Case(log_uniform(4, 2048, 16_384), 1, stage="sft"),
    "evaluate": Case(log_uniform(4, 2048, 12_288), 1, stage="evaluate"),
    "unsloth-sft": Case(log_uniform(4, 1024, 4096), 1, stage="sft", base={"backend": "unsloth"}),
    "unsloth-pairs": Case(log_uniform(4, 1024, 4096), simpo={"plan": "parallel"}, base={"backend": "unsloth"}),
    "shared-prefix": Case([(81_851, 81_851)] * 3, 1, simpo={"plan": "shared_prefix"}, host_gib=56, n_shared=77_755),
    "one-branch": Case([(81_851, 81_851)] * 3, 1, stage="sft", host_gib=56),
    "whole-again": Case([(81_851, 81_851)] * 2, 1, simpo=SEQUENTIAL, host_gib=56, n_shared=77_755),
}
