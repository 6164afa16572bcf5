"""Memory and speed of the long-context engine on one GPU, beside the floor and beside others, in one run.

Three calls, most valuable first; each ends within ten minutes of an H200 with 128 GiB of host memory, and what a call
has not come to when its deadline is near it says so and leaves out. Their times: 435 s measured, 375 and 460 s by the
steps measured since, of which 15 s are imports, 33 s pinning 110 GiB and 3 s the model.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python -m benchmarks.engine_longcontext out/speed.jsonl 32768@23.5,steps=4 65536@23.5,steps=3,profile=1 \
        65536@138,plan_gib=23.5,place=device,steps=2 65536@40,steps=2 65536@80,steps=2 \
        --unsloth 32768,3 65536,3 --first-token 131072 --host-gib 110 --deadline-s 560 --commit COMMIT
    python -m benchmarks.engine_longcontext out/memory.jsonl 81920@11,steps=2 131072@12.5,steps=2 \
        81920@11,steps=2,staged=1 262144@18,steps=1 --host-gib 110 --deadline-s 560 --commit COMMIT
    python -m benchmarks.engine_longcontext out/longest.jsonl 393216@23.5,steps=1 194560@11.5,steps=1,layers=2 \
        --host-gib 110 --deadline-s 560 --commit COMMIT

And where time is left, what fills the curve and stands beside it:

    python -m benchmarks.engine_longcontext out/curve.jsonl 16384@23.5 8192@23.5 4096@23.5 \
        --peers transformers:8192 trl:8192 transformers:16384 trl:16384 --last 65536@23.5,stride=2,steps=2 \
        --host-gib 110 --deadline-s 560 --commit COMMIT

What a length costs that is new to all caches, with the kernel that builds a graph for it and with one that does not
(of run L, when cuDNN was the engine's own choice at every length, were those of 4,096 and 8,192):

    python -m benchmarks.engine_longcontext out/lengths.jsonl 4096@23.5,steps=8,attention=cudnn 4096@23.5,steps=8 \
        4096@23.5,steps=8,shorter=64,attention=cudnn 4096@23.5,steps=8,shorter=64 8192@23.5,steps=8 \
        8192@23.5,steps=8,attention=flash 8192@23.5,steps=8,shorter=64,attention=cudnn \
        8192@23.5,steps=8,shorter=64,attention=flash 16384@23.5,steps=8,shorter=64 \
        16384@23.5,steps=8,shorter=64,attention=flash \
        --host-gib 24 --deadline-s 200 --commit COMMIT

A case is TOKENS@GIB with options (`benchmarks.engine_case.Case`): the branch's length and the device memory allowed,
the allocator held to it. Every step is a forward, a backward and an optimiser step on data of its own. A case's row is
on the disk as soon as it is measured. One that fails leaves a row with its error, one that would pass the deadline a
row that says it was skipped, and the next one is tried. Unsloth runs right after the first cases, in a process of its
own, with the host memory given back for it.

`--dry` takes the same command lines through a tiny model on a CPU, every length divided by 512; Unsloth is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine_case import case_of
from benchmarks.engine_run import measure


def start_unsloth(out: Path, cases: Sequence[tuple[int, int]], gib: float) -> subprocess.Popen[bytes]:
    environment = os.environ | {"UNSLOTH_RETURN_LOGITS": "1", "HF_HUB_OFFLINE": "1"}
    texts = [f"{n_tokens},{steps}" for n_tokens, steps in cases]
    command = [sys.executable, "-m", "benchmarks.engine_unsloth", str(out), *texts, "--allowed-gib", str(gib)]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def wait_for(peer: subprocess.Popen[bytes], limit_s: float) -> int:
    """Its exit status; it is killed after limit_s. What it started (compilers that wait for work) ends with it."""
    try:
        status = peer.wait(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        status = -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(peer.pid, signal.SIGKILL)
    peer.wait()
    return status


def _peer(text: str) -> tuple[str, int]:
    name, tokens = text.split(":")
    return name, int(tokens)


def _unsloth_case(text: str) -> tuple[int, int]:
    tokens, steps = text.split(",")
    return int(tokens), int(steps)


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; every case is read before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", type=case_of)
    parser.add_argument("--host-gib", type=float, default=110.0, help="pinned before the first case")
    parser.add_argument("--gib", type=float, default=23.5, help="device memory allowed to what is no case")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    parser.add_argument("--unsloth", nargs="*", type=_unsloth_case, default=[], help="TOKENS,STEPS after the cases")
    parser.add_argument("--unsloth-s", type=float, default=300.0, help="it is ended after so long")
    parser.add_argument("--peers", nargs="*", type=_peer, default=[], help="transformers:TOKENS or trl:TOKENS")
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--first-token", type=int, default=0, help="check at this length that nothing is cut")
    parser.add_argument("--last", nargs="*", type=case_of, default=[], help="cases after the peers")
    parser.add_argument("--commit", default="", help="for the result file, where the checkout has no git")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    started, arguments = time.monotonic(), arguments_of(words)

    def unsloth(cases: list[tuple[int, int]], left_s: float) -> int:
        if arguments.dry:
            return 0
        return wait_for(start_unsloth(arguments.out, cases, arguments.gib), min(arguments.unsloth_s, left_s))

    measure(arguments, started + arguments.deadline_s, unsloth)


if __name__ == "__main__":
    main()
