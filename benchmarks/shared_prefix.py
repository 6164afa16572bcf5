"""A pair behind its common prefix in one walk: its time beside one branch's, its memory beside the ledger's, on a GPU.

    python -m benchmarks.shared_prefix OUT.jsonl --prefix 77824 --tail 4096 --layers 4 --gib 23.5

Both have the same layers, so few of them give the ratio of the whole model. Also: the errors of attention in blocks on
this GPU against float64, and what cuDNN's first call for a new pair of lengths takes. `--dry`: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine_common import (
    append_result,
    cap_device,
    config_dict,
    machine,
    median,
    peaks,
    random_nf4_model,
    scattered_positions,
    with_lora,
)
from engine import block_attention, segments
from engine.attention import BACKENDS
from engine.block_attention import BlockBackends, block_backends
from engine.choose import choose_plan
from engine.layers import LongContextScorer
from engine.memory import GIB, Setup
from engine.segments import Layout, all_queries, scored_queries
from engine.walk import Sequence


def block_errors(n_prefix: int = 1000, n_tail: int = 300) -> dict[str, list[float]]:
    """Relative errors of output, dq, dk, dv in bfloat16, for both tails and for windows, against float64."""
    torch.manual_seed(0)
    layout = segments.shared_prefix(n_prefix, n_prefix + n_tail, n_prefix + n_tail)
    q, k, v = (torch.randn(layout.n_tokens, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    windows, single_row = [*range(40, 90), *range(1350, 1500)], [700]  # cuDNN refuses a single query
    cases = [("tails", all_queries(layout), ("cudnn", "flash"))]
    cases += [("windows", scored_queries(layout, windows), ("cudnn", "flash"))]
    cases += [("single row", scored_queries(layout, single_row), ("flash",))]
    plain, errors = block_backends(BACKENDS["math"]), {}
    for case, queries, names in cases:
        grad = torch.randn(queries.n_rows, 8, 128, device="cuda", dtype=torch.bfloat16)
        grad_d, q_d, k_d, v_d = (x.double() for x in (grad, q, k, v))
        out, lse = block_attention.forward(plain, queries, q_d, k_d, v_d, 128**-0.5)
        want = [out, *block_attention.backward(plain, queries, grad_d, q_d, k_d, v_d, out, lse, 128**-0.5)]
        for name in names:
            backends = BlockBackends(BACKENDS[name], BACKENDS[name])
            out, lse = block_attention.forward(backends, queries, q, k, v, 128**-0.5)
            got = [out, *block_attention.backward(backends, queries, grad, q, k, v, out, lse, 128**-0.5)]
            errors[f"{name}, {case}"] = [
                round(float((a.double() - b).norm() / b.norm()), 6) for a, b in zip(got, want, strict=True)
            ]
    return errors


def first_call_s(n_queries: int = 4100, n_keys: int = 33_333) -> dict[str, float]:
    """Seconds of the first and of the next forward + backward of one rectangular block."""
    q = torch.randn(n_queries, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(n_keys, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {}
    for name in ("cudnn", "flash"):
        for call in ("first", "next"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            out, lse = BACKENDS[name].forward(q, k, v, 128**-0.5, False)
            BACKENDS[name].backward(out, q, k, v, out, lse, 128**-0.5, False)
            torch.cuda.synchronize()
            found[f"{name}_{call}"] = round(time.perf_counter() - start, 4)
    return found


def sequence_of(layout: Layout, n_scored: int, vocab_size: int, device: str) -> Sequence:
    """Random tokens, scored in scattered spans."""
    ids_T = torch.randint(0, vocab_size, (layout.n_tokens,), device=device)
    before_P = scattered_positions(layout.n_tokens, n_scored, device) - 1
    return Sequence(ids_T, layout, before_P, ids_T[before_P + 1])


def step_s(model: Any, scorer: LongContextScorer, sequence: Sequence) -> float:
    """Seconds of one forward and backward."""

    def synchronize() -> None:
        if sequence.input_ids_T.is_cuda:
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    logp_P: Tensor = scorer.score(model, sequence)
    (-logp_P.mean()).backward()
    model.zero_grad(set_to_none=True)
    synchronize()
    return time.perf_counter() - start


def compare(model: Any, config: dict[str, Any], arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Median seconds of one branch (prefix + tail) and of the pair (prefix + two tails), and their ratio."""
    n_prefix, n_branch = arguments.prefix, arguments.prefix + arguments.tail
    result: dict[str, Any] = {"what": "shared prefix", "prefix": n_prefix, "tail": arguments.tail}
    result |= {"layers": config["num_hidden_layers"], "allowed_gib": arguments.gib}
    layouts = {"branch": segments.one_row(n_branch), "pair": segments.shared_prefix(n_prefix, n_branch, n_branch)}
    for name, layout in layouts.items():
        setup = Setup(
            base="nf4" if device == "cuda" else "fp32", align=64 if device == "cuda" else 1, n_scored=4096,
            optimiser="none", several_blocks=name == "pair",
        )  # fmt: skip
        budgets = {"device_bytes": int(arguments.gib * GIB), "host_bytes": int(arguments.host_gib * GIB)}
        plan, ledger = choose_plan(config, layout.n_tokens, setup, **budgets)
        scorer = LongContextScorer(lambda _, plan=plan: plan)
        sequence = sequence_of(layout, 4096, config["vocab_size"], device)
        seconds = [step_s(model, scorer, sequence)]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds += [step_s(model, scorer, sequence) for _ in range(arguments.steps)]
        result |= {
            f"{name}_s": round(median(seconds[1:]), 4),
            f"{name}_first_s": round(seconds[0], 4),
            f"{name}_allocated_gib": peaks()["allocated_gib"],
            f"{name}_ledger_gib": round(ledger.peak_device_bytes / GIB, 3),
            f"{name}_head_groups": plan.head_groups,
        }
    return result | {"ratio": round(result["pair_s"] / result["branch_s"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prefix", type=int, default=77_824)
    parser.add_argument("--tail", type=int, default=4_096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gib", type=float, default=23.5)
    parser.add_argument("--host-gib", type=float, default=12.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    config = config_dict(arguments.layers)
    append_result(arguments.out, {"what": "machine", **machine(arguments.commit)})
    if arguments.dry:
        from transformers import AutoConfig, AutoModelForCausalLM

        small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "head_dim": 8, "vocab_size": 200}
        config |= small
        model = with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
    else:
        cap_device(arguments.gib)
        append_result(arguments.out, {"what": "block_errors", **block_errors()})
        append_result(arguments.out, {"what": "first_call_s", **first_call_s()})
        model = random_nf4_model(config)
    append_result(arguments.out, compare(model, config, arguments, "cpu" if arguments.dry else "cuda"))


if __name__ == "__main__":
    main()
