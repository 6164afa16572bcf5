"""ShareGPT rows: `conversations` of from/value, and the same key with role/content inside (CodeActInstruct)."""

from typing import Any

from msgspec.structs import replace

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.base import METADATA_KEY, build, dicts, objects, spans, string, text_of, tool_call
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError, loads
from tasks.sources.draft import Message, Run
from tasks.sources.exported import restored
from tasks.sources.text_calls import EXECUTE_TAG, exit_code_failed

NAME = "sharegpt"

_OBSERVATION = "Observation:"


def detect(document: Document) -> bool:
    turns = document.first.get("conversations")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    return {"from", "value"} <= turns[0].keys() or {"role", "content"} <= turns[0].keys()


def _call_message(value: str) -> Message:
    """A `function_call` turn: JSON with name and arguments; kept as text where it is no call."""
    try:
        call = loads(value)
    except ValueError:
        call = None
    if not isinstance(call, dict) or string(call.get("name")) is None:
        return Message(role="assistant", author="policy", content=value)
    call_of = tool_call(call.get("name"), call.get("arguments"), call.get("id"))
    return Message(role="assistant", author="policy", tool_calls=(call_of,))


def _read_turn(turn: dict[str, Any], started: bool) -> Message:
    speaker = turn.get("from", turn.get("role"))
    text = text_of(turn.get("value", turn.get("content")))
    if speaker == "function_call":
        return _call_message(text)
    if speaker in ("observation", "tool"):
        return Message(role="tool", author="environment", content=text, failed=exit_code_failed(text))
    if speaker in ("human", "user") and started and text.startswith(_OBSERVATION):
        return Message(role="user", author="environment", content=text)
    user: Author = "human" if started else "harness"
    message = read_message({**turn, "role": speaker, "content": text}, user=user)
    if message.role != "assistant" or message.tool_calls:
        return message
    return replace(message, action_spans=spans(text, EXECUTE_TAG))


def plain_messages(row: dict[str, Any]) -> list[Message]:
    """The row's messages, without what an export of ours adds."""
    messages: list[Message] = []
    started = False
    for turn in objects(row.get("conversations"), "conversations"):
        message = _read_turn(turn, started)
        started = started or message.role == "assistant"
        messages.append(message)
    system = string(row.get("system"))
    if system and messages and messages[0].role != "system":
        messages.insert(0, Message(role="system", author="harness", content=system))
    return messages


def _read_row(document: Document, row: dict[str, Any]) -> Run:
    messages = plain_messages(row)
    exported = restored(row, messages, row.get(METADATA_KEY))
    if exported is not None:
        return exported
    tools = row.get("tools")
    tools_json = tools if isinstance(tools, str) else None
    return build(document, NAME, messages, run_id=string(row.get("id")), tools_json=tools_json)


def read(document: Document) -> list[Run]:
    runs = [_read_row(document, row) for row in dicts(document.records)]
    if not runs:
        raise SourceError("sharegpt: no conversation in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True)
