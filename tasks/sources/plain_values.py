"""Values as JSON could hold them, and what they are called there."""

import base64
import json
import re
from collections.abc import Iterator
from datetime import date, time
from typing import Any

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


def kind_of(value: Any) -> str:
    """What a value is called in JSON."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(value: Any) -> tuple[Any, int]:
    """(the value with lone surrogates as U+FFFD, how many): they are legal in JSON escapes and in no UTF-8 text."""
    if isinstance(value, str):
        return _SURROGATE.subn("\ufffd", value)
    if isinstance(value, list):
        items = [without_surrogates(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    if isinstance(value, dict):
        pairs = [(without_surrogates(key), without_surrogates(item)) for key, item in value.items()]
        return {key[0]: item[0] for key, item in pairs}, sum(key[1] + item[1] for key, item in pairs)
    return value, 0


_MAX_COUNTED = 4 << 20


def plain(value: Any, visits: Iterator[int] | None = None) -> Any:
    """The value as JSON could hold it: dates, times, bytes and decimals become text. `visits` counts the values where
    references may repeat them.

    Raises:
        ValueError: more than 4 Mi values were counted.
        RecursionError: nested too deeply, or in itself.
    """
    if visits is not None and next(visits) > _MAX_COUNTED:
        raise ValueError(f"more than {_MAX_COUNTED} values")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _key(key): plain(item, visits) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item, visits) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _key(key: Any) -> str:
    return json.dumps(key) if key is None or isinstance(key, bool) else str(plain(key))
