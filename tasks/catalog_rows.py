"""What the catalog knows of a run and of a file."""

from dataclasses import dataclass, fields


@dataclass
class RunEntry:
    """One run as the catalog knows it; the fields of the table `runs`."""

    file: str
    seq: int
    segment: str
    row: int
    trajectory_id: str
    task_id: str
    source_path: str
    source_format: str
    status: str
    source: str
    score: float | None
    exit_status: str | None
    n_messages: int
    n_turns: int
    n_calls: int
    n_observations: int
    n_unpaired: int
    n_chars: int
    tail: str | None
    """Digest of all messages, for formats that repeat a growing conversation; None for the others."""


@dataclass(frozen=True)
class FileNotes:
    """What a file gave besides runs: statements about runs, what was refused, what was replaced."""

    facts: list[dict[str, object]]
    quarantined: list[tuple[str, str]]
    damaged: list[tuple[str, str]]
    redactions: dict[str, int]
    n_replaced: int


RUN_FIELDS = tuple(field.name for field in fields(RunEntry))
"""In the order of the table `runs`."""
