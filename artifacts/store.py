"""The artifact store: payloads by content, written atomically, verified on read.

Layout under the root: `<kind>/<first 16 hex digits of sha256>/<name>`, `staging/` for work in progress, `aliases/`
for names that move.
"""

import hashlib
import json
import os
import resource
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

from schemas.errors import ArtifactError, UserError
from schemas.refs import Digest, Kind, Ref

SMALL_FILE_BYTES = 4 * 2**20
"""Up to this size a file of a payload that lies outside the store is digested by its content."""


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex; constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestedFile:
    """A new file whose sha256 is computed while it is written, so that it need not be read again for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Buffer) -> int:
        self._digest.update(data)
        with named(self._path):
            n_bytes = self._file.write(data)
        self.n_bytes += n_bytes
        return n_bytes

    def flush(self) -> None:
        with named(self._path):
            self._file.flush()

    def close(self) -> None:
        with named(self._path):
            self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def sha256(self) -> str:
        """Of everything written so far, in hex."""
        return self._digest.hexdigest()


def _folder_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _listed(file: Path, digest: Digest) -> str:
    stat = file.stat()
    if digest == "listing" and stat.st_size > SMALL_FILE_BYTES:
        return f"{stat.st_size} bytes, {stat.st_mtime_ns}"
    return file_sha256(file)


def payload_digest(path: Path, digest: Digest = "content") -> tuple[str, int]:
    """(sha256, bytes) of a file, or of a folder by the sorted listing of its files' relative names and digests.

    `digest="listing"` takes size and modification time for the content of files above SMALL_FILE_BYTES: reading 16 GB
    of somebody else's weights before every stage would cost more than it protects.
    """
    if path.is_file():
        return file_sha256(path), path.stat().st_size
    files = _folder_files(path)
    listing = [[file.relative_to(path).as_posix(), _listed(file, digest)] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest(), sum(file.stat().st_size for file in files)


def fsync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refusal(error: Exception, folder: Path) -> tuple[str, str]:
    """Why a library's save into a folder failed, and what to do, each in one line.

    By their words, since neither safetensors nor PyTorch, which only finds that it wrote less, has an error's number.
    """
    why = (str(error).splitlines() or ["no reason given"])[0]
    if "unexpected pos" in why or "iostream error" in why:
        why = "less was written than there was"
    if any(word in why.lower() for word in ("space", "quota", "too large", "less was written")):
        is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        limit = "Raise the limit on the size of a file (ulimit -f), or free" if is_limited else "Free"
        return why, f"{limit} some space at {folder}"
    return why, f"Look at {folder}"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError from within names `path` where it names nothing: a write to a full disk knows of no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small text file so that a reader sees the old or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with named(path), temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a finished file, or a copy where the disk allows no second name."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class Store:
    """A folder of payloads. Safe for several processes: equal content has an equal path, and moves are atomic."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will hold whatever the agent saw
            (self.root / "staging").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot create the artifact store: {error.strerror}",
                where=self.root,
                fix="choose a writable folder",
            ) from error

    def _target(self, kind: Kind, sha256: str, name: str) -> Path:
        return self.root / kind / sha256[:16] / name

    def clear_staging(self) -> None:
        """Deletes what killed processes left half done; only for the one process that uses the store."""
        for folder in (self.root / "staging").iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh folder on the store's file system; what is not added to the store by the end is deleted."""
        folder = Path(tempfile.mkdtemp(dir=self.root / "staging"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(
        self, path: Path, kind: Kind, *, n_rows: int | None = None, schema_version: int = 1, sha256: str | None = None
    ) -> Ref:
        """Moves a finished file or folder into the store and returns its reference. `sha256`: of the file, where it is
        known from writing it.

        Raises:
            ArtifactError: nothing is at `path`, or the stored payload could not be read back.
        """
        if not path.exists():
            raise ArtifactError(f"{path}: nothing to store")
        sha256, n_bytes = (sha256, path.stat().st_size) if sha256 else payload_digest(path)
        target = self._target(kind, sha256, path.name)
        ref = Ref(
            kind=kind,
            path=str(target),
            sha256=sha256,
            n_bytes=n_bytes,
            n_rows=n_rows,
            schema_version=schema_version,
        )
        if target.exists():
            try:
                verify(ref)
                return ref
            except ArtifactError:  # a damaged copy from before: replaced by the good one
                shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        for file in _folder_files(path) if path.is_dir() else [path]:
            fsync(file)
        os.replace(path, target)
        fsync(target.parent)
        return ref

    def find(
        self, kind: Kind, name: str, sha256: str, *, n_rows: int | None = None, schema_version: int = 1
    ) -> Ref | None:
        """The reference of a payload that was added before, verified; None when it is gone or altered."""
        target = self._target(kind, sha256, name)
        found, n_bytes = payload_digest(target) if target.exists() else ("", 0)
        if found != sha256:
            return None
        return Ref(
            kind=kind, path=str(target), sha256=sha256, n_bytes=n_bytes, n_rows=n_rows, schema_version=schema_version
        )

    def refer(self, path: Path, kind: Kind) -> Ref:
        """A reference to a folder that stays where it is (a model of many gigabytes); digested by listing.

        Raises:
            ArtifactError: nothing is at `path`.
        """
        if not path.is_dir():
            raise ArtifactError(f"{path}: no folder to refer to")
        sha256, n_bytes = payload_digest(path, "listing")
        return Ref(kind=kind, path=str(path.absolute()), sha256=sha256, n_bytes=n_bytes, digest="listing")


def verify(ref: Ref) -> None:
    """Checks that the payload is there and is what the reference says.

    Raises:
        ArtifactError: it is gone, or its digest differs.
    """
    path = Path(ref.path)
    if not path.exists():
        raise ArtifactError(f"{path}: gone")
    sha256, n_bytes = payload_digest(path, ref.digest)
    if (sha256, n_bytes) != (ref.sha256, ref.n_bytes):
        raise ArtifactError(
            f"{path}: altered ({n_bytes} bytes, sha256 {sha256[:16]}; expected {ref.n_bytes}, {ref.sha256[:16]})"
        )
