"""From paths, folders and globs to the files to read, in a fixed order."""

import glob
import hashlib
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from artifacts.store import payload_digest
from schemas.errors import UserError
from tasks.content_digest import content_blake3, file_blake3
from tasks.memory_files import remove
from tasks.sessions import COPY, event_number, is_event, is_page


def path_name(path: Path) -> str:
    """The path as valid text, another one for each path: names of files are bytes and may hold anything."""
    return valid_name(str(path))


def valid_name(name: str) -> str:
    """Like `path_name`, for a name as `os.fsdecode` gives it. Bytes that are no UTF-8 are written out as `\\xff`. A
    name that holds such a byte, or four characters that look like one, has its backslashes doubled: so the two differ.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name.replace("\\", "\\\\")).decode("utf-8", "backslashreplace")
    return name.replace("\\", "\\\\") if _LIKE_A_BYTE.search(name) else name


_LIKE_A_BYTE = re.compile(r"\\x[0-9a-f]{2}")

EMPTY = "empty file"
"""Why a file without a byte gives no run. Files of the kernel say so too, and reading them can wait for ever."""

_KERNEL_FOLDERS = ("/proc", "/sys", "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/fs/cgroup")
_SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was looked at can be changed again without its times showing it."""


@dataclass(frozen=True)
class InputFile:
    """One file on disk, as found, a session kept as one file an event, or a data set by name."""

    path: Path
    stamp: str = ""
    """Size, time of the last write and of the last change of any kind: an edit that puts the first two back shows in
    the third.
    """
    is_settled: bool = True
    """Whether an equal stamp means equal content."""
    problem: str | None = None
    """Why it cannot be read at all."""
    dataset: str | None = None
    events: tuple[Path, ...] = ()
    """The files of a session, in order; `path` is their folder."""

    @cached_property
    def name(self) -> str:
        return f"{DATASET_PREFIX}{self.dataset}" if self.dataset else path_name(self.path)

    def digest(self) -> str:
        """Of the content; where there is none at hand (a data set on a hub), of the name: its changes go unnoticed.

        Raises:
            OSError: the file cannot be read, or no more.
        """
        if self.events:
            listing = "".join(f"{path_name(path)}\0{_event_blake3(path)}\n" for path in self.events)
            return content_blake3(listing.encode())
        if self.dataset is None and self.problem is None:
            return file_blake3(self.path)
        folder = Path((self.dataset or "").partition(":")[0])
        if self.dataset and folder.is_dir():
            return payload_digest(folder)[0]
        return content_blake3(f"{self.name}\0{self.problem}".encode())


def _event_blake3(path: Path) -> str:
    try:
        return file_blake3(path)
    except OSError:
        return UNREAD


UNREAD = "cannot be read"
"""Stands for the digest of a content that cannot be read, whatever the reason was this time."""


def unreadable(error: OSError) -> str:
    """Why a file or folder is left out."""
    return f"{UNREAD}: {error.strerror or ' '.join(str(error).split())}"


class DigestBook:
    """Digests of files as they were last read: one whose stamp is unchanged is read for its digest only once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._db.execute("CREATE TABLE IF NOT EXISTS digests (file TEXT PRIMARY KEY, stamp TEXT, digest TEXT)")
        self._is_empty = self._db.execute("SELECT 1 FROM digests LIMIT 1").fetchone() is None

    def known(self, file: InputFile) -> str | None:
        """The digest of a file that has not changed since."""
        if self._is_empty or not file.is_settled or not file.stamp:
            return None
        row = self._db.execute("SELECT stamp, digest FROM digests WHERE file = ?", (file.name,)).fetchone()
        return row[1] if row is not None and row[0] == file.stamp else None

    def digest(self, file: InputFile) -> str:
        """The digest, read from the file where it is not known; a mark, not remembered, where it cannot be read."""
        known = self.known(file)
        if known is not None:
            return known
        try:
            digest = file.digest()
        except OSError:
            return UNREAD
        if file.is_settled and file.stamp:
            self._db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (file.name, file.stamp, digest))
            self._is_empty = False
        return digest


_DIGESTS = "digests.sqlite"


def delete_digests(folder: Path) -> None:
    """The digests that are remembered in a folder are computed anew."""
    remove(folder / _DIGESTS)


@contextmanager
def open_digests(folder: Path | None) -> Iterator[DigestBook]:
    """The digest book in a folder; None: one that is forgotten afterwards.

    Raises:
        sqlite3.DatabaseError: the system refuses, or the file is damaged (also while it is in use).
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    path = ":memory:" if folder is None else folder / _DIGESTS
    with closing(sqlite3.connect(path, timeout=3600)) as connection:
        yield DigestBook(connection)
        connection.commit()


DATASET_PREFIX = "hf:"
"""`hf:owner/name` or `hf:folder`, with an optional `:split`, names a Hugging Face data set."""


@cache
def _kernel_devices() -> frozenset[int]:
    return frozenset(os.stat(folder).st_dev for folder in _KERNEL_FOLDERS if os.path.ismount(folder))


def _stat(path: Path) -> InputFile:
    try:
        info = path.stat()
    except OSError as error:
        return InputFile(path, problem=unreadable(error))
    if not stat.S_ISREG(info.st_mode):  # opening a FIFO would wait for ever
        return InputFile(path, problem="not a regular file")
    if info.st_dev in _kernel_devices():
        return InputFile(path, problem="a file of the kernel, not a log")
    stamp = f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"
    is_settled = info.st_ctime_ns < time.time_ns() - _SETTLED_NS
    return InputFile(path, stamp, is_settled, problem=None if info.st_size else EMPTY)


def _session(folder: Path, files: list[str]) -> InputFile | None:
    """A folder of `0.json`, `1.json`, `10.json` or `event-00007-<id>.json`, each one event, as one session."""
    numbered = []
    for file in files:
        number = event_number(os.path.basename(file))
        if number is None:
            return None
        numbered.append((number, file))
    if not numbered:
        return None
    events = tuple(Path(file) for _, file in sorted(numbered))
    found = [_stat(file) for file in events]
    if any(file.problem not in (None, EMPTY) for file in found):
        return None
    try:
        if not is_event(events[0].read_bytes()):
            return None
    except OSError:
        return None
    stamps = "\n".join(f"{file.name} {file.stamp}" for file in found)
    digest = hashlib.sha256(stamps.encode()).hexdigest()
    return InputFile(folder, digest, is_settled=all(file.is_settled for file in found), events=events)


def _is_folder(entry: os.DirEntry[str], *, follow_symlinks: bool = True) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follow_symlinks)
    except OSError:  # links that lead in a circle; `_stat` tells
        return False


_DOTTED_LOGS = (".aider.chat.history.md",)
"""Logs whose own name is that of a hidden file."""


def _listing(folder: Path) -> Iterator[InputFile | Path]:
    """What lies in a folder, sorted: files, and the folders below it."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".") or entry.name in _DOTTED_LOGS]
            found = sorted(shown, key=lambda entry: entry.name)
    except OSError as error:
        yield InputFile(folder, problem=unreadable(error))
        return
    session = _session(folder, [entry.path for entry in found if not _is_folder(entry)])
    is_copy = folder.name == "event_cache" and os.path.isdir(folder.parent / "events")
    for entry in found:
        if _is_folder(entry, follow_symlinks=False):
            yield Path(entry.path)
        elif _is_folder(entry) or session is not None:
            continue
        elif is_copy and is_page(entry.name):
            yield InputFile(Path(entry.path), problem=COPY)
        else:
            yield _stat(Path(entry.path))
    if session is not None:
        yield session


def _walk(folder: Path) -> Iterator[InputFile]:
    """Files below a folder, sorted; links to folders are not followed, hidden entries are left out."""
    open_folders = [_listing(folder)]  # no recursion: a tree may be deeper than Python's stack
    while open_folders:
        found = next(open_folders[-1], None)
        if found is None:
            open_folders.pop()
        elif isinstance(found, Path):
            open_folders.append(_listing(found))
        else:
            yield found


def _expand(given: str) -> Iterable[InputFile]:
    path = Path(os.path.expanduser(given))
    if os.path.isdir(path):
        return _walk(path)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        pass
    except OSError as error:
        return [InputFile(path, problem=unreadable(error))]
    else:
        return [_stat(path)]
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        return (file for match in matches for file in (_walk(match) if os.path.isdir(match) else [_stat(match)]))
    return []


def find_files(paths: Iterable[str]) -> Iterator[InputFile]:
    """The files that the paths stand for, each once, in the order given and sorted within a folder.

    Raises:
        UserError: a path is missing, a glob matches nothing, or a folder holds no file.
    """
    seen: set[str] = set()
    for given in paths:
        if given.startswith(DATASET_PREFIX):
            name = given.removeprefix(DATASET_PREFIX)
            yield InputFile(Path(given), dataset=name)
            continue
        n_found = 0
        for file in _expand(given):
            n_found += 1
            path = str(file.path)
            if path not in seen:
                seen.add(path)
                yield file
        if not n_found:
            folder = os.path.isdir(os.path.expanduser(given))
            raise UserError(
                "an empty folder" if folder else "no such file or folder",
                where=given,
                fix="give files, folders or globs of logged runs",
            )


def files_digest(files: Iterable[InputFile], digests: DigestBook) -> str:
    """sha256 over the sorted list of paths and contents: a changed, added or removed file changes it."""
    lines = sorted(f"{file.name}\0{digests.digest(file)}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
