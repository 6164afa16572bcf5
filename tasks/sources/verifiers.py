"""verifiers `results.jsonl`: `prompt`, `completion`, `reward`. Calls are JSON strings, results carry no call id.

`id` stands before several prompts, so the prompt itself is the task.
"""

from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_list, build, dicts, get, json_text, reward_outcome
from tasks.sources.chat import looks_like_chat, read_messages
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "verifiers"


def detect(document: Document) -> bool:
    first = document.first
    return "reward" in first and looks_like_chat(first.get("prompt")) and isinstance(first.get("completion"), list)


def pair_by_position(messages: list[Message]) -> list[Message]:
    """Results without a call id take the ids of the turn before them, in order."""
    paired: list[Message] = []
    waiting: list[tuple[str | None, str]] = []
    for message in messages:
        if message.role == "assistant":
            waiting = [(call.call_id, call.name) for call in message.tool_calls]
        elif message.role == "tool" and message.tool_call_id is None and waiting:
            call_id, name = waiting.pop(0)
            message = replace(message, tool_call_id=call_id, name=message.name or name)
        paired.append(message)
    return paired


def _read_row(document: Document, row: dict[str, Any]) -> Run:
    prompt = read_messages(as_list(row.get("prompt"), "prompt"), user="harness")
    completion = read_messages(as_list(row.get("completion"), "completion"), user="simulated_user")
    tools = get(row, "info", "oai_tools")
    return build(
        document,
        NAME,
        pair_by_position(prompt + completion),
        outcome=reward_outcome(row.get("reward")),
        tools_json=json_text(tools) if tools else None,
    )


def read(document: Document) -> list[Run]:
    rows = [_read_row(document, row) for row in dicts(document.records)]
    if not rows:
        raise SourceError("verifiers: no rollout in the file")
    return rows


ADAPTER = Adapter(NAME, detect, read, by_record=True)
