"""Files beside runs that say how they ended: test reports, exit-status lists, rewards. They hold no trajectories.

They are joined with runs on run and instance. A report that names the run comes first, then the one nearest to it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from pathlib import PurePosixPath
from typing import Any, TypedDict

from schemas.trajectory import Outcome
from tasks.sources.base import get, reported, reward_outcome
from tasks.sources.document import Document, SourceError
from tasks.sources.instances import instance_task


class SideFields(TypedDict, total=False):
    """The top-level keys by which a side file is told. A log's shape has them too: the test stays the same."""

    resolved: Any
    resolved_ids: Any
    tests_status: Any
    patch_exists: Any
    instances_by_exit_status: Any
    verifier_result: Any
    reward: Any


_SIDE_KEYS = frozenset(SideFields.__annotations__)


@dataclass(frozen=True)
class SideFact:
    """One statement about a run. `instance` None: about the one trial in `folder`. `run`: the run the file names."""

    path: str
    folder: str
    instance: str | None
    run: str | None = None
    outcome: Outcome | None = None
    exit_status: str | None = None


_RESOLVED, _FAILED = reported(True), reported(False)
_REWARD_NAMES = ("reward.txt", "reward.json")
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*", re.ASCII)
_GENERIC_STEMS = ("report", "results", "result", "exit_statuses")


def _run_of(path: PurePosixPath) -> str | None:
    """`model.run_id.json` names its run; `report.json` does not."""
    stem = path.name.removesuffix(".json")
    return stem.rsplit(".", 1)[-1] if "." in stem and stem.rsplit(".", 1)[-1] not in _GENERIC_STEMS else None


def _run_report(value: dict[str, Any], path: PurePosixPath) -> list[SideFact] | None:
    """SWE-bench run report: lists of instance ids. Instances whose evaluation broke stay unknown."""
    suffix = "_ids" if isinstance(value.get("resolved_ids"), list) else ""
    if not isinstance(value.get(f"resolved{suffix}"), list):
        return None
    facts = []
    for key, outcome in (("resolved", _RESOLVED), ("unresolved", _FAILED), ("empty_patch", _FAILED)):
        listed = value.get(key + suffix)
        facts += [
            SideFact(str(path), str(path.parent), instance, _run_of(path), outcome)
            for instance in (listed if isinstance(listed, list) else [])
            if isinstance(instance, str)
        ]
    return facts


def _is_report_map(value: dict[str, Any]) -> bool:
    return bool(value) and all(reported(get(report, "resolved")).status != "unknown" for report in value.values())


def _instance_reports(value: dict[str, Any], path: PurePosixPath) -> list[SideFact] | None:
    """One instance's test report (the instance is named by file or folder), or a map of instance to report."""
    outcome = reported(value.get("resolved"))
    if outcome.status != "unknown" and ("tests_status" in value or "patch_exists" in value):
        name = path.name.removesuffix(".json").removesuffix("report").rstrip(".") or path.parent.name
        return [SideFact(str(path), str(path.parent), name, None, outcome)]
    if not _is_report_map(value):
        return None
    return [
        SideFact(str(path), str(path.parent), key, None, reported(report["resolved"])) for key, report in value.items()
    ]


def _exit_statuses(value: dict[str, Any], path: PurePosixPath) -> list[SideFact] | None:
    by_status = value.get("instances_by_exit_status")
    if not isinstance(by_status, dict):
        return None
    return [
        SideFact(str(path), str(path.parent), instance, exit_status=str(status))
        for status, instances in by_status.items()
        for instance in (instances if isinstance(instances, list) else [])
        if isinstance(instance, str)
    ]


def _reward(value: Any, path: PurePosixPath) -> list[SideFact] | None:
    """A trial's `verifier/reward.txt` or `reward.json`, and its `result.json`: about the runs in the trial's folder.

    Raises:
        SourceError: the reward is no number, or of a scale of which nobody said where success begins.
    """
    reward = value
    if isinstance(value, dict):
        reward = get(value, "verifier_result", "rewards", "reward")
        if reward is None and path.name in _REWARD_NAMES:
            if "reward" not in value:
                return None
            reward = value["reward"]
    outcome = reward_outcome(reward)
    if outcome.status == "unknown":
        if path.name not in _REWARD_NAMES:
            return None
        if isinstance(reward, int) or (isinstance(reward, float) and not isnan(reward)):
            raise SourceError(f"a reward of {str(reward)[:20]} where one in [0, 1] is expected: rescale it")
        shown = reward if isinstance(reward, str) else str(reward) if reward is not None else "null"
        raise SourceError(f"a reward that cannot be read: {shown[:40]!r} is no number")
    folder = path.parent.parent if path.parent.name == "verifier" else path.parent
    return [SideFact(str(path), str(folder), None, None, outcome)]


_CONVERSATIONS = (
    *("messages", "trajectory", "traj", "history", "conversations", "conversation", "contents"),
    *("steps", "events", "log", "samples", "completion"),
)


def _holds_conversation(value: Any) -> bool:
    """Whether a run is told there: then it is none that only says how another one ended."""
    if not isinstance(value, dict):
        return False
    found = (value[key] for key in _CONVERSATIONS if key in value)
    return any(
        bool(told) and (isinstance(told, str) or (isinstance(told, list) and isinstance(told[0], dict)))
        for told in found
    )


def _is_predictions(value: dict[str, Any]) -> bool:
    """SWE-bench predictions: patches only, which the runs hold themselves."""
    return bool(value) and all(isinstance(get(entry, "model_patch"), str) for entry in value.values())


def read_side_file(document: Document) -> list[SideFact] | None:
    """What the file says about runs; None when it is no side file. An empty list: a side file with nothing to join.

    Raises:
        SourceError: it says it in a way that cannot be read, or beside the runs themselves.
    """
    value = document.value
    if not isinstance(value, dict):
        path = PurePosixPath(document.path)
        if path.name not in _REWARD_NAMES or document.kind == "jsonl":
            return None
        number = _NUMBER.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
        return _reward(float(number.group(1)) if number else value, path)
    if _holds_conversation(value):
        return None
    is_map = _is_report_map(value) or _is_predictions(value)
    if is_map and any(map(_holds_conversation, value.values())):
        raise SourceError("an object of runs, each under its name: write them as a list, or one a line")
    if is_map or not _SIDE_KEYS.isdisjoint(value):
        path = PurePosixPath(document.path)
        for reader in (_run_report, _instance_reports, _exit_statuses, _reward):
            facts = reader(value, path)
            if facts is not None:
                return facts
    return [] if is_map else None


class SideIndex:
    """All facts, looked up by run. Memory grows with the number of facts, not of runs."""

    def __init__(self, facts: Iterable[SideFact], runs: Iterable[tuple[str, str]] = ()) -> None:
        """`runs`: (task, path) of all, to see which folders hold more than one trial."""
        self._by_task: dict[str | None, list[SideFact]] = defaultdict(list)
        self._reports_in: dict[str, set[str]] = defaultdict(set)
        for fact in facts:
            self._by_task[None if fact.instance is None else instance_task(fact.instance)].append(fact)
            if fact.outcome is not None and fact.instance is not None:
                self._reports_in[fact.folder].add(fact.path)
        trials: dict[str, set[tuple[str, str]]] = {fact.folder: set() for fact in self._by_task.get(None, ())}
        for run in runs if trials else ():
            found = trials.get(str(PurePosixPath(run[1]).parent))
            if found is not None and len(found) < 2:
                found.add(run)
        self._shared_folders = {folder for folder, found in trials.items() if len(found) > 1}

    def _is_of_trial(self, fact: SideFact, folder: str) -> bool:
        """Whether what a file says of its folder is said of a run in `folder`: of the only one that lies there, and of
        what lies in Harbor's `agent`. Two trials would share one reward, and one at the root would decide all.
        """
        if folder == fact.folder:
            return folder not in self._shared_folders
        return PurePosixPath(folder).is_relative_to(PurePosixPath(fact.folder, "agent"))

    def _rank(self, fact: SideFact, folders: list[str]) -> tuple[int, int, str] | None:
        """How well a fact fits a run in `folders` (innermost last); None: it is about another run."""
        if fact.run is not None and any(PurePosixPath(folder).name == fact.run for folder in folders):
            return (2, 0, fact.path)
        if fact.instance is None and not self._is_of_trial(fact, folders[-1]):
            return None
        if fact.folder not in folders or (fact.run is not None and len(self._reports_in[fact.folder]) > 1):
            return None
        return (1, folders.index(fact.folder), fact.path)

    def join(
        self, task_id: str, source_path: str, outcome: Outcome, exit_status: str | None
    ) -> tuple[Outcome, str | None]:
        """(outcome, exit status) with what the side files say. What a log itself knows from tests or rewards stays."""
        facts = [*self._by_task.get(task_id, ()), *self._by_task.get(None, ())]
        if not facts:
            return outcome, exit_status
        parent = PurePosixPath(source_path).parent
        folders = [str(folder) for folder in reversed([parent, *parent.parents])]
        ranked = sorted(
            ((rank, fact) for fact in facts if (rank := self._rank(fact, folders)) is not None),
            key=lambda pair: pair[0],
            reverse=True,
        )
        said = next((fact.outcome for _, fact in ranked if fact.outcome is not None), None)
        ended = next((fact.exit_status for _, fact in ranked if fact.exit_status is not None), None)
        known = outcome.status != "unknown" and outcome.source not in ("agent", "none")
        return outcome if known or said is None else said, exit_status or ended
