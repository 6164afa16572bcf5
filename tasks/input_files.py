"""From paths, folders and globs to the files to read, in a fixed order."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts.store import file_sha256, payload_digest
from schemas.errors import UserError


def path_name(path: Path) -> str:
    """The path as valid text: names of files are bytes and may hold anything."""
    return os.fsencode(path).decode("utf-8", "replace")


@dataclass(frozen=True)
class InputFile:
    """One file on disk, as found, or a data set by name. `problem` says why it cannot be read at all."""

    path: Path
    size_bytes: int = 0
    mtime_ns: int = 0
    problem: str | None = None
    dataset: str | None = None

    @property
    def name(self) -> str:
        return f"{DATASET_PREFIX}{self.dataset}" if self.dataset else path_name(self.path)

    def sha256(self) -> str:
        """Of the content; where there is none at hand (a data set on a hub), of the name: its changes go unnoticed."""
        if self.dataset is None and self.problem is None:
            return file_sha256(self.path)
        folder = Path((self.dataset or "").partition(":")[0])
        if self.dataset and folder.is_dir():
            return payload_digest(folder)[0]
        return hashlib.sha256(f"{self.name}\0{self.problem}".encode()).hexdigest()


DATASET_PREFIX = "hf:"
"""`hf:owner/name` or `hf:folder`, with an optional `:split`, names a Hugging Face data set."""


def _stat(path: Path) -> InputFile:
    try:
        info = path.stat()
    except OSError as error:
        return InputFile(path, problem=f"cannot be read: {error.strerror}")
    problem = None if stat.S_ISREG(info.st_mode) else "not a regular file"  # opening a FIFO would wait for ever
    return InputFile(path, info.st_size, info.st_mtime_ns, problem)


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder, sorted; links to folders are not followed, hidden entries are left out."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif not (entry.is_symlink() and entry.is_dir()):
            yield Path(entry.path)


def _expand(given: str) -> Iterable[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        return _walk(path)
    if path.exists():
        return [path]
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        return (file for match in matches for file in (_walk(match) if match.is_dir() else [match]))
    return []


def find_files(paths: Iterable[str]) -> Iterator[InputFile]:
    """The files that the paths stand for, each once, in the order given and sorted within a folder.

    Raises:
        UserError: a path is missing, a glob matches nothing, or a folder holds no file.
    """
    seen: set[Path] = set()
    for given in paths:
        if given.startswith(DATASET_PREFIX):
            name = given.removeprefix(DATASET_PREFIX)
            yield InputFile(Path(given), dataset=name)
            continue
        n_found = 0
        for path in _expand(given):
            n_found += 1
            if path not in seen:
                seen.add(path)
                yield _stat(path)
        if not n_found:
            folder = Path(given).expanduser().is_dir()
            raise UserError(
                "an empty folder" if folder else "no such file or folder",
                where=given,
                fix="set source.paths to files, folders or globs of logged runs",
            )


def files_digest(files: Iterable[InputFile]) -> str:
    """sha256 over the sorted list of paths and contents: a changed, added or removed file changes it."""
    lines = sorted(f"{file.name}\0{file.sha256()}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
