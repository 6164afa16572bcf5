"""Locks between processes of one host. The kernel drops them when their holder dies, however it dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The lock's file; closing it drops the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Holds a lock on `path` if it is free, and says whether it got it. Never waits.

    Any number of holders may share a lock; a lock that is not shared has one holder and excludes the shared ones.
    """
    with _opened(path) as descriptor:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time is inside; the others wait."""
    with _opened(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def in_use(store: Path) -> Iterator[None]:
    """For as long as this lasts, nothing is removed from the store. Waits for a clean-up that is under way."""
    with _opened(store / "in-use.lock") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextmanager
def nobody_uses(store: Path) -> Iterator[bool]:
    """Whether the store is in no run's use; it stays so for as long as this lasts."""
    with locked(store / "in-use.lock") as free:
        yield free
