"""Histories that were condensed on the way: what the model saw before and after, as conversations of their own."""

from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from tasks.sources.base import build, digest
from tasks.sources.document import Document
from tasks.sources.draft import Message, Run


class Segments:
    """The messages of an event log, begun anew whenever events are forgotten."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._events: list[set[str]] = []  # for each message the events that it came from; none for a summary
        self._of_response: dict[str, int] = {}
        self._ended: list[list[Message]] = []

    def add(self, message: Message, event_id: str | None, response: str | None = None) -> None:
        """A message of its own; `response` names the model response that it is, or begins."""
        if response is not None:
            self._of_response[response] = len(self.messages)
        self.messages.append(message)
        self._events.append({event_id} if event_id else set())

    def of_response(self, response: str | None, event_id: str | None) -> int | None:
        """Where the message of that response stands, to which this event then belongs too; None: it has none yet."""
        index = None if response is None else self._of_response.get(response)
        if index is not None and event_id:
            self._events[index].add(event_id)
        return index

    def condense(self, forgotten: Collection[str], summary: str) -> None:
        """Leaves the forgotten events out from here on. The summary stands in their place; an earlier one goes."""
        if any(message.role == "assistant" and message.author == "policy" for message in self.messages):
            self._ended.append(self.messages)
        stays = [bool(events) and not events <= set(forgotten) for events in self._events]
        at = stays.index(False) if False in stays else len(stays)
        kept = [
            (replace(message, author="copied_context") if message.role == "assistant" else message, events)
            for message, events, stay in zip(self.messages, self._events, stays, strict=True)
            if stay
        ]
        if summary:
            kept.insert(at, (Message(role="user", author="copied_context", content=summary), set()))
        self.messages, self._events = [message for message, _ in kept], [events for _, events in kept]
        self._of_response.clear()

    def runs(self, document: Document, source_format: str, **fields: Any) -> list[Run]:
        """A run for each segment, `fields` as those of `build`; later ones are continuations of the one before.

        Raises:
            SourceError: there is no message at all.
        """
        runs: list[Run] = []
        for number, messages in enumerate([*self._ended, self.messages]):
            own = fields
            if runs:
                own = fields | {
                    "task_id": runs[0].task_id,
                    "repo": runs[0].repo,
                    "trajectory_id": digest(runs[0].trajectory_id, str(number)),
                    "parent_id": runs[-1].trajectory_id,
                    "parent_link": "continuation",
                }
            runs.append(build(document, source_format, messages, **own))
        return runs
