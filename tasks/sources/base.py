"""What every adapter needs: identities, and small readers of untrusted values."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import orjson
from msgspec import msgpack
from xxhash import xxh3_128_hexdigest

from schemas.trajectory import Outcome, OutcomeSource
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import CharSpan, Message, Run, ToolCall
from tasks.sources.enclosed import Enclosed
from tasks.sources.instances import instance_in_path, instance_repo, instance_task
from tasks.sources.plain_values import kind_of


def as_dict(value: Any, what: str = "value") -> dict[str, Any]:
    """The value itself, if it is a JSON object."""
    if not isinstance(value, dict):
        raise SourceError(f"{what}: expected an object, found {kind_of(value)}")
    return value


def as_list(value: Any, what: str = "value") -> list[Any]:
    if not isinstance(value, list):
        raise SourceError(f"{what}: expected a list, found {kind_of(value)}")
    return value


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    """The list itself, if it holds objects only: one that is left out would be a turn lost.

    Raises:
        SourceError: it is no list, or an item (counted from one) is no object.
    """
    items = as_list(value, what)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise SourceError(f"{what}: item {number}: expected an object, found {kind_of(item)}")
    return items


def dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; anything else, and a missing list, is left out. For what may be left out, and to look."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def get(value: Any, *keys: str) -> Any:
    """Nested lookup that gives None as soon as something is missing or no object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def string(value: Any) -> str | None:
    """A non-empty string, or None. Numbers become their text, since ids are often numbers."""
    if value is None or isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def json_text(value: Any) -> str:
    """JSON text of a value the log holds as an object. Strings pass untouched: they are what the model wrote.

    Raises:
        SourceError: a number that is none in JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise SourceError("NaN, or a number too large, which cannot be written as JSON") from error


_IMAGE_KINDS = ("image", "image_url", "input_image", "inlineData")
_OTHER_MEDIA = ("audio", "input_audio", "video", "file", "input_file", "document")


def _part_text(part: dict[str, Any]) -> str | None:
    """The text of one part; JSON text where it has none of a known kind, None where it is empty."""
    kind = part.get("type")
    if kind in _IMAGE_KINDS or any(key in part for key in _IMAGE_KINDS):
        return "[image]"
    for key in ("text", "content"):
        inner = part.get(key)
        if isinstance(inner, str):
            return inner
        if inner is not None:
            return text_of(inner)
    if kind in _OTHER_MEDIA:
        return f"[{kind}]"
    return None if kind in ("text", "input_text", "output_text") or not part else _shown(part)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except ValueError as error:  # an integer of more digits than Python turns into text
        raise SourceError("a value that cannot be written as text") from error


def text_of(content: Any) -> str:
    """The text of a content that may be a string, null, or a list of parts. Images become `[image]`, never base64; what
    has no text is kept as JSON.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, dict):
        return _part_text(content) or ""
    if not isinstance(content, list):
        return _shown(content)
    parts = [
        part if isinstance(part, str) else _part_text(part) if isinstance(part, dict) else text_of(part)
        for part in content
        if part is not None
    ]
    return "\n".join(part for part in parts if part is not None)


def tool_call(name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
    """A call as the log has it; `arguments` stays the original string where there is one.

    Raises:
        SourceError: no function is named: it is no call.
    """
    if not isinstance(name, str):
        name = string(name)
        if name is None:
            raise SourceError("a tool call that names no function")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else json_text(arguments)
    return ToolCall(name, arguments, string(call_id))


def spans(content: str, marks: re.Pattern[str] | Enclosed, *, first_only: bool = False) -> tuple[CharSpan, ...]:
    """Where what is marked stands in the untouched content."""
    if isinstance(marks, Enclosed):
        found = marks.spans(content)
    else:
        found = (CharSpan(match.start(), match.end()) for match in marks.finditer(content) if match.group())
    return tuple(islice(found, 1 if first_only else None))


def digest(*parts: str | None) -> str:
    """32 hex digits over the parts; lone surrogates are hashed, not refused."""
    try:
        data = orjson.dumps(parts)
    except orjson.JSONEncodeError:  # a lone surrogate
        data = json.dumps(parts).encode()
    return hashlib.sha256(data).hexdigest()[:32]


_ISSUES = (
    Enclosed(re.compile("<pr_description>"), "</pr_description>"),
    Enclosed(re.compile(r"\bISSUE:\n"), "\nINSTRUCTIONS:"),
)


def issue_text(prompt: str) -> str | None:
    """The issue's own text, where the prompt marks it."""
    found = (issue.strip("\n") for marks in _ISSUES if (issue := marks.inner(prompt)) is not None)
    return next(filter(None, found), None)


def prompt_task(messages: Iterable[Message]) -> str | None:
    """For logs that name no task: a hash of the issue text where the prompt marks it, so that agents with different
    instructions share the task; else of everything before the first turn. None: the log holds no prompt.
    """
    opening: list[str | None] = []
    for message in messages:
        if message.role == "assistant":
            break
        issue = issue_text(message.content) if message.author == "harness" and message.role == "user" else None
        if issue:
            return f"issue-{digest(' '.join(issue.split()))[:16]}"
        opening += [message.role, message.content]
    return f"prompt-{digest(*opening)[:16]}" if any(opening[1::2]) else None


_PACK = msgpack.Encoder().encode


def content_id(task_id: str, messages: Iterable[Message]) -> str:
    """Identity of a run by what was said in it. It names runs and protects nothing, so it is 128 bits of XXH3: equal by
    chance for two of 10^9 runs with probability 10^-21, and a tenth of ingestion's time saved.
    """
    parts: list[str | None] = [task_id]
    for message in messages:
        parts += (message.role, message.author, message.content, message.reasoning, message.tool_call_id)
        for call in message.tool_calls:
            parts += (call.name, call.arguments, call.call_id)
    try:
        packed = _PACK(parts)  # lengths before texts: no two lists have the same bytes
    except UnicodeEncodeError:  # a lone surrogate
        packed = json.dumps(parts).encode()
    return xxh3_128_hexdigest(packed)


def reward_outcome(value: Any, source: OutcomeSource = "reward", *, resolved_from: float = 1.0) -> Outcome:
    """A reward or score in [0, 1] as an outcome; resolved from `resolved_from` on. Anything else is unknown: a number
    outside is of another scale, of which nobody said where success begins.
    """
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        return Outcome()
    return Outcome(status="resolved" if value >= resolved_from else "failed", source=source, score=float(value))


_SAID = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def reported(value: Any) -> Outcome:
    """Whether tests passed, as logs write it: true, 1, "True", "1". Anything else is unknown."""
    said = value.strip().lower() if isinstance(value, str) else str(value).lower() if value in (0, 1) else ""
    passed = _SAID.get(said)
    return Outcome() if passed is None else Outcome(status="resolved" if passed else "failed", source="test_report")


def build(
    document: Document,
    source_format: str,
    messages: Sequence[Message],
    *,
    instance_id: str | None = None,
    task_id: str | None = None,
    trajectory_id: str | None = None,
    **fields: Any,
) -> Run:
    """A trajectory with its identities filled in. `instance_id` gives task and repository; else a hash of the prompt.

    Raises:
        SourceError: there is no message at all.
    """
    if not messages:
        raise SourceError(f"{source_format}: no messages")
    instance_id = instance_id or (instance_in_path(document.path) if task_id is None else None)
    if instance_id:
        task_id = task_id or instance_task(instance_id)
        fields.setdefault("repo", instance_repo(instance_id))
    task = task_id or prompt_task(messages) or f"unprompted-{content_id('', messages)[:16]}"
    return Run(
        trajectory_id=trajectory_id or content_id(task, messages),
        task_id=task,
        source_format=source_format,
        source_path=document.path,
        source_blake3=document.blake3,
        messages=tuple(messages),
        **fields,
    )


METADATA_KEY = "traceforge"
"""Where our own exports keep what their format has no place for."""
