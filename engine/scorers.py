"""The scorer of a stage, from its config: the one place where an engine is chosen.

Every trainer takes a scorer (`engine.scores`) and does not care which; the report says which it was.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from engine.attention import BACKENDS, fastest
from engine.budget import (
    LONG_CONTEXT_FAMILIES,
    Budget,
    EngineName,
    StagePlan,
    choose_engine,
    host_budget,
    memory_setup,
    scoring_plan,
    training_plan,
    unlimited_plan,
)
from engine.choose import longest_branch
from engine.collectives import gather
from engine.data import BranchTable
from engine.group import Group, least
from engine.host_memory import host_limits
from engine.layers import PACK_TOKENS, LongContextScorer, uncovered
from engine.loading import adapter_config
from engine.memory import ALL_LINEARS, GIB, Ledger, Setup
from engine.model_folder import AGAIN, read_json, reading, with_defaults
from engine.plan import MemoryPlan
from engine.scores import Scorer, token_logprobs
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import UserError
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig

OUTSIDE_ALLOCATOR_GIB = {False: 1.0, True: 2.2}
"""Kernels, and with several ranks NCCL, which come after the budget is measured: 0.92 and 2.16 GiB by NVML on an H200,
beyond a bare CUDA context."""

PLANNED_LENGTHS = 32
"""Lengths, evenly spread over the stage's, that the host buffer is sized by. Shorter branches may keep more there."""


@dataclass(frozen=True)
class Engine:
    """A scorer and why it is the one."""

    name: EngineName
    why: str
    scorer: Scorer
    longest_tokens: int
    ledger: Ledger | None = None
    """Of the longest branch; None where memory is not limited, and for the plain engine."""
    model_config: dict[str, Any] = field(default_factory=dict)
    setup: Setup | None = None
    budget: Budget | None = None
    """Of this rank; None off the GPU."""
    host_bytes: int = 0
    """What the branch, or pack of branches, that keeps most on the host needs there."""

    @property
    def planned(self) -> StagePlan:
        return StagePlan(self.name, self.longest_tokens, self.ledger, self.model_config, self.setup, self.budget)

    def longest_pair(self) -> int:
        """Most tokens of a pair, its common prefix counted once, that the long-context engine holds in one walk."""
        if self.setup is None or self.budget is None:
            return 2**31
        setup = self.setup.in_blocks()
        device_bytes, host_bytes = self.budget
        return longest_branch(self.model_config, setup, device_bytes=device_bytes, host_bytes=host_bytes)

    def agree_on_attention(self, model: nn.Module, group: Group) -> None:
        """One attention kernel on all ranks, the fastest by their times together. Were each to choose for itself, noise
        in the timings could have the two sides of a pair round differently. Call it once all have met.

        Raises:
            StageError: none runs on all of them.
            PeerLostError: a rank died.
        """
        if not isinstance(self.scorer, LongContextScorer):
            return
        self.scorer.choose_backend(model, self.longest_tokens, group.device)
        own_s = self.scorer.probe_s
        if not own_s:
            return  # off the GPU there is one
        all_s = gather(group, torch.tensor([own_s.get(name, math.inf) for name in BACKENDS], dtype=torch.float64))
        total_s = dict(zip(BACKENDS, all_s.sum(0).tolist(), strict=True))
        self.scorer.probe_s = {name: total_s[name] for name in own_s}
        self.scorer.backend = fastest(self.scorer.probe_s)

    def pin_host(self, device: torch.device, pair_tokens: int = 0) -> None:
        """Pins the host buffer once, before step 1: growing it with every longer branch would pin it many times.

        Args:
            pair_tokens: of the longest pair that is walked whole, its common prefix counted once.

        Raises:
            HostMemoryError: the host refuses.
        """
        n_bytes = self.host_bytes
        if pair_tokens and self.setup is not None and self.budget is not None:
            setup = self.setup.in_blocks()
            n_bytes = max(n_bytes, training_plan(self.model_config, pair_tokens, setup, self.budget)[1].host_bytes)
        if not isinstance(self.scorer, LongContextScorer) or not n_bytes:
            return
        limit, started_s = host_limits()[0], time.monotonic()
        print(f"host memory: {n_bytes / GIB:.1f} GiB to pin, {limit.available_bytes / GIB:.1f} are free")
        self.scorer.reserve_host(n_bytes, device)
        print(f"host memory: pinned in {time.monotonic() - started_s:.1f} s", flush=True)

    def attention(self, base: Any) -> str:
        """The kernels that this base model's branches take, once they are chosen."""
        if isinstance(self.scorer, LongContextScorer) and self.scorer.backends:
            return self.scorer.backends.names
        return str(base.config._attn_implementation)

    def settings(self, base: Any) -> dict[str, str]:
        """What was really in effect, for the report."""
        policy = self.ledger.plan.policy if self.ledger else "mlp" if self.name == "long_context" else "autograd"
        found = {"engine": f"{self.name} ({self.why})", "attention": self.attention(base), "policy": policy}
        if self.ledger is not None:
            found["predicted_device_gib"] = f"{self.ledger.peak_device_bytes / GIB:.2f}"
            found["predicted_host_gib"] = f"{self.ledger.host_bytes / GIB:.2f}"
        if self.host_bytes:
            found["reserved_host_gib"] = f"{self.host_bytes / GIB:.2f}"
        if torch.cuda.is_available():
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            found["allocator"] = next((os.environ[name] for name in names if name in os.environ), "PyTorch's defaults")
        return found


def measured_budget(base: ModelConfig, group: Group) -> Budget | None:
    """What every rank has of its GPU and of the host: free memory, less where the config says so. None on a CPU.

    A configured host memory is taken at its word against what the machine shows (a virtual machine may show only the
    part that was used so far), but not against a control group, which ends a process that goes beyond it. All ranks
    plan by the least of what they have, so that they compute in tiles of the same sizes.

    Raises:
        UserError: the control group leaves less than `model.host_gib`; or `model.deterministic` without memory that is
            there in every run, since tiles, and with them the order of sums, follow from it.
        PeerLostError: another rank died.
    """
    if group.device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(group.device)
    free_bytes -= int(OUTSIDE_ALLOCATOR_GIB[group.world_size > 1] * GIB)
    own_bytes = free_bytes if base.gpu_gib is None else min(free_bytes, int(base.gpu_gib * GIB))
    if base.deterministic and (base.gpu_gib is None or base.host_gib is None or own_bytes < int(base.gpu_gib * GIB)):
        raise UserError(
            f"memory has to be the same in every run, and {free_bytes / GIB:.1f} GiB of this GPU are free now",
            where="model.deterministic",
            fix="set model.gpu_gib, to no more than that, and model.host_gib",
        )
    host_bytes = host_budget(base.host_gib, host_limits()) // group.world_size
    return Budget(*least(group, "memory", (own_bytes, host_bytes)))


def hold_device(base: ModelConfig, device: torch.device) -> None:
    """Keeps PyTorch's allocator within `model.gpu_gib`."""
    if device.type == "cuda" and base.gpu_gib is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, base.gpu_gib * GIB / total_bytes), device)


def _lora_of(spec: TrainSpec) -> LoraConfig:
    """Rank, targets and dropout of the widest adapter of the spec; the defaults when it has none."""
    if spec.lora is not None:
        return spec.lora
    stored = [adapter_config(Path(ref.path)) for ref in spec.adapters.values()]
    return max(stored, key=lambda config: config.r * len(config.target_modules), default=LoraConfig())


def _pack_tokens(planned: Callable[[int], object]) -> int:
    """Tokens up to which short branches are packed: the most, by halves, whose plan fits; 0 where none does."""
    for halvings in range(4):
        with contextlib.suppress(UserError):
            planned(PACK_TOKENS >> halvings)
            return PACK_TOKENS >> halvings
    return 0


def long_context_problem(
    base: ModelConfig, config: dict[str, Any], lora: LoraConfig, longest_tokens: int, *, trains: bool
) -> str | None:
    """What keeps the long-context engine from a stage; None: nothing that can be known before the model is loaded."""
    model_type = config.get("model_type", "unknown")
    if model_type not in LONG_CONTEXT_FAMILIES or base.backend != "transformers":
        return f"{model_type} loaded by {base.backend} (it covers {', '.join(LONG_CONTEXT_FAMILIES)} by transformers)"
    if others := sorted(set(lora.target_modules) - set(ALL_LINEARS)):
        return f"LoRA on {others[0]}"
    if trains and lora.dropout > 0:
        return f"LoRA dropout ({lora.dropout:g})"
    return uncovered(AutoConfig.for_model(**config), longest_tokens, trains=trains)


def _n_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Tokens that the model has; None where config.json leaves it to the library."""
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def open_engine(
    spec: TrainSpec,
    branches: BranchTable,
    names: Sequence[str],
    group: Group,
    *,
    optimizer: OptimizerConfig | None,
    accumulating: bool,
    budget: Budget | None = None,
) -> Engine:
    """The engine that scores the named branches of a stage. Reads the model's config.json, loads no weight.

    Args:
        optimizer: None when the stage trains nothing.
        budget: memory of this rank; None: `measured_budget`.

    Raises:
        UserError: a branch cannot be scored, the longest one does not fit (says which length would), or the model is
            not covered.
    """
    config_path = Path(spec.model.path) / "config.json"
    config: dict[str, Any] = read_json(config_path) if config_path.is_file() else {}
    covered = config.get("model_type") in LONG_CONTEXT_FAMILIES
    if covered:
        with reading("transformers does not take it", config_path, AGAIN):
            config = with_defaults(config)
    branches.check(names, _vocab_size(config))
    rows, n_tokens, n_scored = branches.row_of, branches.column("n_tokens"), branches.column("n_scored")
    longest = max(n_tokens[rows[name]] for name in names)
    lora = _lora_of(spec)
    problem = long_context_problem(spec.base, config, lora, longest, trains=optimizer is not None)
    name, why = choose_engine(spec.base, problem, longest, on_gpu=group.device.type == "cuda")
    budget = budget or measured_budget(spec.base, group)
    if budget is None or not covered:
        scorer = LongContextScorer(lambda n: unlimited_plan(config, n)) if name == "long_context" else token_logprobs
        return Engine(name, why, scorer, longest, model_config=config)
    setup = memory_setup(
        spec.base,
        lora_rank=lora.r,
        lora_targets=lora.target_modules,
        optimizer=optimizer,
        n_scored=max(n_scored[rows[name]] for name in names),
        accumulating=accumulating,
        n_multiprocessors=_n_multiprocessors(group.device),
    )
    if name == "plain":
        return Engine(name, why, token_logprobs, longest, model_config=config, setup=setup, budget=budget)
    plan_and_ledger = scoring_plan if optimizer is None else training_plan

    @cache  # a plan takes about 20 ms, and a stage may have more lengths than a default cache holds
    def planned(length: int, several_blocks: bool = False) -> tuple[MemoryPlan, Ledger]:
        return plan_and_ledger(config, length, setup.in_blocks() if several_blocks else setup, budget)

    _, ledger = planned(longest)
    pack_tokens = _pack_tokens(lambda length: planned(length, several_blocks=True))
    lengths = sorted({n_tokens[rows[name]] for name in names}, reverse=True)
    some = lengths[:: math.ceil(len(lengths) / PLANNED_LENGTHS)]
    host_bytes = max(planned(length)[1].host_bytes for length in some)
    if pack_tokens:
        host_bytes = max(host_bytes, planned(pack_tokens, several_blocks=True)[1].host_bytes)
    scorer = LongContextScorer(
        lambda length: planned(length)[0],
        packed_plan_for=lambda length: planned(length, several_blocks=True)[0],
        pack_tokens=pack_tokens,
    )
    return Engine(name, why, scorer, longest, ledger, config, setup, budget, host_bytes)
