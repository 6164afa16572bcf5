"""Memory and speed of the long-context engine on one GPU, with the floor measured in the same run.

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m benchmarks.engine_longcontext OUT.jsonl \
        cases 32768@23.5 65536@23.5 81920@11 --host-gib 110 --steps 3

A case is TOKENS@GIB: the branch's length and the device memory allowed (allocator held to it). Each step is a forward,
a backward and an optimiser step on data of its own; the first is not timed. `dry` runs everything on a tiny CPU model.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_common import (
    N_SCORED,
    append_result,
    cap_device,
    config_dict,
    machine,
    median,
    peaks,
    random_branch,
    random_nf4_model,
    with_lora,
)
from engine.attention import BACKENDS, AttentionBackend
from engine.choose import choose_plan
from engine.layers import LongContextScorer
from engine.memory import GIB, Setup, predict
from engine.plan import FIELDS, MemoryPlan, uniform_plan

WALK_WARM_UP_STEPS = 1


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plan_summary(plan: MemoryPlan) -> dict[str, Any]:
    """Layers per place for each activation, and the sizes."""
    counts = {
        field: {place: sum(getattr(layer, field) == place for layer in plan.layers) for place in ("device", "host")}
        for field in FIELDS
    }
    return {"tile_tokens": plan.tile_tokens, "head_groups": plan.head_groups, "layers_kept": counts}


class BackwardStoppedError(RuntimeError):
    """Raised in place of a further layer's attention backward."""


def stop_after(backend: AttentionBackend, calls: int) -> AttentionBackend:
    """The backend, whose backward may run so many times: memory of a long branch is at its peak from the first on."""
    left = calls

    def backward(*arguments: Any) -> Any:
        nonlocal left
        if left == 0:
            raise BackwardStoppedError
        left -= 1
        return backend.backward(*arguments)

    return backend._replace(backward=backward)


def run_case(
    model: Any,
    scorer: LongContextScorer,
    plans: dict[int, MemoryPlan],
    config: dict[str, Any],
    n_tokens: int,
    plan: MemoryPlan,
    *,
    steps: int,
    n_scored: int,
    device: str,
    setup: Setup,
    backward_layers: int | None = None,
) -> dict[str, Any]:
    """Timed steps of one length under one plan, with the ledger beside what was allocated.

    `backward_layers`: the whole forward, then the backward of so many layers only, where device time is short.
    """
    plans[n_tokens] = plan
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    records, finite, n_scored_here = [], True, 0
    for step in range(steps):
        if device == "cuda":
            if step == 0:  # from here on memory is as the allocator keeps it, as in a real run
                gc.collect()
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        branch = random_branch(n_tokens, n_scored, config["vocab_size"], step, device)
        _synchronize()
        whole = scorer.choose_backend(model, n_tokens, torch.device(device))
        if backward_layers is not None:
            scorer.backend = stop_after(whole, backward_layers * plan.head_groups)
        start = time.perf_counter()
        logp_P = scorer(model, *branch)
        _synchronize()
        middle = time.perf_counter()
        finite, n_scored_here = finite and bool(torch.isfinite(logp_P).all()), logp_P.numel()
        try:
            (-logp_P.mean()).backward()
            optimiser.step()
            stopped = False
        except BackwardStoppedError:
            stopped = True
        if stopped != (backward_layers is not None and backward_layers < len(plan.layers)):
            raise ValueError(f"backward ran over {'fewer' if stopped else 'more'} layers than asked for")
        scorer.backend = whole
        optimiser.zero_grad(set_to_none=True)
        _synchronize()
        records.append({"forward_s": middle - start, "step_s": time.perf_counter() - start, **peaks()})
    timed = records[WALK_WARM_UP_STEPS:] or records
    step_s = median([record["step_s"] for record in timed])
    ledger = predict(config, n_tokens, plan, setup)
    return {
        "what": "walk" if backward_layers is None else f"forward, and backward of the last {backward_layers} layers",
        "tokens_attended": n_tokens,
        "positions_scored": n_scored_here,
        "step_s": round(step_s, 4),
        "forward_s": round(median([record["forward_s"] for record in timed]), 4),
        "first_step_s": round(records[0]["step_s"], 3),
        "tokens_per_s": round(n_tokens / step_s, 1),
        "steps_timed": len(timed) if len(records) > 1 else 0,
        **{key: max(record[key] for record in records) for key in ("allocated_gib", "reserved_gib")},
        "ledger_gib": round(ledger.peak_device_bytes / GIB, 3),
        "ledger_moment": ledger.peak_moment,
        "host_gib": round(scorer.host_bytes / GIB, 2),
        "host_plan_gib": round(ledger.host_bytes / GIB, 2),
        "attention": scorer.backend.name if scorer.backend else None,
        "finite": finite,
        "plan": plan_summary(plan),
    }


def measured_peaks(n_tokens: int = 32768) -> dict[str, float]:
    """TFLOP/s of a large bfloat16 matmul and of the fastest attention, forward and backward, warm."""

    def rate(work: Any, operations: float, repeats: int) -> float:
        work()
        seconds = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return operations / median(seconds) / 1e12

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = {"matmul": rate(lambda: a @ b, 2 * 8192**3, 20)}
    q = torch.randn(n_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(n_tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    forward_operations = 4 * n_tokens**2 * 32 * 128 / 2
    for name in ("cudnn", "flash"):
        backend = BACKENDS[name]
        out, lse = backend.forward(q, k, v, 128**-0.5, True)
        grad = torch.randn_like(out)
        result[f"{name}_forward"] = rate(
            lambda backend=backend: backend.forward(q, k, v, 128**-0.5, True), forward_operations, 3
        )
        result[f"{name}_backward"] = rate(
            lambda backend=backend, out=out, lse=lse, grad=grad: backend.backward(
                grad, q, k, v, out, lse, 128**-0.5, True
            ),
            2.5 * forward_operations, 3,
        )  # fmt: skip
    return {key: round(value, 1) for key, value in result.items()}


def floor_s(config: dict[str, Any], n_tokens: int, peak_tflops: dict[str, float]) -> float:
    """Seconds of forward + backward at the measured peaks, nothing recomputed, LoRA and elementwise work free."""
    hidden, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    weights = hidden * (2 * query + 2 * key + 3 * mlp)
    matmul = 4 * n_tokens * weights * config["num_hidden_layers"]
    attention = 2 * n_tokens**2 * query * config["num_hidden_layers"]
    forward = max(peak_tflops["cudnn_forward"], peak_tflops["flash_forward"])
    backward = max(peak_tflops["cudnn_backward"], peak_tflops["flash_backward"])
    return (matmul / peak_tflops["matmul"] + attention / forward + 2.5 * attention / backward) / 1e12


def _case(text: str) -> tuple[int, float, dict[str, str]]:
    """TOKENS@GIB[,key=value...]; keys: policy, tile, groups, steps, layers (of backward)."""
    head, *options = text.split(",")
    tokens, gib = head.split("@")
    return int(tokens), float(gib), dict(option.split("=", 1) for option in options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("mode", choices=["cases", "dry"])
    parser.add_argument("cases", nargs="*", type=_case)
    parser.add_argument("--host-gib", type=float, default=110.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--headroom-gib", type=float, default=0.0, help="kept free of the plan within the allowance")
    parser.add_argument("--reserve-host-gib", type=float, default=0.0, help="pin this much before the first case")
    parser.add_argument("--commit", default="", help="for the result file, where the checkout has no git")
    parser.add_argument("--profile", type=int, default=0, help="also profile one step of this length")
    arguments = parser.parse_args()
    dry = arguments.mode == "dry"
    device = "cpu" if dry else "cuda"
    config = config_dict()
    if dry:
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8}
        config |= small | {"head_dim": 8, "vocab_size": 200}
        from transformers import AutoConfig, AutoModelForCausalLM

        model = with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
        setup = Setup(base="fp32", align=1, n_scored=64)
    else:
        cap_device(arguments.cases[0][1])
        started = time.perf_counter()
        model = random_nf4_model(config)
        print(
            f"model in {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True
        )
        setup = Setup(base="nf4", n_scored=N_SCORED)
    plans: dict[int, MemoryPlan] = {}
    scorer = LongContextScorer(plans.__getitem__, chunk_positions=setup.chunk_positions)
    if arguments.reserve_host_gib and not dry:
        started = time.perf_counter()
        scorer.reserve_host(int(arguments.reserve_host_gib * GIB), torch.device("cuda", 0))
        print(f"pinned {arguments.reserve_host_gib} GiB in {time.perf_counter() - started:.1f} s", flush=True)
    append_result(arguments.out, {"what": "machine", **machine(arguments.commit)})
    peak_tflops: dict[str, float] = {}
    if not dry:
        peak_tflops = measured_peaks()
        append_result(arguments.out, {"what": "peaks_tflops", **peak_tflops})
    for n_tokens, gib, options in arguments.cases:
        result: dict[str, Any] = {"allowed_gib": gib, **options}
        if not dry:
            cap_device(gib)
        try:
            budget = int((gib - arguments.headroom_gib) * GIB)
            plan, _ = choose_plan(
                config, n_tokens, setup, device_bytes=budget, host_bytes=int(arguments.host_gib * GIB)
            )
            if "policy" in options:
                plan = uniform_plan(
                    options["policy"], config["num_hidden_layers"],  # type: ignore[arg-type]
                    tile_tokens=plan.tile_tokens, head_groups=plan.head_groups,
                )  # fmt: skip
            sizes = {"tile_tokens": int(options.get("tile", plan.tile_tokens)),
                     "head_groups": int(options.get("groups", plan.head_groups))}  # fmt: skip
            plan = plan.model_copy(update=sizes)
            result |= run_case(
                model, scorer, plans, config, n_tokens, plan, steps=int(options.get("steps", arguments.steps)),
                n_scored=setup.n_scored, device=device, setup=setup,
                backward_layers=int(options["layers"]) if "layers" in options else None,
            )  # fmt: skip
            if peak_tflops:
                floor = floor_s(config, n_tokens, peak_tflops)
                result |= {"floor_tokens_per_s": round(n_tokens / floor, 1)}
                if "layers" not in options:
                    result |= {"share_of_floor": round(floor / result["step_s"], 4)}
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            result |= {"what": "failed", "tokens_attended": n_tokens, "error": str(error)[:600]}
        append_result(arguments.out, result)
    if arguments.profile:
        _profile(model, scorer, config, arguments.profile, setup, arguments.out)


def _profile(
    model: Any, scorer: LongContextScorer, config: dict[str, Any], n_tokens: int, setup: Setup, out: Path
) -> None:
    branch = random_branch(n_tokens, setup.n_scored, config["vocab_size"], 0, "cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        (-scorer(model, *branch).mean()).backward()
        torch.cuda.synchronize()
    averages = profile.key_averages()
    out.with_suffix(".profile.txt").write_text(
        averages.table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=110)
    )
    rows = sorted(averages, key=lambda row: -row.self_device_time_total)
    for row in [row for row in rows if "CUDA" in str(row.device_type)][:32]:
        print(f"{row.self_device_time_total / 1e3:10.1f} ms {row.count:6d}  {row.key[:100]}", flush=True)


if __name__ == "__main__":
    main()
