"""Tokens a second of rendering and labelling against the bare tokenizer, scaling over processes, and peak memory.

    python -m benchmarks.render PATH... [--repeat N] [--runs N] [--num-proc N]

PATH: log files or folders of any supported format. Three measurements, one JSON object:

one_core   render and label against the tokenizer alone on the same texts in the same run; neither starts a thread
scaling    the whole stage over `--runs` runs (the given ones, again and again) in one process and in several. On a
           busy machine wall time says little, so the speed-up is also taken from processor time: all of it in one over
           that of the main process plus the busiest worker in several.
memory     peak of anonymous memory, summed over all processes, for `--runs` and for four times as many; pages of mapped
           files are left out, since the system takes them back when it needs them.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from artifacts.store import Store
from artifacts.tables import iter_rows, open_table, write_table
from schemas.config import ModelConfig, RenderConfig, SourceConfig, SplitConfig
from schemas.refs import Ref
from schemas.tables import TRAJECTORIES
from schemas.trajectory import Trajectory
from tasks.ingest import ingest
from tasks.jinja import RenderError
from tasks.model import prepare_model
from tasks.render import render
from tasks.renderer import make_renderer, render_run

PACKAGES = ("tokenizers", "datasets", "pyarrow")


def one_core(table: Ref, model: Ref, repeat: int) -> dict[str, float]:
    renderer, config = make_renderer(model), RenderConfig()
    bare = renderer.tokens.whole.backend_tokenizer
    n_tokens, n_runs = 0, 0
    render_s, bare_s = float("inf"), float("inf")
    for _ in range(repeat):
        n_tokens, n_runs, spent, texts = 0, 0, 0.0, []
        for row in iter_rows(open_table(table)):
            trajectory = Trajectory.model_validate(row)
            start = time.process_time()
            try:
                run = render_run(trajectory, renderer, config)
            except RenderError:
                continue
            spent += time.process_time() - start
            n_tokens, n_runs = n_tokens + len(run.token_ids), n_runs + 1
            texts.append(run.rendering.text)
        render_s, start = min(render_s, spent), time.process_time()
        for text in texts:
            _ = bare.encode(text, add_special_tokens=False).ids
        bare_s = min(bare_s, time.process_time() - start)
    return {
        "n_runs": n_runs,
        "n_tokens": n_tokens,
        "render_tokens_per_s": round(n_tokens / render_s),
        "tokenizer_tokens_per_s": round(n_tokens / bare_s),
        "ratio": round(bare_s / render_s, 3),
    }


def repeated(table: Ref, n_runs: int, store: Store) -> Ref:
    """A table of so many runs: those of `table`, again and again under other names."""

    def rows() -> Iterator[dict[str, Any]]:
        source = open_table(table)
        for number, row in enumerate(islice(cycle(range(source.num_rows)), n_runs)):
            (values,) = source.slice(row, 1).to_pylist()
            yield values | {"trajectory_id": f"{values['trajectory_id']}-{number}"}

    with store.staging() as folder:
        n_rows = write_table(folder / "trajectories.arrow", TRAJECTORIES, rows())
        return store.add(folder / "trajectories.arrow", "trajectories", n_rows=n_rows)


def _anonymous_bytes(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    except OSError:  # it has ended
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024


def _stage(table: Ref, model: Ref, root: str, num_proc: int, pipe: Any) -> None:
    """Renders in a process of its own, and sends wall and processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    config = RenderConfig(num_proc=num_proc, max_tokens=1_000_000)
    done = render(table, model, config, SplitConfig(), Store(root), progress=lambda *_: None)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    pipe.send({"wall_s": round(wall, 2), "main_cpu_s": round(cpu, 2), "n_tokens": done.report.n_tokens})


def _watched(table: Ref, model: Ref, store: Store, num_proc: int) -> dict[str, Any]:
    """One run of the whole stage, watched from this process: watching from within would take of its time."""
    here, there = (context := get_context("spawn")).Pipe(duplex=False)
    process = context.Process(target=_stage, args=(table, model, str(store.root), num_proc, there))
    process.start()
    there.close()
    main, worker_cpu_s, peak = psutil.Process(process.pid), dict[int, float](), 0
    while not here.poll(0.1):
        children = main.children(recursive=True)
        peak = max(peak, sum(map(_anonymous_bytes, [main, *children])))
        for child in children:
            try:
                worker_cpu_s[child.pid] = sum(child.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
    result = here.recv()
    process.join()
    return result | {
        "worker_cpu_s": sorted(round(seconds, 2) for seconds in worker_cpu_s.values()),
        "peak_anonymous_bytes": peak,
        "load_average": round(os.getloadavg()[0], 1),
    }


def stage(table: Ref, model: Ref, store: Store, num_proc: int, repeat: int = 1) -> dict[str, Any]:
    """The fastest of some runs of the whole stage."""
    return min((_watched(table, model, store, num_proc) for _ in range(repeat)), key=lambda result: result["wall_s"])


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many passes is reported")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--num-proc", type=int, default=2)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        store = Store(folder)
        model = prepare_model(ModelConfig(), store).model
        given = ingest(SourceConfig(paths=tuple(arguments.paths)), store).trajectories
        once, four = repeated(given, arguments.runs, store), repeated(given, 4 * arguments.runs, store)
        single = stage(once, model, store, 1, arguments.repeat)
        several = stage(once, model, store, arguments.num_proc, arguments.repeat)
        result = {
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
            "paths": [Path(path).name for path in arguments.paths],
            "one_core": one_core(given, model, arguments.repeat),
            "scaling": {
                "1": single,
                str(arguments.num_proc): several,
                "speedup_wall": round(single["wall_s"] / several["wall_s"], 2),
                "speedup_cpu": round(single["main_cpu_s"] / (several["main_cpu_s"] + several["worker_cpu_s"][-1]), 2),
            },
            "memory": {
                f"{n} runs in {num_proc} processes": stage(table, model, store, num_proc)["peak_anonymous_bytes"]
                for n, table in ((arguments.runs, once), (4 * arguments.runs, four))
                for num_proc in (1, arguments.num_proc)
            },
        }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
