"""inspect_ai eval logs: one JSON document, or the members of an `.eval` archive put together as one.

`messages` of a sample is its final conversation; long strings stand behind `attachment://` references.
"""

from dataclasses import replace
from typing import Any

from schemas.trajectory import Outcome
from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, get, objects, reward_outcome, string
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.strict import part

NAME = "inspect-ai"

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_ATTACHMENT = "attachment://"
_REFERRING = ("content", "reasoning", "tool_calls", "error")
_MEDIA = ("image", "audio", "video", "document")
"""Parts that never become text."""


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and {"epoch", "messages", "target"} <= value.keys()


def detect(document: Document) -> bool:
    first = document.first
    if isinstance(first.get("eval"), dict) and "plan" in first:
        return True
    return _is_sample(first)


def _resolve(value: Any, attachments: dict[str, Any]) -> Any:
    """The value with attachment references replaced by what they stand for.

    Raises:
        SourceError: the log does not hold what one stands for.
    """
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        name = value.removeprefix(_ATTACHMENT)
        if name not in attachments:
            raise SourceError(f"inspect-ai: attachment {name[:100]} is not in the log")
        return attachments[name]
    if isinstance(value, list):
        return [_resolve(item, attachments) for item in value]
    if isinstance(value, dict) and value.get("type") not in _MEDIA:
        return {key: _resolve(item, attachments) for key, item in value.items()}
    return value


def _resolved(raw: dict[str, Any], attachments: dict[str, Any]) -> dict[str, Any]:
    return raw | {key: _resolve(raw[key], attachments) for key in _REFERRING if key in raw}


def _outcome(scores: Any) -> Outcome:
    """The first scorer's verdict; a dictionary of values has no single meaning and stays unknown."""
    for score in scores.values() if isinstance(scores, dict) else ():
        value = get(score, "value")
        if isinstance(value, str):
            value = _LETTERS.get(value)
        return reward_outcome(value, "scorer")
    return Outcome()


def _parts_reasoning(content: Any) -> str | None:
    texts = [part.get("reasoning") for part in dicts(content) if part.get("type") == "reasoning"]
    return "\n".join(text for text in texts if isinstance(text, str) and text) or None


def _read_message(raw: dict[str, Any]) -> Message:
    content = raw.get("content")
    if isinstance(content, list):
        shown = [part for part in content if get(part, "type") != "reasoning"]
        raw = {**raw, "content": shown, "reasoning": _parts_reasoning(content)}
    if raw.get("role") == "tool":
        failed = raw["error"] is not None if "error" in raw else None
        return read_message({**raw, "name": raw.get("function")}, failed=failed)
    return read_message(raw, user="harness")


def _read_sample(document: Document, header: dict[str, Any], sample: dict[str, Any]) -> Run:
    attachments = part(sample, "attachments")
    messages = [_read_message(_resolved(raw, attachments)) for raw in objects(sample.get("messages"), "messages")]
    if not messages:
        raise SourceError(f"inspect-ai: sample {sample.get('id')} holds no messages")
    run = string(get(header, "eval", "run_id")) or string(get(header, "eval", "eval_id"))
    failure = sample.get("error") or sample.get("limit")
    return build(
        document,
        NAME,
        messages,
        task_id=f"{string(get(header, 'eval', 'task')) or 'inspect'}/{name}"
        if (name := string(sample.get("id")))
        else None,
        outcome=_outcome(sample.get("scores")),
        run_id=f"{run}/epoch-{sample.get('epoch')}",
        agent=NAME,
        model=string(get(header, "eval", "model")),
        exit_status=string(get(failure, "message")) or string(get(failure, "type")),
    )


def _apart(document: Document) -> Document:
    """Each sample as a log of its own."""
    logs: list[Any] = []
    for record in document.records:
        samples = record.get("samples") if isinstance(record, dict) and not _is_sample(record) else None
        if isinstance(samples, list) and len(samples) > 1:
            logs += [{**record, "samples": [sample]} for sample in samples]
        else:
            logs.append(record)
    return document if len(logs) == len(document.records) else replace(document, value=logs, numbers=())


def read(document: Document) -> list[Run]:
    runs: list[Run] = []
    for record in dicts(document.records):
        if _is_sample(record):
            runs.append(_read_sample(document, {}, record))
            continue
        for sample in objects(record.get("samples") or [], "samples"):
            runs.append(_read_sample(document, record, sample))
    if not runs:
        raise SourceError("inspect-ai: a log without samples")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True, apart=_apart)
