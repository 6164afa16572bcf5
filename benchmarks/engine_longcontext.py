"""Memory and speed of the long-context engine on one GPU, beside the floor and beside others, in one run.

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m benchmarks.engine_longcontext OUT.jsonl \
        32768@23.5,steps=4 65536@23.5 81920@11 --unsloth 32768,4 65536,3 --peers trl:8192 --deadline-s 700

A case is TOKENS@GIB with options (`benchmarks.engine_cases.Case`): the branch's length and the device memory allowed,
the allocator held to it. Every step is a forward, a backward and an optimiser step on data of its own. Each result is a
line of JSON, written as soon as it is there. A case that would pass the deadline, by the floor, is skipped and said so,
and the next one is tried. Unsloth runs first and in a process of its own, before the host memory is pinned.

`--dry` runs everything but Unsloth on a tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_cases import Bench, Case, case_of, first_token_check, idle_of_step, run_case, setup_of
from benchmarks.engine_common import append_result, config_dict, machine, random_nf4_model, with_lora
from benchmarks.engine_floor import floor_s, measured_peaks
from benchmarks.engine_peers import run_peer
from engine.memory import GIB
from schemas.errors import StageError, UserError

SLOWER_THAN_FLOOR = 1.35  # of a step, for the estimate; short branches are further from it and quick anyway
FORWARD_SHARE = 0.3  # of a step's time
CASE_S = 4.0  # of every case, beside its steps
PEAKS = ("matmul", "cudnn_forward", "cudnn_backward", "flash_forward", "flash_backward")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}


class Run:
    """What the cases of one run share: where results go, and how much time is left."""

    def __init__(self, out: Path, deadline_s: float) -> None:
        self.out, self.deadline = out, time.monotonic() + deadline_s

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
        except (RuntimeError, ValueError, StageError, UserError, torch.OutOfMemoryError) as error:
            result = {"what": "failed", "case": name, "error": f"{type(error).__name__}: {error}"[:600]}
        self.note(result | {"case": name, "took_s": round(time.monotonic() - started, 1)})


def _model(dry: bool, config: dict[str, Any]) -> Any:
    if not dry:
        return random_nf4_model(config)
    from transformers import AutoConfig, AutoModelForCausalLM

    return with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))


def _unsloth(out: Path, cases: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"UNSLOTH_RETURN_LOGITS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.engine_unsloth", str(out), *cases]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _end(run: Run, peer: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        code = peer.wait(timeout=max(1.0, min(run.left_s, limit_s)))
    except subprocess.TimeoutExpired:
        os.killpg(peer.pid, signal.SIGKILL)
        code = peer.wait()
    if code:
        run.note({"what": "failed", "case": "unsloth", "error": f"ended with status {code}"})


def _peer(text: str) -> tuple[str, int]:
    name, tokens = text.split(":")
    return name, int(tokens)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", type=case_of)
    parser.add_argument("--host-gib", type=float, default=110.0, help="pinned before the first case")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    parser.add_argument("--unsloth", nargs="*", default=[], help="TOKENS,STEPS")
    parser.add_argument("--unsloth-s", type=float, default=300.0, help="it is ended after so long")
    parser.add_argument("--peers", nargs="*", type=_peer, default=[], help="transformers:TOKENS or trl:TOKENS")
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--first-token", type=int, default=0, help="check at this length that nothing is cut")
    parser.add_argument("--last", nargs="*", type=case_of, default=[], help="cases after the peers")
    parser.add_argument("--commit", default="", help="for the result file, where the checkout has no git")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    run, dry = Run(arguments.out, arguments.deadline_s), arguments.dry
    run.note({"what": "machine", **machine(arguments.commit)})
    config = config_dict() | (TINY | {"vocab_size": 200} if dry else {})
    unsloth = _unsloth(arguments.out, arguments.unsloth) if arguments.unsloth and not dry else None
    started = time.monotonic()
    model = _model(dry, config)
    run.note({"what": "model", "took_s": round(time.monotonic() - started, 1)})
    device, host_bytes = "cpu" if dry else "cuda", int(arguments.host_gib * GIB)
    bench = Bench(model, config, setup_of(dry), device, host_bytes)
    if arguments.first_token:  # forward only, so it wants no host memory; not timed, so Unsloth may load beside it
        n_tokens = arguments.first_token
        run.attempt(f"first token {n_tokens}", CASE_S, lambda: first_token_check(bench, n_tokens, 23.5))
    if unsloth is not None:
        bench.fresh(23.5)
        _end(run, unsloth, arguments.unsloth_s - (time.monotonic() - started))
    peak_tflops: dict[str, float] = dict.fromkeys(PEAKS, 1.0)
    if not dry:
        peak_tflops = measured_peaks()
        run.note({"what": "peaks_tflops", **peak_tflops})

    def pin() -> dict[str, Any]:
        bench.scorer.reserve_host(2**20 if dry else host_bytes, torch.device(device))
        return {"what": "pinned", "host_gib": arguments.host_gib}

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

    for case in arguments.cases:
        walk(case)
    for name, n_tokens in arguments.peers:
        run.attempt(
            f"{name} {n_tokens}",
            CASE_S + arguments.peer_steps * 3 * floor_s(config, n_tokens, peak_tflops),
            lambda name=name, n_tokens=n_tokens: run_peer(bench, name, n_tokens, 23.5, arguments.peer_steps),
        )
    for case in arguments.last:
        walk(case)
    run.note({"what": "end"})


if __name__ == "__main__":
    main()
