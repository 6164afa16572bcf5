"""Readers for the places where a turn, a call or an observation stands: missing is missing, another type is told."""

from collections.abc import Iterable, Iterator
from typing import Any

from tasks.sources.base import as_dict, as_list, string, text_of
from tasks.sources.document import SourceError


def known(found: dict[str, Any], what: str, keys: Iterable[str]) -> dict[str, Any]:
    """The object itself.

    Raises:
        SourceError: it has something, but none of the keys: what it says would be lost unsaid.
    """
    if found and found.keys().isdisjoint(keys):
        raise SourceError(f"{what}: an object with none of {', '.join(keys)}")
    return found


def part(record: dict[str, Any], key: str, *keys: str) -> dict[str, Any]:
    """The object under `key`; an empty one where there is none.

    Raises:
        SourceError: something else stands there, or an object with none of `keys`.
    """
    value = record.get(key)
    if value is None or value == "" or value == []:
        return {}
    found = as_dict(value, key)
    return known(found, key, keys) if keys else found


def text_or_none(value: Any) -> str | None:
    """The text of a value that is mostly a string, None where it is empty."""
    return text_of(value) or None


def first_choice(response: dict[str, Any]) -> dict[str, Any] | None:
    """The message of a chat completion's first choice; None where it has no choice.

    Raises:
        SourceError: a choice holds no message.
    """
    choices = as_list(response.get("choices") or [], "choices")
    if not choices:
        return None
    message = as_dict(as_dict(choices[0], "choices").get("message"), "message")
    return known(message, "message", ("role", "content", "tool_calls"))


class Repeats:
    """Which records of a log were written twice: equal to the first one of the same id."""

    def __init__(self) -> None:
        self._first: dict[str, dict[str, Any]] = {}

    def __contains__(self, identified: tuple[str | None, dict[str, Any]]) -> bool:
        record_id, record = identified
        if record_id is None:
            return False
        first = self._first.setdefault(record_id, record)
        return first is not record and first == record


def unrepeated(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events without those that were written twice."""
    repeats = Repeats()
    return (event for event in events if (string(event.get("id")), event) not in repeats)
