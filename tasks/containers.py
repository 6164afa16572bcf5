"""What a container may hold and do: limits on what comes out of it, and what its readers raise where it is damaged."""

import gzip
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Literal

import pyarrow as pa
import zstandard

from tasks.sources import Document, SourceError, recognised
from tasks.sources.document import loads, read_lines

_MIN_TOTAL_BYTES = 4 << 30
_MAX_RATIO = 200
_STEP_BYTES = 1 << 20
_FIRST_LINES = 32
UTF8_MARK = b"\xef\xbb\xbf"

DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, zstandard.ZstdError, pa.ArrowException),
    *(struct.error, EOFError, UnicodeDecodeError, NotImplementedError, OverflowError),
)
"""What readers of containers raise at damaged bytes."""


class ReadError(SourceError):
    """The system refused a file's bytes: another night it may give them."""


_ZIP_ENTRY = re.compile(r"<ZipInfo .*?>")


def one_line(error: Exception) -> str:
    return " ".join(_ZIP_ENTRY.sub("the member", str(error)).split())


_FOREIGN = (
    *(
        (b"\xfd7zXZ\0", "compressed by xz"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
        (b"BZh", "compressed by bzip2"),
    ),
    *((b"\x04\x22\x4d\x18", "compressed by lz4"), (b"\x1f\x9d", "compressed by compress")),
    *((b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"), (b"Rar!\x1a\x07", "a RAR archive")),
)
"""First bytes of containers that are not read."""

ContainerKind = Literal["zip", "gzip", "tar", "parquet"]
_READ: tuple[tuple[bytes, ContainerKind], ...] = ((b"PK\x03\x04", "zip"), (b"\x1f\x8b", "gzip"), (b"PAR1", "parquet"))
"""First bytes of those that are; a tar archive tells itself further on."""


HEAD_BYTES = 1024
"""So many first bytes tell what a container is."""


def foreign_container(head: bytes) -> str | None:
    """Why a file or member that begins so cannot be read; None when it is no container that we know and do not read."""
    if head.startswith(b"PK\x05\x06"):
        return "an empty archive"
    if len(head) >= HEAD_BYTES and not any(head[:HEAD_BYTES]):
        return "an empty archive, or a file of zeros"
    named = next((name for magic, name in _FOREIGN if head.startswith(magic)), None)
    return None if named is None else f"{named}: unpack it first"


def container_kind(head: bytes) -> ContainerKind | None:
    """The container that we read and that begins so, by at least 262 bytes; None when it is none."""
    for magic, kind in _READ:
        if head.startswith(magic):
            return kind
    return "tar" if head[257:262] == b"ustar" else None


def nested_container(head: bytes) -> str | None:
    """Why what comes out of a container and begins so is not read; None when it is none."""
    if container_kind(head):
        return "an archive inside an archive: unpack the outer one first"
    return foreign_container(head[:HEAD_BYTES])


@dataclass(frozen=True)
class Unreadable:
    """A member or a whole file that gives no document, and why."""

    path: str
    reason: str


def leads_outside(name: str) -> bool:
    """Whether a member's name is absolute, empty or climbs out of the archive."""
    path = PurePosixPath(name.replace("\\", "/"))
    return not name or path.is_absolute() or ".." in path.parts or (len(name) > 1 and name[1] == ":")


class Budget:
    """Total bytes that may come out of one archive."""

    def __init__(self, compressed_bytes: int) -> None:
        self.left = max(_MIN_TOTAL_BYTES, _MAX_RATIO * compressed_bytes)

    def spend(self, n_bytes: int) -> None:
        """Raises:
        SourceError: more came out than is believable.
        """
        self.left -= n_bytes
        if self.left < 0:
            raise SourceError("archive unpacks to far more than its size: a decompression bomb")


class Unpacked:
    """What comes out of a compressed stream, charged to a budget. Where the stream is cut or damaged it ends with the
    last good byte; `problem` then says so.
    """

    def __init__(self, stream: gzip.GzipFile, budget: Budget) -> None:
        self._stream, self._budget = stream, budget
        self.problem: str | None = None

    def read(self, n_bytes: int) -> bytes:
        """Raises:
        SourceError: more came out than is believable.
        """
        parts, n_left = [], n_bytes
        while n_left and self.problem is None:
            try:
                part = self._stream.read1(min(n_left, _STEP_BYTES))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.problem = one_line(error)
                break
            if not part:
                break
            self._budget.spend(len(part))
            parts.append(part)
            n_left -= len(part)
        return b"".join(parts)


def at_least_one(documents: Iterator[Document | Unreadable]) -> Iterator[Document | Unreadable]:
    """The documents of an archive.

    Raises:
        SourceError: there is none.
    """
    first = next(documents, None)
    if first is None:
        raise SourceError("an empty archive")
    yield first
    del first
    yield from documents


def is_read_in_pieces(path: str, head: bytes, source_format: str) -> bool:
    """Whether every line of a file that begins so is a run of its own. Its first line must be a whole JSON value."""
    first_lines = head.removeprefix(UTF8_MARK).split(b"\n", _FIRST_LINES)[:-1]  # the last may be cut
    try:
        loads(first_lines[0] if first_lines else b"")
    except ValueError:
        return False
    for n_lines in (1, len(first_lines)):  # the others only if the first does not say it: they may be long
        lines = read_lines(b"\n".join(first_lines[:n_lines]))
        try:
            if lines.values:
                return recognised(lines.document(path, ""), source_format)[0].by_record
        except SourceError:
            continue
    return False


def whole_lines(
    stream: IO[bytes] | Unpacked, head: bytes, problems: list[str], max_bytes: int, piece_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, piece of whole lines); a line beyond the limit is skipped without being held."""
    rest, skipping, number = head, False, 1
    while chunk := stream.read(piece_bytes):
        rest += chunk
        cut = rest.rfind(b"\n") + 1
        if skipping and cut:
            first = rest.find(b"\n") + 1
            rest, cut, skipping = rest[first:], cut - first, False
        if cut > 0:
            piece = rest[:cut]
            yield number, piece
            number += piece.count(b"\n")
            rest = rest[cut:]
            del piece
        if len(rest) > max_bytes:
            if not skipping:
                problems.append(f"line {number}: longer than {max_bytes >> 20} MiB")
                number += 1
            rest, skipping = b"", True
    if rest and not skipping:
        yield number, rest
