"""LangChain message dumps: `lc` constructors, `messages_to_dict` (type/data), and plain type/content objects.

A call stands twice, in `content` as a tool_use block and in `tool_calls`: it is read once. Calls that LangChain could
not parse (`invalid_tool_calls`) were emitted by the model all the same. Old dumps
have them in `additional_kwargs` only.
"""

from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, get, objects, string, text_of, tool_call
from tasks.sources.chat import assistant_blocks, calls_of
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "langchain"

_ROLES = {
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "tool",
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}


def _unwrap(raw: Any) -> tuple[str, dict[str, Any]] | None:
    """(role, fields) of one dumped message in any of the three shapes."""
    if not isinstance(raw, dict):
        return None
    names = raw.get("id")
    if raw.get("type") == "constructor" and isinstance(names, list) and names:
        role, fields = _ROLES.get(str(names[-1])), raw.get("kwargs")
    else:
        kind = raw.get("type")
        role = _ROLES.get(kind) if isinstance(kind, str) else None
        fields = raw.get("data") if isinstance(raw.get("data"), dict) else raw
    return (role, fields) if role and isinstance(fields, dict) and "content" in fields else None


def _list_of(document: Document) -> list[Any]:
    if document.kind == "json" and isinstance(document.value, dict):
        messages = document.value.get("messages")
        return messages if isinstance(messages, list) else []
    return document.records


def detect(document: Document) -> bool:
    messages = _list_of(document)
    return (
        bool(messages) and "role" not in messages[0] and _unwrap(messages[0]) is not None
        if messages and isinstance(messages[0], dict)
        else False
    )


def _turn(fields: dict[str, Any]) -> Message:
    message = assistant_blocks(fields.get("content"))
    calls, invalid = (
        tuple(
            tool_call(call.get("name"), call.get("args"), call.get("id"))
            for call in objects(fields.get(key) or [], key)
        )
        for key in ("tool_calls", "invalid_tool_calls")
    )
    reasoning = message.reasoning or string(get(fields, "additional_kwargs", "reasoning_content"))
    made = (calls or message.tool_calls) + invalid or calls_of(as_dict(fields.get("additional_kwargs") or {}))
    return replace(message, tool_calls=made, reasoning=reasoning)


def _read_message(role: str, fields: dict[str, Any], started: bool) -> Message:
    if role == "assistant":
        return _turn(fields)
    content = text_of(fields.get("content"))
    if role == "tool":
        status = fields.get("status")
        return Message(
            role="tool",
            author="environment",
            content=content,
            tool_call_id=string(fields.get("tool_call_id")),
            name=string(fields.get("name")),
            failed=status == "error" if isinstance(status, str) else None,
        )
    if role == "system":
        return Message(role="system", author="harness", content=content)
    return Message(role="user", author="human", content=content)


def read(document: Document) -> list[Run]:
    messages: list[Message] = []
    model = None
    for raw in _list_of(document):
        unwrapped = _unwrap(raw)
        if unwrapped is None:
            raise SourceError("langchain: an entry that is no message")
        role, fields = unwrapped
        messages.append(_read_message(role, fields, bool(messages)))
        model = model or string(get(fields, "response_metadata", "model_name"))
    return [build(document, NAME, messages, agent=NAME, model=model)]


ADAPTER = Adapter(NAME, detect, read)
