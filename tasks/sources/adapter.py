"""The type of an adapter, and the one place where what goes wrong inside an adapter becomes a reason for the user."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from schemas.trajectory import Trajectory
from tasks.sources.document import Document, Shape, SourceError, read_document
from tasks.sources.draft import Run, from_trajectory, is_sound, to_trajectory

_ODD_VALUE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What pure functions raise at a value of which they did not think."""


@dataclass(slots=True)
class Guarded:
    """A file at which a reader fails costs only itself: the failure becomes a reason that names reader and exception.

    Tests of the readers call what is beneath, so that there the failure stays one.

    Raises:
        SourceError: the reader's own, or in place of what it should not have raised.
    """

    reader: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, _ODD_VALUE) and not isinstance(error, SourceError):
            said = " ".join(str(error).split())
            raise SourceError(f"{self.reader}: a value it does not expect ({type(error).__name__}: {said})") from error


def _repaired(run: Run) -> Run:
    repaired = from_trajectory(to_trajectory(run))
    if not is_sound(repaired):
        raise SourceError(f"{run.source_format}: text that is no Unicode")
    return repaired


@dataclass(frozen=True)
class Adapter:
    """One log format. `detect` looks at content only; `read` raises nothing but SourceError."""

    name: str
    detect: Callable[[Document], bool]
    read: Callable[[Document], list[Run]]
    by_record: bool = False
    """Every line is a run of its own, so that files larger than memory can be read in pieces."""
    snapshots: bool = False
    """The log repeats a growing conversation: runs that are the opening of another are earlier states of it."""
    check: Callable[[Any], object] | None = None
    """Raises SourceError at a line of a session that cannot be read, so that it costs only itself."""
    apart: Callable[[Document], Document] | None = None
    """Makes of one log with many runs a record for each, so that a bad one costs only itself."""
    shape: Shape | None = None
    """Where most of a log is not read: what is."""

    def parse(self, data: bytes, path: str = "") -> list[Trajectory]:
        """bytes of one file -> its trajectories.

        Raises:
            SourceError: the bytes are not this format.
        """
        return self.read_document(read_document(data, path))

    def read_document(self, document: Document) -> list[Trajectory]:
        """Like `parse`, for a document that was parsed already."""
        return [to_trajectory(run) for run in self.read_runs(document)]

    def knows(self, document: Document) -> bool:
        """`detect`, whatever the document holds.

        Raises:
            SourceError: `detect` failed at a value.
        """
        with Guarded(self.name):
            return self.detect(document)

    def read_runs(self, document: Document) -> list[Run]:
        """Like `read_document`, as the drafts that become rows; each would pass as a trajectory."""
        with Guarded(self.name):
            return self.sound_runs(document)

    def sound_runs(self, document: Document) -> list[Run]:
        """`read_runs` of an adapter that keeps its promise to raise nothing but SourceError."""
        try:
            return [run if is_sound(run) else _repaired(run) for run in self.read(document)]
        except ValidationError as error:
            first = error.errors()[0]
            raise SourceError(f"{self.name}: {first['msg']} at {'.'.join(map(str, first['loc']))}") from error
        except RecursionError as error:
            raise SourceError(f"{self.name}: nested too deeply") from error
