"""Spreading `render_batch` over the cores of one machine (datasets.map) or over a Ray cluster (Ray Data).

Every engine leaves the same rows in the same order. Memory holds a batch per process; what is rendered waits in files.
"""

import heapq
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import numpy as np
import pyarrow as pa

from artifacts.tables import open_table, write_tables
from schemas.errors import UserError
from schemas.refs import Ref
from tasks.render_rows import RENDERED, RenderJob, render_batch

RUNS_PER_BATCH: Final = 16
PARALLEL_FROM_BYTES: Final = 4 << 20
"""Smaller tables are rendered in this process: starting others takes longer than it saves. With two processes the wall
time was 2.4 s against 1.0 s at 0.9 MiB, 3.1 against 2.9 at 2.1 MiB and 4.3 against 4.6 at 3.4 MiB (two busy cores)."""

_POLL_S: Final = 0.2
_REFUSAL: Final = pa.field("refusal", pa.list_(pa.large_string()))

OnDone = Callable[[int], None]
"""Called with the number of runs done so far."""

Rendered = Callable[[], Iterator[pa.RecordBatch]]
"""Gives the rendered rows, in the order of the runs, as often as it is called; every batch is of `RENDERED`."""


def n_processes(trajectories: Ref, asked: int | None) -> int:
    """One a core for larger corpora, 1 for small ones; never more than there are runs."""
    if asked is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        asked = cores if trajectories.n_bytes >= PARALLEL_FROM_BYTES else 1
    return max(1, min(asked, trajectories.n_rows or 1))


def render_all(trajectories: Ref, job: RenderJob, folder: Path, on_done: OnDone | None) -> Rendered:
    """Renders every run with the engine that the config names.

    Args:
        folder: for the files that hold what is rendered; they must live as long as the result is read.
        on_done: without it the engine shows its own progress bar where it has one.

    Raises:
        UserError: the template cannot be used for this corpus, or the engine is not installed.
    """
    if job.config.engine == "ray":
        return _with_ray(trajectories, job, folder, on_done)
    n = n_processes(trajectories, job.config.num_proc)
    return (
        _in_this_process(trajectories, job, folder, on_done)
        if n == 1
        else _with_datasets(trajectories, job, folder, on_done, n)
    )


def _staged(path: Path, tables: Iterator[pa.Table]) -> Rendered:
    write_tables(path, RENDERED, tables)
    return lambda: _batches(path)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def _in_this_process(trajectories: Ref, job: RenderJob, folder: Path, on_done: OnDone | None) -> Rendered:
    table = open_table(trajectories)

    def tables() -> Iterator[pa.Table]:
        for start in range(0, table.num_rows, RUNS_PER_BATCH):
            runs = table.slice(start, RUNS_PER_BATCH)
            yield render_batch(runs, range(start, start + runs.num_rows), job)
            if on_done is not None:
                on_done(start + runs.num_rows)

    return _staged(folder / "rendered.arrow", tables())


def dealt(sizes: Sequence[int], n_shards: int) -> np.ndarray:
    """Runs in an order whose contiguous shards hold as many runs each (the first ones one more) and nearly equal work.

    datasets.map gives every process one contiguous part. The runs are dealt out from the largest to the smallest, there
    and back again; inside a shard they keep their order.

    Args:
        sizes: bytes of each run, [n_runs].

    Returns:
        [n_runs] int64, indexes into `sizes`.
    """
    ordered = np.argsort(-np.asarray(sizes, np.int64), kind="stable")
    rows, place = np.divmod(np.arange(len(ordered)), n_shards)
    last = np.where(rows == len(ordered) // n_shards, len(ordered) % n_shards, n_shards)  # shards that this row serves
    shards = np.where(rows % 2, last - 1 - place, place)
    return np.concatenate([np.sort(ordered[shards == shard]) for shard in range(n_shards)])


def _render_shard(runs: pa.Table, positions: list[int], job: RenderJob, order: np.ndarray, done: str) -> pa.Table:
    rendered = render_batch(runs, order[positions].tolist(), job)
    with open(done, "ab") as file:  # one byte a run, appended by all processes: the file's size is the progress
        file.write(bytes(runs.num_rows))
    return rendered


def _with_datasets(trajectories: Ref, job: RenderJob, folder: Path, on_done: OnDone | None, n: int) -> Rendered:
    import datasets

    job.renderer()  # refuses a bad template here; forked processes find it loaded
    batches, done = open_table(trajectories).to_batches(), folder / "done"
    order = dealt([batch.slice(row, 1).nbytes for batch in batches for row in range(batch.num_rows)], n)
    dataset = datasets.Dataset.from_file(trajectories.path)
    done.touch()

    def mapped() -> datasets.Dataset:
        return (
            dataset.select(order)
            .with_format("arrow")
            .map(
                _render_shard,
                with_indices=True,
                batched=True,
                batch_size=RUNS_PER_BATCH,
                writer_batch_size=RUNS_PER_BATCH,
                num_proc=n,
                remove_columns=dataset.column_names,
                features=datasets.Features.from_arrow_schema(RENDERED),
                fn_kwargs={"job": job, "order": order, "done": str(done)},
                cache_file_name=str(folder / "rendered.arrow"),
                new_fingerprint="0" * 16,  # the result is ours to keep: nothing is to be found by it
                load_from_cache_file=False,
                desc="render",
            )
        )

    if on_done is None:
        mapped()
    else:
        with _no_bars(), ThreadPoolExecutor(1) as thread:  # the caller's own thread goes on reporting
            future = thread.submit(mapped)
            while wait([future], _POLL_S).not_done:
                on_done(done.stat().st_size)
            future.result()
            on_done(done.stat().st_size)
    shards = sorted(folder.glob("rendered_*.arrow"))
    return lambda: heapq.merge(*map(_single_runs, shards), key=lambda batch: batch["run"][0].as_py())


def _single_runs(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of each run as a batch of its own."""
    for batch in _batches(path):
        runs = batch["run"].to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(runs)) + 1), batch.num_rows]
        yield from (batch.slice(a, b - a) for a, b in pairwise(edges))


@contextmanager
def _no_bars() -> Iterator[None]:
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _render_numbers(numbers: pa.Table, path: str, job: RenderJob) -> pa.Table:
    """Rendered rows and, in a last column, the arguments of a UserError: Ray loses the type of what a worker raises."""
    table, ids = open_table(Path(path)), numbers["id"].to_pylist()
    try:
        rows, refusal = render_batch(pa.concat_tables([table.slice(i, 1) for i in ids]), ids, job), None
    except UserError as error:
        rows, refusal = pa.Table.from_pylist([{}], schema=RENDERED), [error.what, error.where, error.fix]
    return rows.append_column(_REFUSAL, pa.array([refusal] * rows.num_rows, _REFUSAL.type))


def _with_ray(trajectories: Ref, job: RenderJob, folder: Path, on_done: OnDone | None) -> Rendered:
    """Workers read the runs and the model where they lie: on several machines the store is a shared folder."""
    try:
        from ray import data as ray_data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("Ray is not installed", where="render.engine", fix="pip install 'traceforge[ray]'") from error
    job.renderer()
    n_runs = open_table(trajectories).num_rows
    numbers = ray_data.range(n_runs, override_num_blocks=max(1, -(-n_runs // RUNS_PER_BATCH)))
    rendered = numbers.map_batches(
        partial(_render_numbers, path=trajectories.path, job=job), batch_size=None, batch_format="pyarrow"
    )
    rendered.context.execution_options.preserve_order = True
    rendered.context.enable_progress_bars = on_done is None

    def tables() -> Iterator[pa.Table]:
        for batch in rendered.iter_batches(batch_size=None, batch_format="pyarrow"):
            table = cast("pa.Table", batch)
            for what, where, fix in table[_REFUSAL.name].drop_null().to_pylist():
                raise UserError(what, where=where, fix=fix)
            yield table.select(RENDERED.names).cast(RENDERED)
            if on_done is not None and table.num_rows:
                on_done(table["run"][-1].as_py() + 1)

    return _staged(folder / "rendered.arrow", tables())
