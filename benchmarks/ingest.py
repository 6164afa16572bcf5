"""How fast and in how much memory logs are ingested: `python -m benchmarks.ingest --gb 1 5 --repeat 3 --core 0`.

Two corpora of mini-swe-agent 1.1 files, every run different. `generated`: half conversation, the rest copies of it, and
nothing to redact; a hard case, since real files hold three parts of other things to one of conversation. `--real
FOLDER`: the runs in FOLDER again and again, under other names and with other first messages; they have addresses and
home directories to look at.

Each measurement is a process of its own: `json.loads` over the same bytes before and after each ingestion into a new
store (the mean of both counts), and at the end ingestion again with nothing changed. Speed is bytes on disk over CPU
time, user and system: reading and writing files counts for ingestion, and not for `json.loads`. What a process pays
once (imports, compiled patterns) is measured on a few runs before, and not counted. Peak memory is the process's own.
`--warm 0.7` keeps so much of the corpus's bytes in use and gives them back while ingestion runs: a virtual machine then
has pages for the table at hand, as a machine of one's own has.
Of several repeats the median counts; `shares` has them all, and `load` how many processes wanted the machine's cores.
The sizes take turns, so that what else the machine does falls on all of them.
"""

import argparse
import contextlib
import json
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

WORDS = ("def", "self", "return", "import", "value", "node", "index", "error", "test", "file", "class", "raise", "list")
GB = 1_000_000_000
_PIECE_BYTES = 16_000_000
_PIECES_BYTES_PER_S = 200_000_000


def _code(rng: random.Random, n_chars: int) -> str:
    lines = []
    while sum(map(len, lines)) < n_chars:
        words = rng.choices(WORDS, k=rng.randint(3, 9))
        lines.append(" " * rng.choice((4, 8, 12)) + f"{words[0]}_{rng.randint(0, 999)} = {'.'.join(words[1:])}()\n")
    return "".join(lines)


def make_run(rng: random.Random, number: int) -> dict[str, Any]:
    """One run as mini-swe-agent 1.1 stores it: each response a second time whole, outputs also uncut."""
    instance = f"owner__project-{number}"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You can run bash commands."},
        {"role": "user", "content": f"Fix issue {number}.\n" + _code(rng, 4000)},
    ]
    for turn in range(rng.randint(20, 60)):
        call_id = f"call_{number}_{turn}"
        arguments = json.dumps({"command": f"sed -n {turn},{turn + 40}p src/module_{rng.randint(0, 99)}.py"})
        call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        message = {"role": "assistant", "content": f"Step {turn}: " + _code(rng, 200), "tool_calls": [call]}
        usage = {"prompt_tokens": rng.randint(1000, 90000), "completion_tokens": 120, "prompt_tokens_details": None}
        response = {"id": f"r{turn}", "object": "chat.completion", "choices": [{"message": message}], "usage": usage}
        messages.append({**message, "extra": {"response": response, "cost": 0.001, "timestamp": 1.7e9 + turn}})
        output = _code(rng, rng.randint(200, 4000))
        content = f"<returncode>{turn % 7 == 0:d}</returncode>\n<output>\n{output}</output>"
        extra = {"raw_output": output, "returncode": int(turn % 7 == 0), "timestamp": 1.7e9 + turn}
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content, "extra": extra})
    return {
        "info": {"exit_status": "Submitted", "submission": "diff --git a/x b/x\n", "mini_version": "2.2.7"},
        "messages": messages,
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": instance,
    }


def _generated(rng: random.Random) -> list[bytes]:
    return [json.dumps(make_run(rng, 10_000_000 + number), indent=2).encode() for number in range(200)]


def _real(folder: Path) -> list[bytes]:
    """The mini-swe-agent 1.1 runs of at least 50 kB below a folder, each with a place for another name and task."""
    bodies = []
    for path in sorted(folder.rglob("*.json")):
        data = path.read_bytes()
        if len(data) >= 50_000 and b'"mini-swe-agent-1.1"' in data:
            number = str(10_000_000 + len(bodies)).encode()
            data = re.sub(rb'("instance_id": *")[^"]*', rb"\g<1>owner__project-" + number, data)
            bodies.append(re.sub(rb'("role": *"user",\s*"content": *")', rb"\g<1>Run " + number + b". ", data, count=1))
    if not bodies:
        raise SystemExit(f"{folder}: no mini-swe-agent runs")
    return bodies


def make_corpus(folder: Path, n_bytes: int, bodies: list[bytes]) -> int:
    """Writes runs until `n_bytes` are reached; each body is repeated under another name and task.

    Returns:
        the number of files.
    """
    written = n_files = 0
    while written < n_bytes:
        original = str(10_000_000 + n_files % len(bodies)).encode()
        data = bodies[n_files % len(bodies)].replace(original, str(20_000_000 + n_files).encode())
        path = folder / f"part-{n_files // 1000:04d}" / f"run-{n_files:07d}.traj.json"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
        written += len(data)
        n_files += 1
    return n_files


def _measure_json(folder: Path) -> dict[str, Any]:
    n_bytes, n_seconds = 0, 0.0
    for path in sorted(folder.rglob("*.json")):
        data = path.read_bytes()
        started = time.process_time()
        json.loads(data)
        n_seconds += time.process_time() - started
        n_bytes += len(data)
    return {"n_bytes": n_bytes, "cpu_s": n_seconds}


def _measure_ingest(folder: Path, store: Path, few: Path) -> dict[str, Any]:
    from artifacts.store import Store
    from schemas.config import SourceConfig
    from tasks.ingest import ingest

    with tempfile.TemporaryDirectory() as other:
        ingest(SourceConfig(paths=(str(few),)), Store(other))  # what a process pays once
    started, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    result = ingest(SourceConfig(paths=(str(folder),)), Store(store))
    return {
        "cpu_s": time.process_time() - cpu,
        "system_s": os.times().system - system,
        "wall_s": time.perf_counter() - started,
        "n_rows": result.trajectories.n_rows,
        "n_reused": result.report.n_files_reused,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """Of this process alone: getrusage counts what the parent held when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) / 1024


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ingest", "--child", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@dataclass
class _Corpus:
    """One size, and what was measured on it so far."""

    scratch: Path
    n_files: int
    plain: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def ingest(self) -> dict[str, Any]:
        return _child("ingest", *(str(self.scratch / name) for name in ("logs", "store", "few")))


def prepare(size_gb: float, scratch: Path, bodies: list[bytes]) -> _Corpus:
    scratch.mkdir()
    make_corpus(scratch / "few", 1_000_000, bodies)
    return _Corpus(scratch, make_corpus(scratch / "logs", int(size_gb * GB), bodies))


@contextlib.contextmanager
def warm_pages(n_bytes: int) -> Iterator[None]:
    """Memory that is in use now and given back bit by bit meanwhile, as fast as ingestion takes it.

    A virtual machine gives idle pages back to its host within seconds; who touches one next pays for that.
    """
    pieces = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(n_bytes // _PIECE_BYTES)]
    for piece in pieces:
        piece.write(bytes(_PIECE_BYTES))
    over = threading.Event()

    def give_back() -> None:
        while pieces and not over.wait(_PIECE_BYTES / _PIECES_BYTES_PER_S):
            pieces.pop().close()

    thread = threading.Thread(target=give_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(corpus: _Corpus, warm_share: float) -> None:
    """Once more, into a new store. `warm_share`: of the corpus's bytes, what is kept warm for ingestion to take."""
    if (corpus.scratch / "store").exists():
        shutil.rmtree(corpus.scratch / "store")
    corpus.plain.append(_child("json", str(corpus.scratch / "logs")))
    with warm_pages(int(corpus.plain[-1]["n_bytes"] * warm_share)):
        corpus.runs.append(corpus.ingest())
    corpus.plain.append(_child("json", str(corpus.scratch / "logs")))


def numbers(corpus: _Corpus) -> dict[str, Any]:
    """All numbers of one size."""
    again, runs, plain = corpus.ingest(), corpus.runs, corpus.plain
    n_bytes = plain[0]["n_bytes"]
    json_s = [(before["cpu_s"] + after["cpu_s"]) / 2 for before, after in zip(plain[::2], plain[1::2], strict=True)]
    shares = [mean / run["cpu_s"] for mean, run in zip(json_s, runs, strict=True)]
    ns_per_byte = [run["cpu_s"] / n_bytes * 1e9 for run in runs]
    return {
        "gb": n_bytes / GB,
        "n_files": corpus.n_files,
        "json_mb_per_s": n_bytes / median(json_s) / 1e6,
        "ingest_mb_per_s": 1e3 / median(ns_per_byte),
        "share_of_json": median(shares),
        "shares": [round(share, 3) for share in shares],
        "ns_per_byte": median(ns_per_byte),
        "ns_per_byte_least": min(ns_per_byte),
        "system_share_of_cpu": median([run["system_s"] / run["cpu_s"] for run in runs]),
        "wall_s": median([run["wall_s"] for run in runs]),
        "peak_mib": max(run["peak_mib"] for run in runs),
        "again_s": again["wall_s"],
        "again_peak_mib": again["peak_mib"],
        "n_rows": runs[-1]["n_rows"],
        "load": os.getloadavg()[1],
    }


def _machine() -> dict[str, Any]:
    """What the numbers belong to."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    packages = ("pyarrow", "msgspec", "orjson", "hyperscan", "blake3", "xxhash", "detect-secrets")
    return {
        "cpu": cpu,
        "n_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "commit": commit,
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.2, 1.0], help="corpus sizes in 10^9 bytes")
    parser.add_argument(
        "--scratch", type=Path, help="folder for the corpus and the store; a temporary one if not given"
    )
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="repeat the runs below FOLDER")
    parser.add_argument("--repeat", type=int, default=1, help="how often each size is measured")
    parser.add_argument("--core", type=int, help="keep every measurement on this core")
    parser.add_argument("--warm", type=float, default=0.0, metavar="SHARE", help="of the bytes: see `warm_pages`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the numbers into this JSON file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, folder, *rest = arguments.child
        result = _measure_json(Path(folder)) if kind == "json" else _measure_ingest(Path(folder), *map(Path, rest))
        print(json.dumps(result))
        return
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    bodies = _real(arguments.real) if arguments.real else _generated(random.Random(0))
    corpus = ("real" if arguments.real else "generated") + "_warm" * bool(arguments.warm)
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=arguments.scratch) as folder:
        corpora = [prepare(size, Path(folder) / str(number), bodies) for number, size in enumerate(arguments.gb)]
        for _ in range(arguments.repeat):
            for one in corpora:
                measure(one, arguments.warm)
        rows = [numbers(one) for one in corpora]
    rows = [{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    for row in rows:
        print(json.dumps(row))
    result: dict[str, Any] = {**_machine(), "sizes": rows}
    if len(rows) > 1:
        ratio = rows[-1]["ns_per_byte"] / rows[0]["ns_per_byte"]
        print(f"time a byte, last size over first: {ratio:.3f}")
        result["ns_per_byte_last_over_first"] = round(ratio, 3)
    if arguments.out:
        known = json.loads(arguments.out.read_text("utf-8")) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps({**known, corpus: result}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
