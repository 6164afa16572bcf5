"""What a container may hold and do: limits on what comes out of it, and what its readers raise where it is damaged."""

import lzma
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
import zstandard

from tasks.sources import SourceError

_MIN_TOTAL_BYTES = 4 << 30
_MAX_RATIO = 200

DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, zstandard.ZstdError, pa.ArrowException),
    *(struct.error, EOFError, UnicodeDecodeError, NotImplementedError, OverflowError),
)
"""What readers of containers raise at damaged bytes."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
