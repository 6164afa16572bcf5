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
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def start_unsloth(out: Path, cases: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"UNSLOTH_RETURN_LOGITS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.engine_unsloth", str(out), *cases]
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--host-gib", type=float, default=110.0, help="pinned before the first case")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    parser.add_argument("--unsloth", nargs="*", default=[], help="TOKENS,STEPS")
    parser.add_argument("--unsloth-s", type=float, default=300.0, help="it is ended after so long")
    parser.add_argument("--peers", nargs="*", type=_peer, default=[], help="transformers:TOKENS or trl:TOKENS")
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--first-token", type=int, default=0, help="check at this length that nothing is cut")
    parser.add_argument("--last", nargs="*", default=[], help="cases after the peers")
    parser.add_argument("--commit", default="", help="for the result file, where the checkout has no git")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args()


def main() -> None:
    started, arguments = time.monotonic(), _arguments()
    arguments.deadline = started + arguments.deadline_s
    unsloth = start_unsloth(arguments.out, arguments.unsloth) if arguments.unsloth and not arguments.dry else None
    from benchmarks.engine_run import measure  # takes 20 s on a machine just started: Unsloth loads meanwhile

    measure(arguments, lambda: None if unsloth is None else wait_for(unsloth, arguments.unsloth_s))


if __name__ == "__main__":
    main()
