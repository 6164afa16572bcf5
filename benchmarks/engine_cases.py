"""One case of the engine benchmark: timed steps of one length in one amount of memory, and checks at that length."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine_case import Case
from benchmarks.engine_common import N_SCORED, cap_device, median, peaks, random_branch, warm
from engine.attention import BACKENDS, AttentionBackend
from engine.choose import choose_plan
from engine.layers import LongContextScorer
from engine.memory import GIB, Setup, predict
from engine.plan import FIELDS, LayerPlan, MemoryPlan, Place
from engine.segments import one_row, scored_queries


class Bench:
    """A model with its scorer, ready for cases of any length."""

    def __init__(self, model: Any, config: dict[str, Any], setup: Setup, device: torch.device, host_bytes: int) -> None:
        self.model, self.config, self.setup, self.device, self.host_bytes = model, config, setup, device, host_bytes
        self.plans: dict[int, MemoryPlan] = {}
        self.scorer = LongContextScorer(self.plans.__getitem__, chunk_positions=setup.chunk_positions, pack_tokens=0)
        self.trained = [p for p in model.parameters() if p.requires_grad]

    @property
    def n_scored(self) -> int:
        return self.setup.n_scored

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def fresh(self, gib: float) -> None:
        """An empty allocator, held to gib, whatever a case before left behind."""
        for parameter in self.trained:
            parameter.grad = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            cap_device(gib)

    def branch(self, n_tokens: int, seed: int) -> tuple[Tensor, ...]:
        return random_branch(n_tokens, self.n_scored, self.config["vocab_size"], seed, str(self.device))

    def plan(self, case: Case) -> MemoryPlan:
        allowed_bytes = int((case.plan_gib or case.gib) * GIB)
        plan, _ = choose_plan(
            self.config, case.n_tokens, self.setup, device_bytes=allowed_bytes, host_bytes=self.host_bytes
        )
        layers = list(plan.layers)
        if case.stride is not None:
            for index, layer in enumerate(layers):
                place = "host" if index % case.stride == 0 else layer.gate_up if layer.gate_up == "device" else None
                layers[index] = layer.model_copy(update={"gate_up": place or "recompute"})
        staged = case.staged or plan.staged_qkv
        if staged:
            layers = [layer.model_copy(update={"qkv": _not_on_device(layer.qkv)}) for layer in layers]
        if case.place == "device":
            layers, staged = [_on_device(layer) for layer in layers], False
        return MemoryPlan(
            policy="auto", layers=tuple(layers), tile_tokens=plan.tile_tokens,
            head_groups=case.groups or plan.head_groups, staged_qkv=staged, tile_buffers=plan.tile_buffers,
        )  # fmt: skip


def _not_on_device(place: Place) -> Place:
    return "recompute" if place == "device" else place


def _on_device(layer: LayerPlan) -> LayerPlan:
    return layer.model_copy(update={field: "device" for field in FIELDS if getattr(layer, field) == "host"})


def plan_summary(plan: MemoryPlan) -> dict[str, Any]:
    """Where each activation of each layer is (h: host, d: device, -: recomputed), and the sizes."""
    letters = {"host": "h", "device": "d", "recompute": "-"}
    layers = {field: "".join(letters[getattr(layer, field)] for layer in plan.layers) for field in FIELDS}
    sizes = plan.model_dump(include={"tile_tokens", "head_groups", "tile_buffers", "staged_qkv"})
    return sizes | {"layers": layers}


class BackwardStoppedError(RuntimeError):
    """Raised in place of a further layer's attention backward."""


def stop_after(backend: AttentionBackend, calls: int) -> AttentionBackend:
    """The backend, whose backward may run so many times."""
    left = calls

    def backward(*arguments: Any) -> Any:
        nonlocal left
        if left == 0:
            raise BackwardStoppedError
        left -= 1
        return backend.backward(*arguments)

    return backend._replace(backward=backward)


def n_last_rows(branch: tuple[Tensor, ...]) -> int:
    """Rows that the last layer computes beyond keys and values."""
    return scored_queries(one_row(branch[0].shape[1]), (branch[3] - 1).tolist()).n_rows


def attention_of(bench: Bench, n_tokens: int) -> str | None:
    """The kernel that the engine takes for a branch of that length."""
    return bench.scorer.backends.of(n_tokens, n_tokens).name if bench.scorer.backends else None


def steps_of(bench: Bench, case: Case) -> Iterator[dict[str, Any]]:
    """Forward, backward and optimiser step, `case.steps` times, each measured."""
    optimiser = torch.optim.AdamW(bench.trained, lr=1e-5, fused=bench.device.type == "cuda")
    probed = bench.scorer.choose_backend(bench.model, case.n_tokens, bench.device)
    whole = probed
    if case.attention:  # a name of its own keeps small blocks from going to another one
        whole = BACKENDS[case.attention]._replace(name=f"{case.attention} only")
    bench.scorer.backend = whole
    if case.layers is not None:
        bench.scorer.backend = stop_after(whole, case.layers * bench.plans[case.n_tokens].head_groups)
    try:
        for step, n_tokens in enumerate(case.lengths):
            yield _step(bench, optimiser, bench.branch(n_tokens, step))
    finally:
        bench.scorer.backend = probed


def _step(bench: Bench, optimiser: torch.optim.Optimizer, branch: tuple[Tensor, ...]) -> dict[str, Any]:
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    bench.synchronize()
    start = time.perf_counter()
    logp_P = bench.scorer(bench.model, *branch)
    bench.synchronize()
    middle = time.perf_counter()
    norm = torch.zeros(())
    with contextlib.suppress(BackwardStoppedError):
        (-logp_P.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(bench.trained, 1.0)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    bench.synchronize()
    end = time.perf_counter()
    return {
        "forward_s": middle - start, "step_s": end - start, "grad_norm": float(norm),
        "finite": bool(torch.isfinite(logp_P).all() and torch.isfinite(norm)),
        "n_scored": logp_P.numel(), "n_last_rows": n_last_rows(branch), **peaks(),
    }  # fmt: skip


def run_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Timed steps of one length under one plan, with the ledger beside what was allocated."""
    bench.fresh(case.gib)
    bench.plans |= {n_tokens: bench.plan(replace(case, n_tokens=n_tokens)) for n_tokens in case.lengths}
    plan = bench.plans[case.n_tokens]
    records = list(steps_of(bench, case))
    steps_s = [record["step_s"] for record in records]
    step_s = median(warm(steps_s))
    setup = bench.setup.model_copy(update={"n_last_rows": records[0]["n_last_rows"]})
    ledger = predict(bench.config, case.n_tokens, plan, setup)
    return {
        "what": "walk" if case.layers is None else f"forward, and backward of the last {case.layers} layers",
        "tokens_attended": case.n_tokens,
        "positions_scored": records[0]["n_scored"],
        "allowed_gib": case.gib,
        "step_s": round(step_s, 4),
        "forward_s": round(median(warm([record["forward_s"] for record in records])), 4),
        "steps_s": [round(seconds, 4) for seconds in steps_s],
        "tokens_per_s": round(case.n_tokens / step_s, 1),
        "steps_timed": len(warm(steps_s)),
        **{key: max(record[key] for record in records) for key in ("allocated_gib", "reserved_gib")},
        "ledger_gib": round(ledger.peak_device_bytes / GIB, 3),
        "ledger_moment": ledger.peak_moment,
        "host_gib": round(bench.scorer.host_bytes / GIB, 2),
        "host_plan_gib": round(ledger.host_bytes / GIB, 2),
        "n_last_rows": records[0]["n_last_rows"],
        "attention": f"{case.attention} only" if case.attention else attention_of(bench, case.n_tokens),
        **({"lengths": case.lengths} if case.shorter else {}),
        "finite": all(record["finite"] for record in records),
        "grad_norms": [float(f"{record['grad_norm']:.4g}") for record in records],
        "plan": plan_summary(plan),
    }


def first_token_check(bench: Bench, n_tokens: int, gib: float) -> dict[str, Any]:
    """Whether the first token of a branch changes the score of its last one, at full length; forward only.

    A quarter of the length is scored twice: equal to the last bit, so that any difference is the first token's.
    """
    bench.fresh(gib)

    def scores(length: int, first_token: int) -> Tensor:
        bench.plans[length] = bench.plan(Case(length, gib))
        ids_1T, *rest = bench.branch(length, 0)
        ids_1T[0, 0] = first_token
        with torch.no_grad():
            return bench.scorer(bench.model, ids_1T, *rest)

    repeated = scores(n_tokens // 4, 1) - scores(n_tokens // 4, 1)
    one_P, other_P = scores(n_tokens, 1), scores(n_tokens, 2)
    return {
        "what": "first token",
        "tokens_attended": n_tokens,
        "positions_scored": one_P.numel(),
        "last_position": int(bench.branch(n_tokens, 0)[3].max()),
        "change_when_repeated": float(repeated.abs().max()),
        "logp_of_last": float(one_P[-1]),
        "change_of_last_by_first_token": float(other_P[-1] - one_P[-1]),
        "positions_changed": int((other_P != one_P).sum()),
    }


def idle_of_step(bench: Bench, n_tokens: int) -> dict[str, Any]:
    """One profiled step: for how much of it no kernel ran, before which kernels, and how long copies took beside them.

    The plan must have been used by a case before. What a compute stream waits for copies is part of its idle time.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        (-bench.scorer(bench.model, *bench.branch(n_tokens, 99)).mean()).backward()
        torch.cuda.synchronize()
    for parameter in bench.trained:
        parameter.grad = None
    spans: list[tuple[int, int, str]] = []
    copied_ns = {"DtoH": 0, "HtoD": 0}
    kernels_ns: dict[str, int] = {}
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type().name != "CUDA" or event.duration_ns() == 0:
            continue
        name = event.name()
        if name.startswith("Memcpy"):
            for direction in copied_ns:
                copied_ns[direction] += event.duration_ns() * (direction in name)
        elif not name.startswith("Memset"):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), name))
            kernels_ns[name] = kernels_ns.get(name, 0) + event.duration_ns()
    spans.sort()
    busy_ns, end_ns, before = 0, spans[0][0], ""
    gaps_ns: dict[str, int] = {}
    for start_ns, stop_ns, name in spans:
        busy_ns += max(0, stop_ns - max(start_ns, end_ns))
        gap = f"{before[:60]} > {name[:60]}"
        gaps_ns[gap] = gaps_ns.get(gap, 0) + max(0, start_ns - end_ns)
        end_ns, before = max(end_ns, stop_ns), name
    whole_ns = end_ns - spans[0][0]
    return {
        "what": "idle",
        "tokens_attended": n_tokens,
        "step_s": round(whole_ns / 1e9, 3),
        "kernels_s": round(busy_ns / 1e9, 3),
        "idle_share": round(1 - busy_ns / whole_ns, 4),
        "copies_out_s": round(copied_ns["DtoH"] / 1e9, 3),
        "copies_in_s": round(copied_ns["HtoD"] / 1e9, 3),
        "largest_kernels_ms": _largest_ms(kernels_ns),
        "largest_gaps_ms": _largest_ms(gaps_ns),
    }


def _largest_ms(found_ns: dict[str, int], count: int = 24) -> dict[str, float]:
    return {
        name[:130]: round(ns / 1e6, 1) for name, ns in sorted(found_ns.items(), key=lambda item: -item[1])[:count]
    }  # fmt: skip


def setup_of(dry: bool) -> Setup:
    return Setup(base="fp32", align=1, n_scored=64) if dry else Setup(base="nf4", n_scored=N_SCORED)
