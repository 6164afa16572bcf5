"""Sessions that an agent keeps as one file an event: `0.json`, `1.json`, `10.json`; `event-00007-<id>.json`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from blake3 import blake3

from tasks.sources import Document, SourceError, read_document
from tasks.sources.openhands import is_single_event

_EVENT_NAME = re.compile(r"(?:event-)?(\d+)(?:-[0-9a-f-]{8,})?\.json")
_PAGE_NAME = re.compile(r"\d+-\d+\.json")

COPY = "a copy of events that lie beside it"
"""Why pages of the same events are left out."""


def event_number(name: str) -> int | None:
    """Where in its session the event of a file stands, by the file's name; None when it is no event's name."""
    match = _EVENT_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def is_page(name: str) -> bool:
    """Whether a file in an `event_cache` folder is named like a page of the events beside it."""
    return _PAGE_NAME.fullmatch(name) is not None


def is_event(data: bytes) -> bool:
    """Whether the bytes of a file are one event of such a session."""
    try:
        return is_single_event(read_document(data))
    except SourceError:
        return False


def session_document(path: str, events: Iterable[tuple[str, bytes | OSError]], max_bytes: int) -> Document:
    """One document of the events (name, content), in the order given; what cannot be read is told as a problem.

    Raises:
        SourceError: all events together are larger than `max_bytes`.
    """
    digest, values, problems = blake3(), [], []
    n_bytes = n_replaced = 0
    for name, data in events:
        if isinstance(data, OSError):
            problems.append(f"{name}: cannot be read: {data.strerror or data}")
            continue
        digest.update(data)
        try:
            event = read_document(data, name)
        except SourceError as error:
            problems.append(f"{name}: {error}")
            continue
        values += event.records
        n_replaced += event.n_replaced
        n_bytes += len(data)
        if n_bytes > max_bytes:
            raise SourceError(f"a session larger than {max_bytes >> 20} MiB")
    return Document(path, digest.hexdigest(), "jsonl", values, tuple(problems), n_replaced)


@dataclass
class HeldEvents:
    """Members of an archive that are single events, or pages of them, held until the last member was seen."""

    max_bytes: int
    n_bytes: int = 0
    _events: dict[str, list[tuple[int, str, bytes]]] = field(default_factory=lambda: defaultdict(list))
    _pages: list[tuple[str, bytes]] = field(default_factory=list)
    _refused: set[str] = field(default_factory=set)

    def take(self, member: str, data: bytes) -> bool:
        """Whether the member is one of these; it is held then.

        Raises:
            SourceError: all that is held would be larger than `max_bytes`.
        """
        folder, _, name = member.rpartition("/")
        number = event_number(name)
        page = PurePosixPath(folder).name == "event_cache" and is_page(name)
        if not page and (number is None or not is_event(data)):
            return False
        if folder in self._refused or self.n_bytes + len(data) > self.max_bytes:
            # a session without some of its events would be another run: none of it is kept
            self.n_bytes -= sum(len(event) for _, _, event in self._events.pop(folder, ()))
            self._refused.add(folder)
            raise SourceError(f"sessions of more than {self.max_bytes >> 20} MiB in an archive: unpack it first")
        self.n_bytes += len(data)
        if page:
            self._pages.append((member, data))
        else:
            self._events[folder].append((number or 0, name, data))
        return True

    def sessions(self) -> Iterator[Document]:
        for folder, events in self._events.items():
            yield session_document(folder, ((name, data) for _, name, data in sorted(events)), self.max_bytes)

    def pages(self) -> Iterator[tuple[str, bytes, bool]]:
        """(member, content, whether its events lie beside it)."""
        for member, data in self._pages:
            yield member, data, f"{PurePosixPath(member).parent.parent}/events" in self._events
