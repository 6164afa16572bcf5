"""Bytes of one log file to a parsed document, without knowing whose format it is.

JSON, JSON Lines and YAML are told apart by content, never by the file's name: real files called `.jsonl` hold one
pretty-printed object. Damage is survived where whole records can still be read, and always told.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import yaml


class SourceError(ValueError):
    """A document is not what its adapter expects. The only exception an adapter raises; the text is one line."""


@dataclass(frozen=True)
class Document:
    """One log file, parsed once.

    kind "json": `value` is the JSON value. "jsonl": `value` is the list of the lines' values. "yaml": the YAML value.
    "text": a str. `problems` names the damaged lines that were left out.
    """

    path: str
    sha256: str
    kind: Literal["json", "jsonl", "yaml", "text"]
    value: Any
    problems: tuple[str, ...] = field(default=())

    @property
    def records(self) -> list[Any]:
        """The lines of JSON Lines, the items of a JSON array, or the one JSON value, as a list."""
        if self.kind in ("json", "jsonl"):
            return self.value if isinstance(self.value, list) else [self.value]
        return []

    @property
    def first(self) -> dict[str, Any]:
        """The first record if it is an object, else an empty one: what detection looks at."""
        if self.kind == "yaml":
            return self.value if isinstance(self.value, dict) else {}
        records = self.records
        return records[0] if records and isinstance(records[0], dict) else {}


_LONG_INTEGER = re.compile(rb"[:,\[\s]-?\d{19}")
_YAML_START = re.compile(r"(?:#[^\n]*\n|---\s*\n|\s*\n)*[\w.\"'-]+:(?:\s|$)")
_MAX_YAML_ALIASES = 100


def loads(data: bytes | str) -> Any:
    """JSON to Python. NaN, lone surrogates and integers beyond 64 bits keep their value.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if not _LONG_INTEGER.search(raw):  # orjson turns integers beyond 64 bits into floats
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass
    try:
        return json.loads(raw.decode("utf-8", "surrogateescape"))
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def _as_utf8(data: bytes) -> bytes:
    for mark, encoding in ((b"\xef\xbb\xbf", ""), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            rest = data[len(mark) :]
            return rest.decode(encoding, "replace").encode("utf-8", "replace") if encoding else rest
    return data


def _read_lines(data: bytes) -> tuple[list[Any], list[str]]:
    values: list[Any] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        line = line.strip().removeprefix(b"\xef\xbb\xbf")  # appended files can carry a mark in the middle
        if not line:
            continue
        try:
            values.append(loads(line))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    return values, problems


def _read_yaml(text: str) -> Any:
    """Safe loader only: no tags, and few aliases, since aliases to aliases grow exponentially when walked."""
    if len(re.findall(r"(?:^|[\s\[,{-])\*\w", text, re.MULTILINE)) > _MAX_YAML_ALIASES:
        raise SourceError(f"YAML with more than {_MAX_YAML_ALIASES} aliases")
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError("neither JSON, JSON Lines, YAML nor a known text log") from error


def read_document(data: bytes, path: str = "") -> Document:
    """Parses the bytes of one file.

    Raises:
        SourceError: empty, truncated before the first whole record, or no known notation.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    body = _as_utf8(data).strip()
    if not body:
        raise SourceError("empty file")
    if b"\0" in body[:4096]:
        raise SourceError("binary data, not a log")
    if body[:1] in b"{[":
        try:
            return Document(path, sha256, "json", loads(body))
        except ValueError as error:
            first_problem = str(error)
        values, problems = _read_lines(body)
        if any(isinstance(value, dict) for value in values):
            return Document(path, sha256, "jsonl", values, tuple(problems))
        raise SourceError(f"not valid JSON: {first_problem}")
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    if _YAML_START.match(text):
        value = _read_yaml(text)
        if isinstance(value, dict):
            return Document(path, sha256, "yaml", value)
    return Document(path, sha256, "text", text)
