"""One rendering under every engine: the same file, whatever the number of processes or machines."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_inputs import result, stock_template, stored, system, trajectory, turn, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import RenderConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Rendered
from schemas.trajectory import Trajectory
from tasks.render import render
from tasks.render_engines import PARALLEL_FROM_BYTES, RUNS_PER_BATCH, dealt, n_processes

pytest_plugins = ("render_fixtures",)

N_RUNS = 5 * RUNS_PER_BATCH + 3


def runs() -> Iterator[Trajectory]:
    """Runs of unlike lengths; some are too long, one repeats an id, one cannot be rendered."""
    for number in range(N_RUNS):
        words = "wörd " * (number % 7 * 10 if number < N_RUNS - 9 else 400)
        messages = (system(), user(f"task {number}"), turn(words, ("bash", f'{{"n": {number}}}')), result("ok"))
        more = (turn("done", reasoning="hm" if number % 3 else None),) if number % 2 else ()
        name = "r1" if number == 40 else f"r{number}"
        yield trajectory(*messages, *more, trajectory_id=name, task_id=f"task {number}")
    yield trajectory(system(), user("no"), turn("x"), trajectory_id="broken", tools={"not": "a list"})


@pytest.fixture(scope="module")
def trajectories(store: Store) -> Ref:
    return stored(runs(), store)


def rendered(trajectories: Ref, model: Ref, store: Store, progress: Any = None, **config: Any) -> Rendered:
    config = {"max_tokens": 900, "num_proc": 1} | config
    return render(trajectories, model, RenderConfig(**config), SplitConfig(), store, progress=progress)


@pytest.mark.parametrize("mode", ["trajectory", "turn"])
@pytest.mark.parametrize("num_proc", [2, 3])
def test_the_number_of_processes_leaves_no_trace(
    mode: str, num_proc: int, trajectories: Ref, model: Ref, store: Store
) -> None:
    alone = rendered(trajectories, model, store, mode=mode)
    spread = rendered(trajectories, model, store, mode=mode, num_proc=num_proc)
    assert Path(spread.branches.path).read_bytes() == Path(alone.branches.path).read_bytes()
    assert spread.report == alone.report
    reasons = {dropped.reason.split(",")[0] for dropped in alone.report.dropped}
    assert "a run with this trajectory_id came before" in reasons
    assert "the tool schemas are no JSON array of objects" in reasons
    assert any("more than max_tokens" in dropped.reason for dropped in alone.report.dropped)


def test_rows_keep_the_order_of_the_runs(trajectories: Ref, model: Ref, store: Store) -> None:
    found = open_table(rendered(trajectories, model, store, num_proc=3).branches)["trajectory_id"].to_pylist()
    expected = [run.trajectory_id for run in runs() if run.trajectory_id in set(found)]
    assert found == list(dict.fromkeys(expected))
    assert len(found) > N_RUNS / 2


@pytest.mark.parametrize("num_proc", [1, 2])
def test_progress_reaches_the_number_of_runs_and_never_falls(
    num_proc: int, trajectories: Ref, model: Ref, store: Store
) -> None:
    seen: list[tuple[int, int]] = []
    rendered(trajectories, model, store, lambda *counts: seen.append(counts), num_proc=num_proc)
    assert seen == sorted(seen)
    assert seen[-1] == (N_RUNS + 1, N_RUNS + 1)


def test_without_a_callback_the_engine_shows_its_bar(
    trajectories: Ref, model: Ref, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    rendered(trajectories, model, store, num_proc=2)
    assert f"{N_RUNS + 1}/{N_RUNS + 1}" in capfd.readouterr().err
    rendered(trajectories, model, store, lambda *_: None, num_proc=2)
    assert "render" not in capfd.readouterr().err


def refused_template(folder: Path) -> Path:
    """Prints the first messages otherwise once there are more than five: found out on the corpus only."""
    path = folder / "late.jinja"
    source = stock_template("qwen3_training.jinja").replace(
        "{{- '<|im_start|>' + message.role + '\\n' + content",
        "{{- '<|im_start|>' + message.role + '\\n' + ('SHORT' if messages | length > 5 else '') + content",
    )
    path.write_text(source, encoding="utf-8")
    return path


def late(store: Store) -> Ref:
    return stored([*runs(), trajectory(system(), user(), *[turn("a"), user()] * 4, trajectory_id="late")], store)


def test_a_worker_that_refuses_the_template_says_so_in_one_line(model: Ref, store: Store, tmp_path: Path) -> None:
    path = str(refused_template(tmp_path))
    with pytest.raises(UserError, match=r"prints earlier messages otherwise.* token \d+ is") as raised:
        render(late(store), model, RenderConfig(num_proc=2), SplitConfig(), store, chat_template=path)
    assert raised.value.fix.startswith("set model.chat_template")


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 7))
def test_runs_are_dealt_out_evenly(sizes: list[int], n_shards: int) -> None:
    n_shards = min(n_shards, len(sizes))
    order = dealt(sizes, n_shards)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    each, more = divmod(len(sizes), n_shards)  # as datasets cuts: the first shards hold one more
    edges = [0, *np.cumsum([each + (shard < more) for shard in range(n_shards)]).tolist()]
    shards = [order[a:b].tolist() for a, b in pairwise(edges)]
    assert all(shard == sorted(shard) for shard in shards)
    work = [sum(sizes[run] for run in shard) for shard in shards]
    assert max(work) - min(work) <= 2 * max(sizes)


def test_small_corpora_stay_in_one_process(trajectories: Ref) -> None:
    assert n_processes(trajectories, None) == 1
    large = trajectories.model_copy(update={"n_bytes": PARALLEL_FROM_BYTES, "n_rows": 1000})
    assert n_processes(large, None) >= 1
    assert n_processes(large, 7) == 7
    assert n_processes(large.model_copy(update={"n_rows": 3}), 7) == 3


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (extra ray)")
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_gives_the_same_table(trajectories: Ref, model: Ref, store: Store, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    alone = rendered(trajectories, model, store, mode="turn")
    spread = rendered(trajectories, model, store, lambda *counts: seen.append(counts), mode="turn", engine="ray")
    assert Path(spread.branches.path).read_bytes() == Path(alone.branches.path).read_bytes()
    assert spread.report == alone.report
    assert seen[-1] == (N_RUNS + 1, N_RUNS + 1)
    path = str(refused_template(tmp_path))
    with pytest.raises(UserError, match="prints earlier messages otherwise"):
        render(late(store), model, RenderConfig(engine="ray"), SplitConfig(), store, chat_template=path)
