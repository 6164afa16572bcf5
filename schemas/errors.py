"""Errors that are meant for the person at the terminal."""

from collections.abc import Callable
from functools import partial


class UserError(Exception):
    """Bad input: what went wrong, where, and what to do about it. Shown as one line; the exit code is 2."""

    def __init__(self, what: str, *, where: object = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, str(where), fix
        super().__init__(what, self.where, fix)

    def __reduce__(self) -> tuple[Callable[[str], "UserError"], tuple[str]]:
        """Pickled as it was made: a worker process raises it, the main process shows it."""
        return partial(UserError, where=self.where, fix=self.fix), (self.what,)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.fix})" if self.fix else text


class StageError(Exception):
    """A stage failed for a reason that is not the user's input; the text carries the cause across processes."""


class ArtifactError(Exception):
    """A stored payload is missing, or is not what its reference says."""
