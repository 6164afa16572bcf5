"""The run of `benchmarks.engine_longcontext`: a model, the floor, then case after case until the time is over."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_cases import Bench, Case, case_of, first_token_check, idle_of_step, run_case, setup_of
from benchmarks.engine_common import append_result, config_dict, machine, random_nf4_model, with_lora
from benchmarks.engine_floor import floor_s, measured_peaks
from benchmarks.engine_peers import run_peer
from engine.host_memory import host_limits
from engine.memory import GIB
from schemas.errors import StageError, UserError

SLOWER_THAN_FLOOR = 1.35  # of a step, for the estimate; short branches are further from it and quick anyway
FORWARD_SHARE = 0.3  # of a step's time
CASE_S = 4.0  # of every case, beside its steps
FAILURES = (
    AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, StageError,
    UserError,
)  # fmt: skip
"""What a case may end with, others' code included, without ending the run."""
PEAKS = ("matmul", "cudnn_forward", "cudnn_backward", "flash_forward", "flash_backward")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}


class Run:
    """What the cases of one run share: where results go, and how much time is left."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline  # of time.monotonic

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def note(self, result: dict[str, Any]) -> None:
        append_result(self.out, result | {"left_s": round(self.left_s, 1)})

    def attempt(self, name: str, estimate_s: float, work: Callable[[], dict[str, Any]]) -> None:
        """Runs and notes one case; what goes wrong in it is noted in its place."""
        if estimate_s > self.left_s:
            self.note({"what": "skipped", "case": name, "estimate_s": round(estimate_s, 1)})
            return
        started = time.monotonic()
        try:
            result = work()
        except FAILURES as error:
            result = {"what": "failed", "case": name, "error": f"{type(error).__name__}: {error}"[:600]}
        self.note(result | {"case": name, "took_s": round(time.monotonic() - started, 1)})


def _model(dry: bool, config: dict[str, Any]) -> Any:
    if not dry:
        return random_nf4_model(config)
    from transformers import AutoConfig, AutoModelForCausalLM

    return with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))


def measure(arguments: argparse.Namespace, end_of_unsloth: Callable[[], int | None]) -> None:
    """Everything that the command line of `benchmarks.engine_longcontext` asks for, in its order.

    Args:
        end_of_unsloth: waits for that process, if there is one, and returns its status.
    """
    run, dry = Run(arguments.out, arguments.deadline), arguments.dry
    run.note({"what": "machine", **machine(arguments.commit)})
    config = config_dict() | (TINY | {"vocab_size": 200} if dry else {})
    started = time.monotonic()
    model = _model(dry, config)
    run.note({"what": "model", "took_s": round(time.monotonic() - started, 1)})
    device, host_bytes = torch.device("cpu") if dry else torch.device("cuda", 0), int(arguments.host_gib * GIB)
    bench = Bench(model, config, setup_of(dry), device, host_bytes)
    if arguments.first_token:  # forward only, so it wants no host memory; not timed, so Unsloth may load beside it
        n_tokens = arguments.first_token
        run.attempt(f"first token {n_tokens}", CASE_S, lambda: first_token_check(bench, n_tokens, 23.5))
    bench.fresh(23.5)
    if status := end_of_unsloth():
        run.note({"what": "failed", "case": "unsloth", "error": f"ended with status {status}"})
    peak_tflops: dict[str, float] = dict.fromkeys(PEAKS, 1.0)
    if not dry:
        peak_tflops = measured_peaks()
        run.note({"what": "peaks_tflops", **peak_tflops})

    def pin() -> dict[str, Any]:
        free_gib = round(host_limits()[0].available_bytes / GIB, 1)  # before: what others on this machine left
        bench.scorer.reserve_host(2**20 if dry else host_bytes, bench.device)
        return {"what": "pinned", "host_gib": arguments.host_gib, "free_before_gib": free_gib}

    run.attempt("pin", CASE_S, pin)

    def walk(case: Case) -> None:
        floor = floor_s(config, case.n_tokens, peak_tflops)

        def measured() -> dict[str, Any]:
            result = run_case(bench, case)
            return result if dry else result | {
                "floor_tokens_per_s": round(case.n_tokens / floor, 1),
                "share_of_floor": round(floor / result["step_s"], 4),
            }  # fmt: skip

        share = 1.0 if case.layers is None else FORWARD_SHARE + (1 - FORWARD_SHARE) * case.layers / 36
        run.attempt(case.text, case.steps * share * SLOWER_THAN_FLOOR * floor + CASE_S, measured)
        if case.profile and not dry:
            run.attempt(f"idle {case.text}", 1.5 * floor + CASE_S, lambda: idle_of_step(bench, case.n_tokens))

    for case in map(case_of, arguments.cases):
        walk(case)
    for name, n_tokens in arguments.peers:
        run.attempt(
            f"{name} {n_tokens}",
            CASE_S + arguments.peer_steps * 3 * floor_s(config, n_tokens, peak_tflops),
            lambda name=name, n_tokens=n_tokens: run_peer(bench, name, n_tokens, 23.5, arguments.peer_steps),
        )
    for case in map(case_of, arguments.last):
        walk(case)
    run.note({"what": "end"})
