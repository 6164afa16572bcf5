"""inspect_ai eval logs: one JSON document, or the members of an `.eval` archive put together as one.

`messages` of a sample is its final conversation; long strings stand behind `attachment://` references.
"""

from typing import Any

from schemas.trajectory import Outcome
from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, get, objects, reward_outcome, string
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "inspect-ai"

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_ATTACHMENT = "attachment://"


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and {"epoch", "messages", "target"} <= value.keys()


def detect(document: Document) -> bool:
    first = document.first
    if isinstance(first.get("eval"), dict) and "plan" in first:
        return True
    return _is_sample(first)


def _resolve(value: Any, attachments: dict[str, Any]) -> Any:
    """The value with attachment references replaced by what they stand for."""
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if isinstance(value, list):
        return [_resolve(item, attachments) for item in value]
    if isinstance(value, dict):
        return {key: _resolve(item, attachments) for key, item in value.items()}
    return value


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
    stored = sample.get("attachments")
    attachments: dict[str, Any] = stored if isinstance(stored, dict) else {}
    messages = [_read_message(_resolve(raw, attachments)) for raw in objects(sample.get("messages"), "messages")]
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


ADAPTER = Adapter(NAME, detect, read, by_record=True)
