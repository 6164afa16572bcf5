"""How a stage reports on its way: to whoever watches this run, and to the log.

A stage gets plain callables and knows neither Prefect nor the terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from schemas.requests import StageName
from schemas.runs import StageRun


class Observer(Protocol):
    """Watches one run."""

    def started(self, stage: StageName) -> None: ...

    def progressed(self, stage: StageName, done: int, total: int) -> None:
        """`total` is 0 when the stage does not know how much there is."""
        ...

    def logged(self, stage: StageName, line: str) -> None: ...

    def finished(self, run: StageRun) -> None: ...


_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Everything that runs inside reports to `observer` as well."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def started(stage: StageName) -> None:
    for observer in _observers.get():
        observer.started(stage)


def progressed(stage: StageName, done: int, total: int) -> None:
    for observer in _observers.get():
        observer.progressed(stage, done, total)


def logged(stage: StageName, line: str) -> None:
    for observer in _observers.get():
        observer.logged(stage, line)


def finished(run: StageRun) -> None:
    for observer in _observers.get():
        observer.finished(run)
