"""What sample runs are made of: tasks with real bugs, the commands that edit and debug, and the sandbox they run in."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.sample import generate_samples
from tasks.sample.commands import (
    edit_command,
    failure_line,
    missed_edit_command,
    pdb_command,
    pdb_values,
    tamper_command,
)
from tasks.sample.episode import passes_tests
from tasks.sample.repository import FAMILIES, make_task
from tasks.sample.sandbox import Sandbox, normalise, open_sandbox, run_command, write_files

SEED = 11

# Runs the tests of many trees in one process: starting pytest for each would take a minute. Prints, per tree,
# whether the visible and the hidden tests pass.
TREE_RUNNER = """
import json, sys
from pathlib import Path

def passes(path):
    names = {}
    try:
        exec(compile(path.read_text(), str(path), "exec"), names)
        for name, value in list(names.items()):
            if name.startswith("test_"):
                value()
    except Exception:
        return False
    return True

outcomes = {}
for tree in sorted(Path(sys.argv[1]).iterdir()):
    sys.path.insert(0, str(tree))
    outcome = []
    for path in (tree / "visible.py", tree / "hidden.py"):
        known = set(sys.modules)
        outcome.append(passes(path))
        for name in set(sys.modules) - known:
            del sys.modules[name]
    outcomes[tree.name] = outcome
    sys.path.remove(str(tree))
print(json.dumps(outcomes))
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return open_sandbox(tmp_path / "box", make_task(0, SEED, bulk_chars=2_000).files, git=shutil.which("git"))


# --- tasks -----------------------------------------------------------------------------------------------------


def test_every_family_has_a_real_bug_a_real_fix_and_failing_guesses(tmp_path: Path) -> None:
    wanted: dict[str, list[bool | None]] = {}
    for index in range(2 * len(FAMILIES)):
        task = make_task(index, SEED, bulk_chars=0)
        edits = {"gold": (task.bug.bug, task.bug.fix), "overfit": task.bug.overfit}
        edits |= {f"wrong{number}": edit for number, edit in enumerate(task.bug.wrong)}
        sources = {"faulty": task.bug.source}
        for name, (old, new) in edits.items():
            assert task.bug.source.count(old) == 1, (task.instance_id, name)
            sources[name] = task.bug.source.replace(old, new)
        for name, source in sources.items():
            tree = {**task.files, task.module_path: source, "visible.py": task.bug.tests}
            write_files(tmp_path / f"{index}-{name}", {**tree, "hidden.py": task.bug.hidden_tests})
            visible, hidden = {"gold": (True, True), "overfit": (True, False)}.get(name, (False, None))
            wanted[f"{index}-{name}"] = [visible, hidden]
    answer = subprocess.run(
        [sys.executable, "-c", TREE_RUNNER, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    assert found.keys() == wanted.keys()
    for name, (visible, hidden) in wanted.items():
        assert found[name][0] is visible, name
        assert hidden is None or found[name][1] is hidden, name


def test_two_hundred_tasks_all_differ() -> None:
    tasks = [make_task(index, SEED, bulk_chars=0) for index in range(200)]
    assert len({task.bug.source for task in tasks}) == 200
    assert len({task.problem_statement for task in tasks}) == 200
    assert len({task.instance_id for task in tasks}) == 200
    assert make_task(7, SEED, bulk_chars=0).bug != make_task(7, SEED + 1, bulk_chars=0).bug


def test_every_style_of_edit_gives_the_same_file(tmp_path: Path) -> None:
    for index in range(len(FAMILIES)):
        task = make_task(index, SEED, bulk_chars=0)
        box = open_sandbox(tmp_path / str(index), task.files, git=None)
        edit = (task.bug.bug, task.bug.fix)
        module = box.workdir / task.module_path
        run_command(box, missed_edit_command(task.module_path, task.bug.source, edit))
        assert module.read_text() == task.bug.source
        commands = {edit_command(random.Random(seed), task.module_path, task.bug.source, edit) for seed in range(12)}
        for command in commands:
            module.write_text(task.bug.source)
            result = run_command(box, command)
            assert result.returncode == 0, (command, result.output)
            assert module.read_text() == task.bug.source.replace(*edit), command


def test_pdb_stops_at_the_bug_and_its_values_are_read(tmp_path: Path) -> None:
    for index in range(len(FAMILIES)):
        task = make_task(index, SEED, bulk_chars=0)
        box = open_sandbox(tmp_path / str(index), task.files, git=None)
        result = run_command(box, pdb_command(task))
        values = pdb_values(task, result.output)
        assert f"> /testbed/{task.module_path}({task.stop_line})" in result.output, result.output
        assert len(values) == len(task.bug.watch)
        assert not any(value.startswith("***") for value in values), values


# --- the sandbox -----------------------------------------------------------------------------------------------


def test_normalise_rewrites_only_what_differs(sandbox: Sandbox) -> None:
    text = (
        f'File "{sandbox.workdir}/a.py", line 3\n<f at 0x7f12ab34cd56>\n1 passed in 12.31s\n'
        "================ 1 failed, 2 passed in 61.20s (0:01:01) =================\n0x10 in 3 s\n"
    )
    lines = normalise(text, sandbox).splitlines()
    assert lines[:3] == ['File "/testbed/a.py", line 3', "<f at 0x7f0000000000>", "1 passed in 0.05s"]
    assert lines[3] == " 1 failed, 2 passed in 0.05s ".center(80, "=")
    assert lines[4] == "0x10 in 3 s"
    header = "platform linux -- Python 3.11.7, pytest-9.2.0, pluggy-1.6.0 -- /usr/bin/python"
    assert normalise(header, sandbox) == "platform linux -- Python 3.11, pytest-9.2.0 -- /usr/bin/python"


def test_commands_do_not_see_the_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    result = run_command(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '; echo; pwd; exit 3")
    assert "SECRET_OF_THE_USER" not in result.output
    assert result.output.splitlines()[1] == "/testbed"
    assert result.returncode == 3


def test_without_git_the_patch_is_the_same_but_for_the_index_line(tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed; there is nothing to compare with")
    task = make_task(1, SEED, bulk_chars=0)
    patches = []
    for name, program in (("with", git), ("without", None)):
        box = open_sandbox(tmp_path / name, task.files, git=program)
        (box.workdir / task.module_path).write_text(task.bug.source.replace(task.bug.bug, task.bug.fix))
        patches.append(run_command(box, f"{box.patch_command} {task.domain.package}").output.splitlines())
    assert [line for line in patches[0] if not line.startswith("index ")] == patches[1]
    assert len(patches[1]) > 5


def test_runs_can_be_made_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = generate_samples(tmp_path / "out", n_tasks=1, seed=SEED, runs_per_task=1)
    (path,) = (tmp_path / "out").glob("*/*.traj.json")
    trajectory = json.loads(path.read_text())
    assert report.patches_by == "difflib"
    assert "make-patch" in trajectory["messages"][1]["content"]
    assert trajectory["info"]["submission"].startswith("diff --git a/")
    assert report.n_resolved == 1


def test_grading_takes_back_changed_tests_and_adds_hidden_ones(tmp_path: Path) -> None:
    task = make_task(0, SEED, bulk_chars=0)
    gold = task.bug.source.replace(task.bug.bug, task.bug.fix)
    overfit = task.bug.source.replace(*task.bug.overfit)
    outcomes = []
    for name, source in (("tampered", task.bug.source), ("overfit", overfit), ("gold", gold)):
        box = open_sandbox(tmp_path / name, task.files, git=None)
        (box.workdir / task.module_path).write_text(source)
        assert run_command(box, tamper_command(task)).returncode == 0
        assert run_command(box, f"python -m pytest -q {task.test_path}").returncode == 0
        (box.workdir / task.test_path).write_text("def test_broken():\n    assert False\n")
        outcomes.append(passes_tests(box, task))
    assert outcomes == [False, False, True]


def test_failure_line_is_the_first_that_pytest_marks() -> None:
    assert failure_line("x\nE       assert 1 == 2\nE   and more\n") == "assert 1 == 2"
    assert failure_line("all fine") == ""
