"""Repairs: which later action counts as the fix of a failed one."""

import json
from pathlib import Path

import pytest
from render_inputs import result, turn, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import SourceConfig
from schemas.trajectory import Message, Trajectory
from tasks.ingest import ingest
from tasks.repairs import find_repairs


def did(command: str, failed: bool | None, output: str = "r", tool: str = "bash") -> list[Message]:
    return [turn("t", (tool, json.dumps({"command": command}))), result(output, failed=failed)]


FAILED, LONG = "cat src/parse.py", "/workspace/project__0.1/src/library/expressions"
REPAIRS = {
    "an option more": ("linter fix a.sql --dialect ansi", "linter fix a.sql --dialect ansi -f"),
    "the folder corrected": ("cat /home/user/repo/tests/parse.py", "cat tests/parse.py"),
    "a wider pattern": (f"grep -n 'register.*_infer_call' {LONG}/a.c", f"grep -n '_infer_call' {LONG}/a.c | head -5"),
    "a module's name": ("python -m pytset tests", "python -m pytest tests"),
    "another version": ("python run.py all", "python3.11 run.py all"),
    "more time": ("timeout 60 make check", "timeout 600 make check"),
    "the folder entered first": ("make check", "cd /repo && make check"),
    "the environment": ("make check", "DEBUG=1 make check 2>&1 | tail -20"),
}
OTHERS = {
    "the same again": ("make check", "make check"),
    "another programme": (f"make -C {LONG} all", f"find {LONG} -name all"),
    "another question about the same file": (f"grep -n iso {LONG}/match.c", f"grep -n alias {LONG}/match.c"),
    "another script": ("python test_edge_cases.py", "python reproduce_issue.py"),
    "another editing command": ("view a.py", "create a.py"),
    "a step less": ("apt-get update && apt-get install llvm-dev", "apt-get install llvm-14-dev"),
    "the failed turn had moved the shell": ("cd /repo && pytest tests/a", "pytest tests/b"),
    "a heredoc": ("cat > a.py << EOF\nx\nEOF", "cat > a.py << EOF\ny\nEOF"),
    "an open quote": ("grep 'a b.py", "grep 'a b' b.py"),
}


@pytest.mark.parametrize("kind", REPAIRS)
def test_the_same_command_with_other_arguments_is_a_repair(kind: str) -> None:
    wrong, right = REPAIRS[kind]
    known = user("a.sql a.c run.py reproduce_issue.py tests/parse.py")
    assert list(find_repairs([known, *did(wrong, True), *did(right, False)])) == [(1, 3)]
    assert list(find_repairs([known, *did(wrong, True), *did(right, None)])) == []  # nobody says that it worked
    assert list(find_repairs([known, *did(wrong, True), *did(right, True)])) == []


@pytest.mark.parametrize("kind", OTHERS)
def test_another_action_is_no_repair(kind: str) -> None:
    wrong, right = OTHERS[kind]
    known = user("a.sql a.c a.py run.py reproduce_issue.py")
    assert list(find_repairs([known, *did(wrong, True), *did(right, False)])) == []


@pytest.mark.parametrize(
    ("between", "looks"),
    [
        ("ls -la src", True),
        ("find . -name '*.py' -exec grep -l parse {} \\; 2>/dev/null", True),
        ("find . | xargs grep -l parse | head -5", True),
        ("git log -3 && sed -n '1,5p' README", True),
        ("find . -name '*.pyc' -delete", False),
        ("find . -exec rm {} \\;", False),
        ("sed -i s/a/b/ README", False),
        ("git checkout main", False),
        ("ls > parsed.py", False),
        ("ls $(make)", False),
        ("cd src", False),
        ("pip install parse", False),
    ],
)
def test_only_turns_that_look_may_stand_between(between: str, looks: bool) -> None:
    run = [*did(FAILED, True), *did(between, False, "src/parser.py"), *did("cat src/parser.py", False)]
    assert list(find_repairs(run)) == ([(0, 4)] if looks else [])


def test_a_fix_comes_soon() -> None:
    looks, fix = did("ls", False, "src/parser.py"), did("cat src/parser.py", False)
    assert list(find_repairs([*did(FAILED, True), *looks * 3, *fix])) == [(0, 8)]
    assert list(find_repairs([*did(FAILED, True), *looks * 4, *fix])) == []


def test_a_file_that_only_the_fix_names_was_there_before() -> None:
    wrong, fix = did("python clean_fix.py --all", True), did("python clean_fixes.py --all", False)
    assert list(find_repairs([*wrong, *fix])) == []
    assert list(find_repairs([user("see clean_fixes.py"), *wrong, *fix])) == [(1, 3)]
    assert list(find_repairs([*did("touch clean_fixes.py", False), *wrong, *fix])) == [(2, 4)]
    # what the agent itself says after the failure makes no file
    says = [turn("I think of clean_fixes.py"), user("go on")]
    assert list(find_repairs([*wrong, *says, *fix])) == []


def test_after_a_turn_without_any_call_the_next_call_is_the_fix() -> None:
    silent = [turn("t"), result("no action found", failed=True)]
    assert list(find_repairs([*silent, *did("make", False)])) == [(0, 2)]
    assert list(find_repairs([*silent, *did("make", True), *did("make check", False)])) == []


def test_calls_without_a_command_and_of_other_tools() -> None:
    def called(tool: str, failed: bool, **arguments: object) -> list[Message]:
        return [turn("t", (tool, json.dumps(arguments))), result("r", failed=failed)]

    wrong = called("book", True, user="sara_doe_496", seats=2)
    assert list(find_repairs([*wrong, *called("book", False, user="sara_doe_469", seats=2)])) == [(0, 2)]
    assert list(find_repairs([*wrong, *called("cancel", False, user="sara_doe_469", seats=2)])) == []
    assert list(find_repairs([*wrong, *called("book", False, user="sara_doe_469")])) == []
    assert list(find_repairs([turn("t", ("book", "{no")), result("r", failed=True), *called("book", False)])) == []
    listed = called("shell", True, command=["bash", "-lc", "pytest tests/a -x"])
    assert list(find_repairs([*listed, *called("shell", False, command=["bash", "-lc", "pytest tests/a"])])) == [(0, 2)]


READ_BY_EYE = {
    # (task, failed message, fixing message, what the fix says): all that reading the logs gives
    ("pylint-dev__astroid-1866", 54, 56, "_infer_str_format_call"),  # a pattern that matched nothing, widened
    ("pylint-dev__astroid-1866", 48, 50, "_infer_str_format_call"),
    ("pylint-dev__astroid-1866", 76, 80, "astroid/nodes/node_classes.py"),  # the right file, seen by `find`
    ("sqlfluff__sqlfluff-1733", 20, 22, "--dialect ansi -f"),  # `fix` asks for a confirmation without -f
    ("sqlfluff__sqlfluff-1733", 12, 14, "--dialect ansi -f"),
    ("sqlfluff__sqlfluff-2419", 62, 66, "pytest test/rules/yaml_test_cases_test.py"),  # seen by `find`
    ("prompt-70b9120606d75fb4", 2, 8, "cat tests/missing_colon.py"),  # seen by `ls`
    ("prompt-6c4b5c53f79e8ffa", 2, 8, "cat tests/missing_colon.py"),
}


def test_the_repairs_of_the_shared_runs(shared_dir: Path, tmp_path: Path) -> None:
    table = open_table(ingest(SourceConfig(paths=(str(shared_dir),)), Store(tmp_path)).trajectories)
    found = set()
    for row in table.to_pylist():
        run = Trajectory.model_validate(row)
        for failed, fix in find_repairs(run.messages):
            message = run.messages[fix]
            text = message.content + "".join(call.arguments for call in message.tool_calls)
            said = {expected for expected in READ_BY_EYE if expected[:3] == (run.task_id, failed, fix)}
            assert len(said) == 1, (run.task_id, failed, fix, text)
            assert next(iter(said))[3] in text
            found |= said
    assert found == READ_BY_EYE
