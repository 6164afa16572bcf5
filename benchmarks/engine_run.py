"""The run of `benchmarks.engine_longcontext`: a model, the floor, then case after case until the time is over."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_case import Case
from benchmarks.engine_cases import Bench, first_token_check, idle_of_step, run_case, setup_of
from benchmarks.engine_common import append_result, config_dict, machine, random_nf4_model, with_lora
from benchmarks.engine_floor import attention_forward_s, floor_s, measured_peaks
from benchmarks.engine_peers import run_peer
from engine.host_memory import host_limits
from engine.memory import GIB
from schemas.errors import StageError, UserError

SLOWER_THAN_FLOOR = (
    1.25  # of a step, for the estimate (1.15 at 64K, 1.24 at 32K measured); shorter ones are quick anyway
)
FORWARD_SHARE = 0.3  # of a step's time
CASE_S = 4.0  # of every case, beside its steps
UNSLOTH_S = 90.0  # to load, and what its first steps take longer (42 and 23 s measured at 32K and 64K)
UNSLOTH_SLOWER = 1.8  # than the floor, warm (1.6 measured)
PIN_S_PER_GIB = 0.4
FAILURES = (
    AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, StageError,
    UserError,
)  # fmt: skip
"""What a case may end with, others' code included, without ending the run."""
PEAKS = ("matmul", "cudnn_forward", "cudnn_backward", "flash_forward", "flash_backward")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}
DRY_SHRINK = 512
"""`--dry` divides every length by this, so that the command lines of a real run can be tried as they are."""


class Run:
    """What the cases of one run share: where results go, and how much time is left."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline  # of time.monotonic

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def note(self, result: dict[str, Any]) -> None:
        append_result(self.out, result | {"left_s": round(self.left_s, 1)})

    def attempt(self, name: str, estimate_s: float, work: Callable[[], dict[str, Any]]) -> bool:
        """Runs and notes one case, and returns whether it was done; what goes wrong in it is noted in its place."""
        if estimate_s > self.left_s:
            self.note({"what": "skipped", "case": name, "estimate_s": round(estimate_s, 1)})
            return False
        started = time.monotonic()
        try:
            result = work()
        except FAILURES as error:
            result = {"what": "failed", "case": name, "error": f"{type(error).__name__}: {error}"[:600]}
        if result["what"] == "failed":
            gc.collect()  # a walk that nothing uses any more must not hold the host buffer: there is no room for two
        self.note(result | {"case": name, "took_s": round(time.monotonic() - started, 1)})
        return result["what"] != "failed"


def _model(dry: bool, config: dict[str, Any]) -> Any:
    if not dry:
        return random_nf4_model(config)
    from transformers import AutoConfig, AutoModelForCausalLM

    return with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))


def estimate_s(bench: Bench, case: Case, peak_tflops: dict[str, float]) -> float:
    """Seconds that a case will take, from the floor and from the attention that its plan computes twice."""
    floor = floor_s(bench.config, case.n_tokens, peak_tflops)
    again = sum(layer.attention == "recompute" for layer in bench.plan(case).layers)
    share = 1.0 if case.layers is None else FORWARD_SHARE + (1 - FORWARD_SHARE) * case.layers / 36
    step_s = SLOWER_THAN_FLOOR * floor + again * attention_forward_s(bench.config, case.n_tokens, peak_tflops)
    return case.steps * share * step_s + CASE_S


class _Measurement:
    """One model, and the kinds of cases that it is taken through."""

    def __init__(self, arguments: argparse.Namespace, run: Run) -> None:
        self.arguments, self.run, self.dry = arguments, run, arguments.dry
        config = config_dict() | (TINY | {"vocab_size": 200} if self.dry else {})
        device = torch.device("cpu") if self.dry else torch.device("cuda", 0)
        self.host_bytes = int(arguments.host_gib * GIB)
        started = time.monotonic()
        self.bench = Bench(_model(self.dry, config), config, setup_of(self.dry), device, self.host_bytes)
        run.note({"what": "model", "took_s": round(time.monotonic() - started, 1)})
        self.peak_tflops: dict[str, float] = dict.fromkeys(PEAKS, 1.0)
        if not self.dry:
            self.bench.fresh(arguments.gib)
            self.peak_tflops = measured_peaks()
            run.note({"what": "peaks_tflops", **self.peak_tflops})

    def _length(self, n_tokens: int) -> int:
        return max(32, n_tokens // DRY_SHRINK) if self.dry else n_tokens

    def _floor_s(self, n_tokens: int) -> float:
        return 0.0 if self.dry else floor_s(self.bench.config, n_tokens, self.peak_tflops)

    def pin(self) -> None:
        """Pins the host buffer, unless it is; notes what others on this machine had left."""
        n_bytes = 2**20 if self.dry else self.host_bytes
        if self.bench.scorer.host_bytes >= n_bytes:
            return

        def work() -> dict[str, Any]:
            free_gib = round(host_limits()[0].available_bytes / GIB, 1)
            self.bench.scorer.reserve_host(n_bytes, self.bench.device)
            return {"what": "pinned", "host_gib": self.arguments.host_gib, "free_before_gib": free_gib}

        self.run.attempt("pin", CASE_S if self.dry else PIN_S_PER_GIB * self.arguments.host_gib, work)

    def walks(self, cases: list[Case]) -> None:
        """Timed steps of the engine."""
        if cases:
            self.pin()
        for case in cases:
            self._walk(self._shrunk(case) if self.dry else case)

    def _shrunk(self, case: Case) -> Case:
        """The case at its dry length, with the one attention there is on a CPU."""
        shorter = -(-case.shorter // DRY_SHRINK)
        return dataclasses.replace(case, n_tokens=self._length(case.n_tokens), shorter=shorter, attention=None)

    def _walk(self, case: Case) -> None:
        floor = self._floor_s(case.n_tokens)

        def measured() -> dict[str, Any]:
            result = run_case(self.bench, case)
            return result if self.dry else result | {
                "floor_tokens_per_s": round(case.n_tokens / floor, 1),
                "share_of_floor": round(floor / result["step_s"], 4),
            }  # fmt: skip

        try:
            expected_s = CASE_S if self.dry else estimate_s(self.bench, case, self.peak_tflops)
        except UserError:
            expected_s = 0.0  # it fits no plan: the attempt says so in its row
        done = self.run.attempt(case.text, expected_s, measured)
        if done and case.profile and not self.dry:
            self.run.attempt(
                f"idle {case.text}", 1.5 * floor + CASE_S, lambda: idle_of_step(self.bench, case.n_tokens)
            )  # fmt: skip

    def unsloth(self, cases: list[tuple[int, int]], work: Callable[[list[tuple[int, int]], float], int]) -> None:
        """Unsloth in a process of its own, which the host memory is given back for."""
        expected_s = UNSLOTH_S + UNSLOTH_SLOWER * sum(steps * self._floor_s(n_tokens) for n_tokens, steps in cases)

        def measured() -> dict[str, Any]:
            self.bench.scorer.release_host()
            self.bench.fresh(self.arguments.gib)
            status = work(cases, self.run.left_s)
            return {"what": "unsloth ended"} if status == 0 else {"what": "failed", "error": f"status {status}"}

        self.run.attempt("unsloth", CASE_S if self.dry else expected_s, measured)

    def first_token(self, n_tokens: int) -> None:
        forward_s = FORWARD_SHARE * SLOWER_THAN_FLOOR * 2.2 * self._floor_s(n_tokens)
        length = self._length(n_tokens)
        self.run.attempt(
            f"first token {n_tokens}",
            CASE_S + forward_s,
            lambda: first_token_check(self.bench, length, self.arguments.gib),
        )

    def peer(self, name: str, n_tokens: int) -> None:
        steps, length = self.arguments.peer_steps, self._length(n_tokens)
        self.run.attempt(
            f"{name} {n_tokens}",
            CASE_S + steps * 3 * self._floor_s(n_tokens),
            lambda: run_peer(self.bench, name, length, self.arguments.gib, steps),
        )


def measure(
    arguments: argparse.Namespace, deadline: float, unsloth: Callable[[list[tuple[int, int]], float], int]
) -> None:
    """Everything that the command line of `benchmarks.engine_longcontext` asks for, in its order of value.

    Args:
        deadline: of time.monotonic.
        unsloth: runs its cases within so many seconds in a process of its own, and returns its exit status.
    """
    run = Run(arguments.out, deadline)
    run.note({"what": "machine", **machine(arguments.commit)})
    measurement = _Measurement(arguments, run)
    measurement.walks(arguments.cases)
    if arguments.unsloth:
        measurement.unsloth(arguments.unsloth, unsloth)
    if arguments.first_token:
        measurement.first_token(arguments.first_token)
    for name, n_tokens in arguments.peers:
        measurement.peer(name, n_tokens)
    measurement.walks(arguments.last)
    run.note({"what": "end"})
