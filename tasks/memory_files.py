"""SQLite files that only save work: what a damaged one knew is found out anew, so it never stops a night."""

import sqlite3
from pathlib import Path

_REFUSALS = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    )
)
"""The system's or another process's doing; a new file would meet the same."""


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file holds something else than what was written: random bytes, half a file, other tables. Otherwise
    the system refused, or another process was in the way.
    """
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _REFUSALS


def remove(path: Path) -> None:
    """The file and what SQLite keeps beside it."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
