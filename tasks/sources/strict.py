"""Readers for the places where a turn, a call or an observation stands: missing is missing, another type is told."""

from collections.abc import Iterable, Iterator
from typing import Any

from tasks.sources.base import as_dict, as_list, string, text_of
from tasks.sources.document import SourceError


def part(record: dict[str, Any], key: str, *known: str) -> dict[str, Any]:
    """The object under `key`; an empty one where there is none.

    Raises:
        SourceError: something else stands there, or an object with none of the `known` keys: what it says would be
            lost unsaid.
    """
    value = record.get(key)
    if value is None or value == "" or value == []:
        return {}
    found = as_dict(value, key)
    if found and known and not found.keys() & set(known):
        raise SourceError(f"{key}: an object with none of {', '.join(known)}")
    return found


def text_or_none(value: Any) -> str | None:
    """The text of a value that is mostly a string, None where it is empty."""
    return text_of(value) or None


def first_choice(response: dict[str, Any]) -> dict[str, Any] | None:
    """The message of a chat completion's first choice; None where it has no choice.

    Raises:
        SourceError: a choice holds no message.
    """
    choices = as_list(response.get("choices") or [], "choices")
    return as_dict(as_dict(choices[0], "choices").get("message"), "message") if choices else None


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
