"""The scripted policies. Each is a generator: it yields (thought, command) and is sent the real result."""

from collections.abc import Callable

from tasks.sample import commands
from tasks.sample.bugs import Edit
from tasks.sample.reading import Brief, Steps, read_until, records_of
from tasks.sample.recorder import SUBMIT_MARKER

Policy = Callable[[Brief], Steps]

_CAREFUL_OVERFITS = 0.04  # how often even the careful policy is content with a fix for the reported input only
_CAREFUL_FIRST_TRY_FAILS = 0.2
_SLOPPY_HABITS = {"right": 30, "wrong": 22, "wrong_then_right": 13, "overfit": 13, "tamper": 13, "missed": 9}  # weights
_TESTED_HABITS = ("wrong_then_right", "overfit", "tamper")
_GUESS_CHARS = 1_000  # a change tried out with the tests, measured 500 to 2,400
_WORK_CHARS = 2_500  # what debugging, editing and testing take, measured 1,700 to 4,500
_CLOSING_CHARS = 900  # clean-up, patch and submission, measured 200 to 910
_FAILED_CHECK_CHARS = 300  # thought, call and traceback of one round of the looping policy, measured 250 to 400
_CHECK = "python check.py"
_MAX_LOOP_ROWS = 60  # a longer print would be cut in the observation


def careful(brief: Brief) -> Steps:
    """Reproduce, stop in pdb, fix the cause, test, clean up, submit."""
    task, rng = brief.task, brief.rng
    yield brief.say("look"), rng.choice((f"cat {task.module_path}", f"ls && cat -n {task.module_path}"))
    yield from read_until(brief, int(0.6 * brief.target_chars) - _WORK_CHARS)
    tested = yield brief.say("tests"), _test_command(brief)
    failure = commands.failure_line(tested.output) or task.bug.failing_test
    debugged = yield brief.say("debug", failure=failure), commands.pdb_command(task)
    watch, value = task.bug.watch[-1], commands.pdb_values(task, debugged.output)[-1]
    said = "diagnosis"
    if rng.random() < _CAREFUL_FIRST_TRY_FAILS:
        said = "think_again"
        attempt = rng.choice(task.bug.wrong)
        yield brief.say("first_try", watch=watch, value=value), _edit(brief, attempt)
        yield brief.say("verify"), f"python -m pytest -q --tb=line {task.test_path}"
        yield brief.say("undo"), commands.rewrite_command(task.module_path, task.bug.source)
    edit = task.bug.overfit if rng.random() < _CAREFUL_OVERFITS else (task.bug.bug, task.bug.fix)
    yield brief.say(said, watch=watch, value=value), _edit(brief, edit)
    yield brief.say("verify"), rng.choice((f"python -m pytest -q {task.test_path}", "python -m pytest -q"))
    yield from read_until(brief, brief.target_chars - _CLOSING_CHARS)
    yield brief.say("clean"), f"rm -f {commands.REPRO_FILE} scan.py && ls"
    yield from _submit(brief, "submit")


def sloppy(brief: Brief) -> Steps:
    """Read a little, guess, and submit: mostly without running anything."""
    task, rng = brief.task, brief.rng
    gold, wrong = (task.bug.bug, task.bug.fix), rng.choice(task.bug.wrong)
    habit = rng.choices(tuple(_SLOPPY_HABITS), tuple(_SLOPPY_HABITS.values()))[0]
    yield brief.say("look"), f"cat {task.module_path}"
    to_come = _CLOSING_CHARS + (_GUESS_CHARS if habit in _TESTED_HABITS else 0)
    yield from read_until(brief, brief.target_chars - to_come)
    test = f"python -m pytest -q --tb=line {task.test_path}"
    folders = task.domain.package
    if habit == "right":
        yield brief.say("guess"), _edit(brief, gold)
    elif habit == "wrong":
        yield brief.say("guess"), _edit(brief, wrong)
    elif habit == "wrong_then_right":
        yield brief.say("guess"), _edit(brief, wrong)
        yield brief.say("verify"), test
        yield brief.say("guess_again"), commands.rewrite_command(task.module_path, task.bug.source.replace(*gold))
    elif habit == "overfit":
        yield brief.say("guess"), _edit(brief, task.bug.overfit)
        yield brief.say("verify"), test
    elif habit == "tamper":
        yield brief.say("tamper"), commands.tamper_command(task)
        yield brief.say("verify"), test
        folders = f"{folders} tests"
    else:
        yield brief.say("guess"), commands.missed_edit_command(task.module_path, task.bug.source, gold)
    yield from _submit(brief, "careless_submit", folders)


def looping(brief: Brief) -> Steps:
    """Find the failure, then repeat the failing command for as long as it is let."""
    task = brief.task
    yield brief.say("look"), f"cat {task.module_path}"
    yield brief.say("tests"), f"python -m pytest -q --tb=short {task.test_path}"
    room = brief.n_chars_left // max(1, brief.n_steps_left) - _FAILED_CHECK_CHARS
    yield brief.say("loop_start"), commands.failing_check_command(task, _rows_within(brief, room))
    n_chars_before = brief.recording.n_chars
    yield brief.say("loop"), _CHECK
    n_chars_per_round = brief.recording.n_chars - n_chars_before
    n_chars_spare = brief.n_chars_left - n_chars_per_round * brief.n_steps_left
    yield from read_until(brief, brief.recording.n_chars + n_chars_spare)
    while True:
        yield brief.say("loop"), _CHECK


POLICIES: dict[str, Policy] = {"careful": careful, "sloppy": sloppy, "looping": looping}


def _test_command(brief: Brief) -> str:
    options = brief.rng.choice(("-q", "-x -q", "-q --tb=short"))
    return f"python -m pytest {options} {brief.task.test_path}"


def _edit(brief: Brief, edit: Edit) -> str:
    return commands.edit_command(brief.rng, brief.task.module_path, brief.task.bug.source, edit)


def _rows_within(brief: Brief, n_chars: int) -> int:
    """How many printed records fit into `n_chars`."""
    printed = [f"{row}\n" for row in records_of(brief.task)[:_MAX_LOOP_ROWS]]
    return commands.lines_within(printed, 0, n_chars) if n_chars > len(printed[0]) else 0


def _submit(brief: Brief, said: str, folders: str | None = None) -> Steps:
    patch = f"{brief.patch_command} {folders or brief.task.domain.package} > patch.txt && cat patch.txt"
    yield brief.say("patch"), patch
    yield brief.say(said), f"echo {SUBMIT_MARKER} && cat patch.txt"
