"""What a sample task is made of: a domain (names), a bug in it, and the repository around the bug."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import NamedTuple

Edit = tuple[str, str]  # text that occurs exactly once in the module, and what replaces it


class Domain(NamedTuple):
    """The names one task uses, so that tasks of one family differ in every identifier."""

    package: str
    item: str
    items: str
    field: str


@dataclass(frozen=True)
class Bug:
    """One faulty module with its tests.

    `source` holds `bug` once; putting `fix` in its place is the gold patch. Each edit of `wrong` is a plausible
    guess that leaves the visible tests failing; `overfit` satisfies the visible tests only.
    `watch` are expressions worth printing in a debugger stopped at the line of `stop_at` (default: `bug`)
    for the `n_stops`-th time; the last one tells most.
    """

    family: str
    module: str
    source: str
    bug: str
    fix: str
    wrong: tuple[Edit, ...]
    overfit: Edit
    tests: str
    hidden_tests: str
    failing_test: str
    repro: str
    watch: tuple[str, ...]
    title: str
    report: str
    cause: str
    stop_at: str | None = None
    n_stops: int = 1


@dataclass(frozen=True)
class SampleTask:
    """A bug in its repository. `files` maps relative paths to text; `hidden_files` are added only for grading."""

    instance_id: str
    domain: Domain
    bug: Bug
    files: dict[str, str]
    hidden_files: dict[str, str]

    @property
    def module_path(self) -> str:
        return f"{self.domain.package}/{self.bug.module}.py"

    @property
    def test_path(self) -> str:
        return f"tests/test_{self.bug.module}.py"

    @property
    def stop_line(self) -> int:
        """Line number, from 1, at which a debugger shows the bug."""
        return line_of(self.bug.source, self.bug.stop_at or self.bug.bug)

    @property
    def problem_statement(self) -> str:
        return f"{self.bug.title}\n\n{self.bug.report}"


Family = Callable[[Domain, random.Random], Bug]

DOMAINS = (
    Domain("depot", "pallet", "pallets", "weight"),
    Domain("clinic", "visit", "visits", "minutes"),
    Domain("library", "loan", "loans", "days"),
    Domain("bakery", "loaf", "loaves", "grams"),
    Domain("harbor", "vessel", "vessels", "tonnage"),
    Domain("orchard", "crate", "crates", "apples"),
    Domain("museum", "exhibit", "exhibits", "age"),
    Domain("railway", "train", "trains", "coaches"),
    Domain("theater", "ticket", "tickets", "price"),
    Domain("garage", "repair", "repairs", "hours"),
    Domain("kennel", "dog", "dogs", "age"),
    Domain("airport", "flight", "flights", "seats"),
    Domain("brewery", "batch", "batches", "liters"),
    Domain("school", "lesson", "lessons", "minutes"),
    Domain("farm", "field", "fields", "acres"),
    Domain("studio", "track", "tracks", "seconds"),
    Domain("mailroom", "parcel", "parcels", "weight"),
    Domain("gym", "workout", "workouts", "calories"),
    Domain("hotel", "booking", "bookings", "nights"),
    Domain("lab", "probe", "probes", "voltage"),
)


def code(text: str) -> str:
    """An indented block of this file as the text of a file: dedented, no leading blank line."""
    return dedent(text).lstrip("\n")


def line_of(source: str, text: str) -> int:
    """Line number, from 1, of the first place where `text` stands in `source`."""
    return source[: source.index(text)].count("\n") + 1


def special_case(condition: str, result: str, bug: str) -> Edit:
    """An edit that answers the one reported input by hand and leaves the bug where it is."""
    return bug, f"if {condition}:\n        return {result}\n    {bug}"
