"""Reading for length: commands that show about as many characters as are left to a run's target."""

import csv
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from tasks.sample.bugs import SampleTask
from tasks.sample.commands import lines_within, pp_command
from tasks.sample.recorder import Recording
from tasks.sample.sandbox import CommandResult
from tasks.sample.wording import PHRASES

Step = tuple[str, str]  # thought, command
Steps = Generator[Step, CommandResult, None]

_STEP_OVERHEAD_CHARS = 160  # thought, call and tags around an observation, measured 120 to 300
_MIN_READ_CHARS = 250
_READ_CHARS = (5_000, 9_400)  # stays under the 10,000 at which an observation is cut
_TEST_LINE_CHARS = 81  # pytest -vv fills lines to COLUMNS
_PP_CHARS_PER_ROW = 140  # pprint of one record, measured 133 to 153
_SMALL_READ_CHARS = 1_500


@dataclass
class Brief:
    """What a policy works with: the task, its own random source, and how long the run is meant to be."""

    task: SampleTask
    rng: random.Random
    recording: Recording
    target_chars: int
    step_limit: int
    patch_command: str
    offsets: dict[str, int] = field(default_factory=dict)

    @property
    def n_chars_left(self) -> int:
        return self.target_chars - self.recording.n_chars

    @property
    def n_steps_left(self) -> int:
        return self.step_limit - self.recording.n_calls

    def say(self, kind: str, **values: object) -> str:
        """A thought of this kind in one of its wordings."""
        task = self.task
        names = {
            "module_path": task.module_path,
            "function_module": task.bug.module,
            "failing_test": task.bug.failing_test,
            "stop_line": task.stop_line,
            "cause": task.bug.cause,
        }
        return self.rng.choice(PHRASES[kind]).format(**names, **values)


def read_until(brief: Brief, n_chars: int) -> Steps:
    """Read files, test output and records until the run holds about `n_chars` characters."""
    while (room := n_chars - brief.recording.n_chars - _STEP_OVERHEAD_CHARS) > _MIN_READ_CHARS:
        yield _reading_step(brief, min(room, brief.rng.randint(*_READ_CHARS)))


def records_of(task: SampleTask) -> list[dict[str, str]]:
    """The rows of all data files, as the package's own loader gives them."""
    return list(_records(task))


def _records(task: SampleTask) -> Iterator[dict[str, str]]:
    for name in _data_names(task):
        yield from csv.DictReader(task.files[name].splitlines())


def _data_names(task: SampleTask) -> list[str]:
    return [name for name in task.files if name.startswith("data/")]


def _reading_step(brief: Brief, n_chars: int) -> Step:
    if n_chars < _SMALL_READ_CHARS:
        return _read_file(brief, n_chars)
    return brief.rng.choice((_read_file, _read_file, _read_tests, _read_records))(brief, n_chars)


def _read_file(brief: Brief, n_chars: int) -> Step:
    name = brief.rng.choice(_data_names(brief.task))
    lines = brief.task.files[name].splitlines(keepends=True)
    start = brief.offsets.get(name, 0) % len(lines)
    stop = lines_within(lines, start, n_chars)
    if stop == len(lines):  # near the end: step back, so that the piece is as long as wanted
        start = len(lines) - lines_within(lines[::-1], 0, n_chars)
    brief.offsets[name] = stop
    return brief.say("read", target=name), f"sed -n '{start + 1},{stop}p' {name}"


def _read_tests(brief: Brief, n_chars: int) -> Step:
    # sed reads to the end; head would stop early and break pytest's pipe at a different place every time.
    command = f"python -m pytest -vv tests/test_records.py | sed -n '1,{n_chars // _TEST_LINE_CHARS}p'"
    return brief.say("read", target="the tests of the records"), command


def _read_records(brief: Brief, n_chars: int) -> Step:
    n_rows = n_chars // _PP_CHARS_PER_ROW
    n_all = len(records_of(brief.task))
    start = brief.offsets.get("records", 0)
    if start + n_rows > n_all:
        start = max(0, n_all - n_rows)
    brief.offsets["records"] = (start + n_rows) % n_all
    command = pp_command(brief.task.domain.package, start, start + n_rows)
    return brief.say("read", target="the records as they are loaded"), command
