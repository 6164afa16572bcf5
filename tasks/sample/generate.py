"""`generate_samples`: many tasks, several policies each, in parallel, the same bytes for the same seed."""

import contextlib
import importlib.metadata
import math
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from schemas.errors import UserError
from schemas.sample import SampleReport, SampleRunReport
from tasks.sample.episode import Episode, run_episode, trajectory_json
from tasks.sample.output import check_out_dir, publish, write_run_files
from tasks.sample.recorder import CHARS_PER_TOKEN
from tasks.sample.repository import make_task
from tasks.sample.sandbox import find_git

DEFAULT_TARGET_TOKENS = 2_000
MIN_TARGET_TOKENS = 2_000
MAX_TARGET_TOKENS = 100_000
_MAX_COUNTS = {"n_tasks": 9_999, "runs_per_task": 64, "jobs": 256}  # instance ids have four digits
# Two careful runs and a failing one make a pair for nearly every task.
_POLICY_CYCLE = ("careful", "sloppy", "careful", "looping")
_BULK_SHARE = 0.7  # of the longest run: what is read twice is little

TargetTokens = int | tuple[int, int]


class _Slot(NamedTuple):
    """One run to make."""

    task_index: int
    run_name: str
    policy: str


class _Plan(NamedTuple):
    """What all runs share. `low` and `high` bound their lengths in tokens."""

    seed: int
    low: int
    high: int
    git: str | None
    scratch: Path
    stop: threading.Event

    def staged(self, run_name: str) -> Path:
        """Where the files of a run folder wait until all runs are done."""
        return self.scratch / "staged" / run_name


def generate_samples(
    out_dir: Path,
    *,
    n_tasks: int,
    seed: int,
    runs_per_task: int = 4,
    target_tokens: TargetTokens = DEFAULT_TARGET_TOKENS,
    jobs: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> SampleReport:
    """Make tasks with a real bug, let scripted policies work on them for real, and write the runs to `out_dir`.

    Writes one folder per run (careful-0, sloppy-0, careful-1, looping-0, ...), each with one
    `<instance_id>.traj.json` per task, `report.json` and `exit_statuses.yaml`. `target_tokens` is the length of
    each run in tokens, estimated as characters / 4; a pair draws each run's length log-uniformly between the two.
    `progress` is called with (runs done, runs in all).

    The same arguments give the same bytes, whatever `jobs`, folder or environment, under the same minor version
    of Python, the same pytest, and git either present or absent on both sides.

    `out_dir` must be new, empty, or an earlier output, which is replaced at the end; an interrupted call leaves
    it as it was. Raises UserError for bad arguments, a folder that is not ours, or when pytest is not installed.
    """
    started_s = time.monotonic()
    low, high = _target_range(target_tokens)
    _check_counts(n_tasks=n_tasks, runs_per_task=runs_per_task, jobs=jobs)
    pytest_version = _pytest_version()
    out_dir = out_dir.absolute()
    check_out_dir(out_dir)
    git = find_git()
    runs = _runs(runs_per_task)
    slots = [_Slot(index, name, policy) for index in range(n_tasks) for name, policy in runs.items()]
    episodes: dict[str, dict[str, Episode]] = {name: {} for name in runs}

    # When anything ends this block, Ctrl-C included, the runs under way stop and the folder goes.
    with tempfile.TemporaryDirectory(prefix="traceforge-sample-", ignore_cleanup_errors=True) as scratch:
        plan = _Plan(seed, low, high, git, Path(scratch), threading.Event())
        for name in runs:
            plan.staged(name).mkdir(parents=True)
        with contextlib.closing(_in_parallel(plan, slots, jobs)) as finished:
            for n_done, (slot, episode) in enumerate(finished, start=1):
                episodes[slot.run_name][episode.instance_id] = episode
                if progress:
                    progress(n_done, len(slots))
        for name, batch in episodes.items():
            write_run_files(plan.staged(name), batch)
        settings = {
            "n_tasks": n_tasks,
            "seed": seed,
            "runs_per_task": runs_per_task,
            "target_tokens": [low, high],
            "python": ".".join(platform.python_version_tuple()[:2]),
            "pytest": pytest_version,
            "patches_by": _patches_by(git),
        }
        publish(Path(scratch, "staged"), out_dir, list(runs), settings)

    lengths = [episode.n_tokens for batch in episodes.values() for episode in batch.values()]
    outcomes = _outcomes_by_task(episodes)
    n_resolved = sum(sum(resolved) for resolved in outcomes.values())
    return SampleReport(
        out_dir=str(out_dir),
        seed=seed,
        n_tasks=n_tasks,
        n_runs=len(slots),
        n_resolved=n_resolved,
        n_failed=len(slots) - n_resolved,
        n_tasks_with_both_outcomes=sum(len(set(resolved)) == 2 for resolved in outcomes.values()),
        min_tokens=min(lengths),
        median_tokens=int(statistics.median(lengths)),
        max_tokens=max(lengths),
        runs=tuple(_run_report(name, policy, episodes[name]) for name, policy in runs.items()),
        python_version=platform.python_version(),
        pytest_version=pytest_version,
        patches_by=_patches_by(git),
        duration_s=time.monotonic() - started_s,
    )


def _in_parallel(plan: _Plan, slots: list[_Slot], jobs: int) -> Generator[tuple[_Slot, Episode]]:
    """The finished runs, in the order in which they end. Threads: the work is done by subprocesses."""
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="sample") as pool:
        try:
            futures = [pool.submit(_make_run, plan, slot) for slot in slots]
            for future in as_completed(futures):
                yield future.result()
        finally:
            plan.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _make_run(plan: _Plan, slot: _Slot) -> tuple[_Slot, Episode]:
    task = make_task(slot.task_index, plan.seed, bulk_chars=int(plan.high * CHARS_PER_TOKEN * _BULK_SHARE))
    seed_text = f"{plan.seed}/{slot.task_index}/{slot.run_name}"
    with tempfile.TemporaryDirectory(dir=plan.scratch, ignore_cleanup_errors=True) as folder:
        episode, trajectory = run_episode(
            task,
            slot.policy,
            seed_text=seed_text,
            target_tokens=_draw_target(seed_text, plan.low, plan.high),
            root=Path(folder, "sandbox"),
            git=plan.git,
            stop=plan.stop,
        )
    path = plan.staged(slot.run_name) / f"{task.instance_id}.traj.json"
    path.write_text(trajectory_json(trajectory), encoding="utf-8")
    return slot, episode


def _runs(runs_per_task: int) -> dict[str, str]:
    """Folder names and their policies, such as careful-0: careful, sloppy-0: sloppy, careful-1: careful."""
    runs: dict[str, str] = {}
    for policy in islice(cycle(_POLICY_CYCLE), runs_per_task):
        number = sum(other == policy for other in runs.values())
        runs[f"{policy}-{number}"] = policy
    return runs


def _draw_target(seed_text: str, low: int, high: int) -> int:
    """A length between the two, log-uniformly: short runs are as frequent as long ones in every octave."""
    drawn = random.Random(f"{seed_text}/target").uniform(math.log(low), math.log(high))
    return min(high, max(low, round(math.exp(drawn))))


def _target_range(target_tokens: TargetTokens) -> tuple[int, int]:
    low, high = (target_tokens, target_tokens) if isinstance(target_tokens, int) else target_tokens
    if not MIN_TARGET_TOKENS <= low <= high <= MAX_TARGET_TOKENS:
        raise UserError(
            f"no run of {low} to {high} tokens can be made",
            where="target_tokens",
            fix=f"give a length, or a lower and an upper one, from {MIN_TARGET_TOKENS} to {MAX_TARGET_TOKENS}",
        )
    return low, high


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not 1 <= count <= _MAX_COUNTS[name]:
            raise UserError(f"{count} is out of range", where=name, fix=f"give 1 to {_MAX_COUNTS[name]}")


def _pytest_version() -> str:
    try:
        return importlib.metadata.version("pytest")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "pytest is not installed, and sample runs run it for real", fix="pip install -e '.[dev]'"
        ) from error


def _patches_by(git: str | None) -> str:
    return "git" if git else "difflib"


def _outcomes_by_task(episodes: Mapping[str, Mapping[str, Episode]]) -> dict[str, list[bool]]:
    outcomes: dict[str, list[bool]] = {}
    for batch in episodes.values():
        for instance_id, episode in batch.items():
            outcomes.setdefault(instance_id, []).append(episode.resolved)
    return outcomes


def _run_report(name: str, policy: str, batch: Mapping[str, Episode]) -> SampleRunReport:
    runs = batch.values()
    return SampleRunReport(
        name=name,
        policy=policy,
        n_resolved=sum(run.resolved for run in runs),
        n_limits_exceeded=sum(run.exit_status == "LimitsExceeded" for run in runs),
        n_empty_patches=sum(not run.submission for run in runs),
    )
