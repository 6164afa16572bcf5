"""Errors that are meant for the person at the terminal."""

import errno
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


_OTHER_DISK = "free some space, or choose a folder of another disk"
_SYSTEM_ADVICE = {
    errno.ENOSPC: _OTHER_DISK,
    errno.EDQUOT: _OTHER_DISK,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "run as the user who owns it, or change its permissions",
    errno.ENOTDIR: "something else lies where a folder should",
    errno.EISDIR: "a folder lies where a file should",
    errno.EEXIST: "something else lies in its place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EPERM: "run as the user who owns it, or change its permissions",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free some memory",
    errno.EIO: "look at the disk: it could not read or write",
}
"""What the system may refuse at any place that touches a file, and what to do."""


def system_advice(error: OSError) -> str | None:
    """What a person can do where the system refuses a file; None: nothing, the error is a fault of ours."""
    return _SYSTEM_ADVICE.get(error.errno or 0)


def system_line(error: OSError, place: object) -> str:
    """What the system refused, where, and what a person can do, in one line."""
    advice = system_advice(error)
    return f"{place}: {error.strerror or error}" + (f" ({advice})" if advice else "")
