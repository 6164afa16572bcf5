"""Sample runs: real outcomes, the same bytes for the same seed, lengths as asked, and the layout of real files."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.errors import UserError
from tasks.sample import SampleReport, generate_samples
from tasks.sample.generate import MAX_TARGET_TOKENS, MIN_TARGET_TOKENS
from tasks.sample.recorder import observation_text
from tasks.sample.repository import make_task
from tasks.sample.sandbox import CommandResult, write_files

N_TASKS, SEED = 2, 11
RUN_NAMES = ["careful-0", "sloppy-0", "careful-1", "looping-0"]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SampleReport]:
    """Four runs each of a few short tasks, made with two jobs."""
    out_dir = tmp_path_factory.mktemp("samples") / "out"
    return out_dir, generate_samples(out_dir, n_tasks=N_TASKS, seed=SEED, jobs=2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trajectories(out_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(out_dir.glob("*/*.traj.json")):
        yield path.parent.name, json.loads(path.read_text())


def n_tokens(trajectory: dict[str, Any]) -> float:
    """Counted here on its own: what stands in the messages, once, at four characters a token."""
    messages = trajectory["messages"][:-1]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    n_chars = sum(len(message["content"]) for message in messages)
    return (n_chars + sum(len(call["function"]["arguments"]) for call in calls)) / 4


# --- runs ------------------------------------------------------------------------------------------------------


def test_same_bytes_for_other_jobs_folders_and_environment(
    batch: tuple[Path, SampleReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "another place with spaces" / "tmp"
    scratch.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-vv")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    (tmp_path / ".gitconfig").write_text("[diff]\n\tnoprefix = true\n\tcontext = 9\n")
    calls: list[tuple[int, int]] = []
    generate_samples(tmp_path / "b", n_tasks=N_TASKS, seed=SEED, jobs=3, progress=lambda *done: calls.append(done))
    first, second = files_of(batch[0]), files_of(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert calls == [(n, 4 * N_TASKS) for n in range(1, 4 * N_TASKS + 1)]
    assert list(scratch.iterdir()) == []
    text = b"".join(first.values()).decode()
    assert str(scratch) not in text
    assert tempfile.gettempdir() not in text
    assert sys.prefix not in text


def test_outcomes_hold_when_the_patch_is_applied_and_tested_again(
    batch: tuple[Path, SampleReport], tmp_path: Path
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed, and this test applies patches with it")
    out_dir, _ = batch
    outcomes = set()
    for name in ("careful-0", "sloppy-0"):
        resolved_ids = json.loads((out_dir / name / "report.json").read_text())["resolved_ids"]
        for path in sorted((out_dir / name).glob("*.traj.json")):
            trajectory = json.loads(path.read_text())
            instance_id, patch = trajectory["instance_id"], trajectory["info"]["submission"]
            task = make_task(int(instance_id[-4:]), SEED, bulk_chars=5_600)
            tree = tmp_path / name / instance_id
            write_files(tree, task.files)
            if patch:
                subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tree, check=True)
            write_files(tree, {task.test_path: task.bug.tests, **task.hidden_files})
            tests = [task.test_path, *task.hidden_files]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
            passed = subprocess.run(command, cwd=tree, capture_output=True).returncode == 0
            assert passed == (instance_id in resolved_ids), (name, instance_id)
            outcomes.add(passed)
    assert outcomes == {True, False}


def test_most_tasks_have_both_outcomes(batch: tuple[Path, SampleReport]) -> None:
    out_dir, report = batch
    reports = {name: json.loads((out_dir / name / "report.json").read_text()) for name in RUN_NAMES}
    ids = reports["careful-0"]["submitted_ids"]
    n_resolved = [sum(name in batch["resolved_ids"] for batch in reports.values()) for name in ids]
    assert len(ids) == N_TASKS
    assert sum(0 < n < len(RUN_NAMES) for n in n_resolved) >= 0.7 * N_TASKS
    assert max(n_resolved) >= 2
    assert (report.n_resolved, report.n_failed) == (sum(n_resolved), 4 * N_TASKS - sum(n_resolved))
    assert report.n_tasks_with_both_outcomes == sum(0 < n < len(RUN_NAMES) for n in n_resolved)
    assert [run.name for run in report.runs] == RUN_NAMES
    assert report.python_version == platform.python_version()


def test_side_files_agree_with_the_trajectories(batch: tuple[Path, SampleReport]) -> None:
    out_dir, _ = batch
    for name in RUN_NAMES:
        report = json.loads((out_dir / name / "report.json").read_text())
        statuses = yaml.safe_load((out_dir / name / "exit_statuses.yaml").read_text())
        found: dict[str, list[str]] = {}
        empty = []
        for _, trajectory in [pair for pair in trajectories(out_dir) if pair[0] == name]:
            found.setdefault(trajectory["info"]["exit_status"], []).append(trajectory["instance_id"])
            if not trajectory["info"]["submission"]:
                empty.append(trajectory["instance_id"])
        assert statuses == {"instances_by_exit_status": found}
        assert report["empty_patch_ids"] == empty
        assert sorted(report["completed_ids"] + empty) == report["submitted_ids"]
        assert sorted(report["resolved_ids"] + report["unresolved_ids"]) == report["completed_ids"]
        for key in ("submitted", "completed", "resolved", "unresolved"):
            assert report[f"{key}_instances"] == len(report[f"{key}_ids"])


def test_messages_have_the_order_of_a_real_run(batch: tuple[Path, SampleReport]) -> None:
    first_messages: dict[str, set[str]] = {}
    for name, trajectory in trajectories(batch[0]):
        messages, info = trajectory["messages"], trajectory["info"]
        first_messages.setdefault(trajectory["instance_id"], set()).add(json.dumps(messages[:2]))
        calls = [message for message in messages if message["role"] == "assistant"]
        results = [message for message in messages if message["role"] == "tool"]
        submitted = info["exit_status"] == "Submitted"
        assert [m["role"] for m in messages[:2]] == ["system", "user"]
        assert messages[-1]["role"] == "exit"
        assert info["model_stats"]["api_calls"] == len(calls) == len(results) + submitted
        for call, result in zip(calls, results, strict=False):
            assert result["tool_call_id"] == call["tool_calls"][0]["id"]
        for call in calls:
            arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
            assert arguments == {"command": call["extra"]["actions"][0]["command"]}
        times = [message["extra"]["timestamp"] for message in messages[2:-1]]
        assert times == sorted(times)
        assert messages[-1]["extra"] == {"exit_status": info["exit_status"], "submission": info["submission"]}
        if name.startswith("looping"):
            assert info["exit_status"] == "LimitsExceeded"
            assert len(calls) == info["config"]["agent"]["step_limit"]
            assert calls[-1]["extra"]["actions"] == [
                {"command": "python check.py", "tool_call_id": calls[-1]["tool_calls"][0]["id"]}
            ]
            assert results[-1]["extra"]["returncode"] == 1
        else:
            assert submitted
            assert (info["submission"] == "") or info["submission"].startswith("diff --git a/")
        if name.startswith("careful"):
            assert any("(Pdb) " in result["content"] for result in results)
    assert all(len(texts) == 1 for texts in first_messages.values())


def test_shape_is_that_of_a_real_file(batch: tuple[Path, SampleReport], shared_dir: Path) -> None:
    real_batch = shared_dir / "mini-swe-agent" / "deepseek_chat_dev"
    real = json.loads((real_batch / "pylint-dev__astroid-1196.traj.json").read_text())
    _, ours = next(trajectories(batch[0]))
    assert ours.keys() == real.keys()
    assert ours["info"].keys() == real["info"].keys()
    assert ours["info"]["config"].keys() == real["info"]["config"].keys()
    assert ours["trajectory_format"] == real["trajectory_format"]

    def shapes(trajectory: dict[str, Any]) -> set[tuple[str, ...]]:
        return {
            (m["role"], *sorted(m), *sorted(m.get("extra", {})), *sorted((m.get("tool_calls") or [{}])[0]))
            for m in trajectory["messages"]
        }

    assert shapes(ours) == shapes(real)
    our_report = json.loads((batch[0] / "careful-0" / "report.json").read_text())
    assert our_report.keys() == json.loads((real_batch / "report.json").read_text()).keys()


def test_observation_text_is_that_of_every_real_observation(shared_dir: Path) -> None:
    n_short = n_long = 0
    for path in sorted((shared_dir / "mini-swe-agent" / "deepseek_chat_dev").glob("*.traj.json")):
        for message in json.loads(path.read_text())["messages"]:
            extra = message.get("extra", {})
            if message["role"] == "tool" and not extra["exception_info"]:
                assert observation_text(CommandResult(extra["returncode"], extra["raw_output"])) == message["content"]
                n_long += len(extra["raw_output"]) >= 10_000
                n_short += len(extra["raw_output"]) < 10_000
    assert n_short > 100
    assert n_long >= 1


# --- lengths ---------------------------------------------------------------------------------------------------


def test_short_runs_are_as_long_as_asked(batch: tuple[Path, SampleReport]) -> None:
    out_dir, report = batch
    lengths = [n_tokens(trajectory) for _, trajectory in trajectories(out_dir)]
    assert all(0.75 * 2_000 <= length <= 1.25 * 2_000 for length in lengths)  # measured 0.80 to 1.13
    assert (report.min_tokens, report.max_tokens) == (int(min(lengths)), int(max(lengths)))


def check_lengths(out_dir: Path, n_runs: int, target: int) -> None:
    lengths = {name: n_tokens(trajectory) for name, trajectory in trajectories(out_dir)}
    assert len(lengths) == n_runs
    for name, length in lengths.items():
        assert 0.75 * target <= length <= 1.25 * target, name  # measured 0.91 to 1.02


def test_longer_runs_are_as_long_as_asked(tmp_path: Path) -> None:
    generate_samples(tmp_path, n_tasks=1, seed=3, target_tokens=8_000)
    check_lengths(tmp_path, 4, 8_000)


def test_long_runs_are_as_long_as_asked_and_read_little_twice(tmp_path: Path) -> None:
    generate_samples(tmp_path, n_tasks=1, seed=3, runs_per_task=2, target_tokens=80_000)
    check_lengths(tmp_path, 2, 80_000)
    for name, trajectory in trajectories(tmp_path):
        shown = "\n".join(message["content"] for message in trajectory["messages"] if message["role"] == "tool")
        rows = re.findall(r"^.+,checked by \d+$", shown, re.MULTILINE)  # of data files, as they lie there
        assert len(set(rows)) > 0.8 * len(rows), name  # measured 0.84 and 0.87


def test_a_range_of_lengths_is_drawn_per_run(tmp_path: Path) -> None:
    report = generate_samples(tmp_path, n_tasks=2, seed=3, runs_per_task=2, target_tokens=(2_000, 20_000))
    lengths = [n_tokens(trajectory) for _, trajectory in trajectories(tmp_path)]
    assert min(lengths) > 0.75 * 2_000
    assert max(lengths) < 1.25 * 20_000
    assert max(lengths) > 1.5 * min(lengths)
    assert report.n_runs == 4


# --- the folder, and errors ------------------------------------------------------------------------------------


def test_an_earlier_output_is_replaced(tmp_path: Path) -> None:
    generate_samples(tmp_path / "out", n_tasks=1, seed=1, runs_per_task=2)
    before = set(files_of(tmp_path / "out"))
    generate_samples(tmp_path / "out", n_tasks=1, seed=2, runs_per_task=1)
    after = set(files_of(tmp_path / "out"))
    assert any(name.startswith("sloppy-0/") for name in before)
    assert not any(name.startswith("sloppy-0/") for name in after)
    assert sorted(os.listdir(tmp_path / "out")) == [".sample-manifest.json", "careful-0"]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def interrupt(n_done: int, n_runs: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_samples(tmp_path / "out", n_tasks=20, seed=1, progress=interrupt)
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_a_folder_of_others_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        generate_samples(tmp_path, n_tasks=1, seed=1)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"generator": "other", "runs": ["mine"]}'])
def test_a_foreign_manifest_gives_no_right_to_delete(tmp_path: Path, manifest: str) -> None:
    (tmp_path / ".sample-manifest.json").write_text(manifest)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="mine"):
        generate_samples(tmp_path, n_tasks=1, seed=1)


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a folder"):
        generate_samples(tmp_path / "file", n_tasks=1, seed=1)
    with pytest.raises(UserError, match="cannot write here"):
        generate_samples(tmp_path / "file" / "below", n_tasks=1, seed=1)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"n_tasks": 0}, "n_tasks"),
        ({"n_tasks": -3}, "n_tasks"),
        ({"runs_per_task": 0}, "runs_per_task"),
        ({"jobs": 0}, "jobs"),
        ({"target_tokens": MIN_TARGET_TOKENS - 1}, "target_tokens"),
        ({"target_tokens": MAX_TARGET_TOKENS + 1}, "target_tokens"),
        ({"target_tokens": (9_000, 3_000)}, "target_tokens"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        generate_samples(tmp_path / "out", **{"n_tasks": 1, "seed": 1, **arguments})
    assert caught.value.where == where
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


def test_without_pytest_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match="pytest is not installed") as caught:
        generate_samples(tmp_path / "out", n_tasks=1, seed=1)
    assert "pip install" in caught.value.fix
