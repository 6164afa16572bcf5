"""Plain OpenAI chat messages with tools: an object with `messages`, a list of such, or a bare list of messages."""

from typing import Any

from schemas.trajectory import Outcome
from tasks.sources.adapter import Adapter
from tasks.sources.base import (
    METADATA_KEY,
    as_list,
    build,
    dicts,
    json_text,
    reported,
    reward_outcome,
    string,
)
from tasks.sources.chat import looks_like_chat, read_messages
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.exported import restored

NAME = "openai-chat"


def detect(document: Document) -> bool:
    if looks_like_chat(document.first.get("messages")):
        return True
    return document.kind == "json" and looks_like_chat(document.value)


def _outcome(row: dict[str, Any]) -> Outcome:
    for key in ("resolved", "success"):
        outcome = reported(row.get(key))
        if outcome.status != "unknown":
            return outcome
    for key in ("reward", "score"):
        if isinstance(row.get(key), int | float):
            return reward_outcome(row[key])
    return Outcome()


def plain_messages(row: dict[str, Any]) -> list[Message]:
    """The row's messages, without what an export of ours adds."""
    return read_messages(as_list(row.get("messages"), "messages"))


def _read_row(document: Document, row: dict[str, Any]) -> Run:
    messages = plain_messages(row)
    exported = restored(row, messages, row.get(METADATA_KEY))
    if exported is not None:
        return exported
    tools = row.get("tools")
    task = string(row.get("task_id"))
    return build(
        document,
        NAME,
        messages,
        instance_id=string(row.get("instance_id")) or task,
        outcome=_outcome(row),
        run_id=string(row.get("run_id")),
        model=string(row.get("model")),
        tools_json=json_text(tools) if tools else None,
        patch=string(row.get("patch")),
    )


def read(document: Document) -> list[Run]:
    if document.kind == "json" and looks_like_chat(document.value):
        return [_read_row(document, {"messages": document.value})]
    rows = [_read_row(document, row) for row in dicts(document.records)]
    if not rows:
        raise SourceError("openai-chat: no conversation in the file")
    return rows


ADAPTER = Adapter(NAME, detect, read, by_record=True)
