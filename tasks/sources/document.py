"""Bytes of one log file to a parsed document, without knowing whose format it is.

JSON, JSON Lines and YAML are told apart by content, never by the file's name: real files called `.jsonl` hold one
pretty-printed object. Damage is survived where whole records can still be read, and always told.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import yaml

from tasks.content_digest import content_blake3
from tasks.sources.plain_values import kind_of, plain, without_surrogates


class SourceError(ValueError):
    """A document is not what its adapter expects. The only exception an adapter raises; the text is one line."""


@dataclass(frozen=True)
class Document:
    """One log file, parsed once.

    kind "json": `value` is the JSON value. "jsonl": `value` is the list of the lines' values. "yaml": the YAML value.
    "text": a str. `problems` names the damaged lines that were left out, `n_replaced` counts characters that were no
    valid Unicode. `numbers` are those of the records in the whole file, counted from one as `unit` says.
    """

    path: str
    blake3: str
    kind: Literal["json", "jsonl", "yaml", "text"]
    value: Any
    problems: tuple[str, ...] = field(default=())
    n_replaced: int = 0
    numbers: Sequence[int] = field(default=())
    unit: Literal["line", "record"] = "record"

    def place(self, index: int) -> str:
        """Where in the file the record at `index` stands."""
        return f"{self.unit} {self.numbers[index] if self.numbers else index + 1}"

    def only(self, indices: Iterable[int]) -> "Document":
        """The document with just these of its records, each under its own number."""
        chosen, records = list(indices), self.records
        numbers = [self.numbers[index] if self.numbers else index + 1 for index in chosen]
        return replace(self, value=[records[index] for index in chosen], numbers=numbers)

    @property
    def records(self) -> list[Any]:
        """The lines of JSON Lines, the items of an array, or the one value of JSON or YAML, as a list."""
        if self.kind == "text":
            return []
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def first(self) -> dict[str, Any]:
        """The first record if it is an object, else an empty one: what detection looks at."""
        records = self.records
        return records[0] if records and isinstance(records[0], dict) else {}


_WEIGHED_FROM_BYTES = 32 << 20
_FEW_MARKS = 4_000_000
_MAX_PARSED_BYTES = 896 << 20
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,\n]', re.DOTALL)
_BYTES_OF_MARK = {ord("{"): 200, ord("["): 96, ord('"'): 40, ord(","): 40, ord("\n"): 40}
"""What CPython needs for a value that begins with the mark, or stands behind it; for strings, beyond their text."""


def _refuse_many_values(data: bytes) -> None:
    """Many small values take up to thirty times as much memory as their text. Told from brackets, quotes and commas
    before anything is parsed, in two steps: a count, which in most long logs is small, then a walk that passes over
    what stands inside strings.

    Raises:
        SourceError: parsed, the values would take more than 896 MiB.
    """
    if len(data) <= _WEIGHED_FROM_BYTES or sum(map(data.count, (b"[", b"{", b",", b"\n"))) <= _FEW_MARKS:
        return
    n_bytes = 0
    for mark in _MARK.finditer(data):
        n_bytes += _BYTES_OF_MARK[data[mark.start()]]
        if n_bytes > _MAX_PARSED_BYTES:
            raise SourceError(f"so many small values that they would take more than {_MAX_PARSED_BYTES >> 20} MiB")


_YAML_START = re.compile(r"(?!# aider chat started at )(?:(?:#[^\n]*|---[^\S\n]*|[^\S\n]*)\n)*+[\w.\"'-]+:(?:\s|$)")
"""Comments, blank lines and a first key. A heading of Markdown is a comment too, and an answer can begin `Sure:`."""
_MAX_YAML_ALIASES = 100
_MAX_YAML_BYTES = 4 << 20
"""Parsed, YAML takes up to two hundred times as much."""
_MARKED_BYTES = 4096


def _loads(raw: bytes) -> tuple[Any, int]:
    """(value, characters replaced). msgspec reads what is strict JSON, integers beyond 64 bits included; NaN, lone
    surrogates and invalid UTF-8, which it refuses, are left to `json`.
    """
    try:
        return msgspec.json.decode(raw), 0
    except (msgspec.DecodeError, RecursionError):
        pass
    text = raw.decode("utf-8", "replace")
    try:
        value, n_replaced = without_surrogates(json.loads(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python turns no longer text into an integer
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits()} digits") from error
    return value, n_replaced + max(0, text.count("\ufffd") - raw.count(b"\xef\xbf\xbd"))


def loads(data: bytes | str) -> Any:
    """JSON to Python. NaN and integers beyond 64 bits keep their value; what is no valid Unicode becomes U+FFFD.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    return _loads(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)[0]


def _as_utf8(data: bytes) -> bytes:
    for mark, encoding in ((b"\xef\xbb\xbf", ""), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            rest = data[len(mark) :]
            return rest.decode(encoding, "replace").encode("utf-8", "replace") if encoding else rest
    return data


_LINE = re.compile(rb"\S[^\n]*")


@dataclass
class Lines:
    """JSON Lines, parsed: the objects, where each stands, and what is wrong with the other lines."""

    values: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    n_replaced: int = 0

    def document(self, path: str, blake3: str, problems: Sequence[str] = ()) -> Document:
        """As a document, after `problems` that were found before."""
        found = (*problems, *self.problems)
        return Document(path, blake3, "jsonl", self.values, found, self.n_replaced, self.numbers, "line")


def read_lines(data: bytes, first_number: int = 1) -> Lines:
    """The lines of a file, or of a piece of it that begins with line `first_number`. Those that hold no object are
    problems: no format has such, and a turn may be lost with them.
    """
    lines = Lines()
    number, counted = first_number, 0
    for found in _LINE.finditer(data):  # no step for a blank line: there can be millions
        number += data.count(b"\n", counted, found.start())
        counted = found.start()
        line = found[0].strip().removeprefix(b"\xef\xbb\xbf")  # appended files can carry a mark in the middle
        if not line:
            continue
        try:
            _refuse_many_values(line)
            value, n = _loads(line)
        except ValueError as error:
            lines.problems.append(f"line {number}: {error}")
            continue
        if not isinstance(value, dict):
            lines.problems.append(f"line {number}: expected an object, found {kind_of(value)}")
            continue
        lines.values.append(value)
        lines.numbers.append(number)
        lines.n_replaced += n
    return lines


def _read_yaml(text: str) -> Any:
    """Safe loader only: no tags, and few aliases, since aliases to aliases grow exponentially when walked."""
    if len(text) > _MAX_YAML_BYTES:
        raise SourceError(f"YAML larger than {_MAX_YAML_BYTES >> 20} MiB: write it as JSON")
    if len(re.findall(r"(?:^|[\s\[,{-])\*\w", text, re.MULTILINE)) > _MAX_YAML_ALIASES:
        raise SourceError(f"YAML with more than {_MAX_YAML_ALIASES} aliases")
    try:
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # TypeError: a list as a key
        raise SourceError("neither JSON, JSON Lines, YAML nor a known text log") from error
    try:
        return plain(value, itertools.count())
    except RecursionError as error:
        raise SourceError("YAML that is nested too deeply, or holds itself") from error
    except ValueError as error:
        raise SourceError(f"YAML whose aliases unfold to {error}") from error


@dataclass(frozen=True)
class Shape:
    """What a reader looks at in a log of its format; the rest is passed over without being parsed.

    fields: a TypedDict of the whole document. marker: bytes near the start or the end of every such log, asked for
    before it is tried.
    """

    marker: bytes
    fields: type

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.fields)

    def read(self, data: bytes, path: str, blake3: str) -> Document | None:
        """The document with just these fields; None when it does not fit, or is damaged: it is then read whole."""
        if self.marker not in data[:_MARKED_BYTES] and self.marker not in data[-_MARKED_BYTES:]:
            return None
        _refuse_many_values(data)
        try:
            return Document(path, blake3, "json", self._decoder.decode(data))
        except (msgspec.DecodeError, RecursionError):
            return None


def _begins_with_a_whole_line(body: bytes) -> bool:
    """Whether the first of several lines is a JSON value: then the whole is none, and need not be tried as one."""
    end = body.find(b"\n")
    if end < 0:
        return False
    try:
        msgspec.json.decode(memoryview(body)[:end])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def read_document(data: bytes, path: str = "", *, blake3: str | None = None) -> Document:
    """Parses the bytes of one file.

    Raises:
        SourceError: empty, truncated before the first whole record, or no known notation.
    """
    blake3 = blake3 or content_blake3(data)
    text_bytes = _as_utf8(data)
    body = text_bytes.strip()
    if not body:
        raise SourceError("empty file")
    if b"\0" in body[:4096]:
        raise SourceError("binary data, not a log")
    first_number = 1 + text_bytes[: text_bytes.find(body[:1])].count(b"\n")
    if body[:1] in b"{[":
        _refuse_many_values(body)
        first_problem = "more than one value"
        if not _begins_with_a_whole_line(body):
            try:
                value, n_replaced = _loads(body)
                return Document(path, blake3, "json", value, n_replaced=n_replaced)
            except ValueError as error:
                first_problem = str(error)
        lines = read_lines(body, first_number)
        if lines.values:
            return lines.document(path, blake3)
        raise SourceError(f"not valid JSON: {first_problem}")
    if _begins_with_a_whole_line(body):  # of another kind than an object
        lines = read_lines(body, first_number)
        if lines.values:
            return lines.document(path, blake3)
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    if _YAML_START.match(text):
        value = _read_yaml(text)
        if isinstance(value, dict):
            return Document(path, blake3, "yaml", value)
    return Document(path, blake3, "text", text)
