"""Anthropic content blocks, shared with Claude Code and moatless; and plain request/response logs of that shape."""

from collections.abc import Iterable
from typing import Any

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, json_text, objects, string, text_of
from tasks.sources.chat import assistant_blocks, read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "anthropic-messages"

_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use")


def result_message(block: dict[str, Any], name: str | None = None) -> Message:
    """A `tool_result` block as a tool message."""
    failed = block.get("is_error")
    return Message(
        role="tool",
        author="environment",
        content=text_of(block.get("content")),
        tool_call_id=string(block.get("tool_use_id")),
        name=name,
        failed=failed if isinstance(failed, bool) else None,
    )


def user_blocks(content: Any, *, author: Author) -> list[Message]:
    """A user message's results first, then what was said beside them."""
    if not isinstance(content, list):
        return [Message(role="user", author=author, content=text_of(content))]
    results = [result_message(block) for block in dicts(content) if block.get("type") == "tool_result"]
    rest = [block for block in content if not (isinstance(block, dict) and block.get("type") == "tool_result")]
    text = text_of(rest)
    return [*results, Message(role="user", author=author, content=text)] if text or not results else results


def read_block_messages(raws: Iterable[dict[str, Any]], *, first_user: Author = "harness") -> list[Message]:
    """A list of Anthropic messages; consecutive assistant messages stay apart, as each is a response."""
    messages: list[Message] = []
    for raw in raws:
        if raw.get("role") == "assistant":
            messages.append(assistant_blocks(raw.get("content")))
        elif raw.get("role") == "user":
            started = any(message.role == "user" for message in messages)
            messages += user_blocks(raw.get("content"), author="human" if started else first_user)
        else:
            messages.append(read_message(raw))
    return messages


def _has_blocks(messages: Any) -> bool:
    return isinstance(messages, list) and any(
        block.get("type") in _BLOCKS
        for raw in dicts(messages[:6])
        if raw.get("role") in ("user", "assistant")
        for block in dicts(raw.get("content"))
    )


def detect(document: Document) -> bool:
    return _has_blocks(document.first.get("messages")) or (document.kind == "json" and _has_blocks(document.value))


def _read_row(document: Document, row: dict[str, Any]) -> Run:
    messages = read_block_messages(objects(row.get("messages"), "messages"), first_user="human")
    system = text_of(row.get("system"))
    if system:
        messages.insert(0, Message(role="system", author="harness", content=system))
    response = row.get("response")
    if isinstance(response, dict) and isinstance(response.get("content"), list):
        messages.append(assistant_blocks(response["content"]))
    tools = row.get("tools")
    return build(
        document,
        NAME,
        messages,
        instance_id=string(row.get("instance_id")),
        model=string(row.get("model")),
        tools_json=json_text(tools) if tools else None,
    )


def read(document: Document) -> list[Run]:
    if document.kind == "json" and _has_blocks(document.value):
        return [_read_row(document, {"messages": document.value})]
    rows = [_read_row(document, row) for row in dicts(document.records)]
    if not rows:
        raise SourceError("anthropic-messages: no conversation in the file")
    return rows


ADAPTER = Adapter(NAME, detect, read, by_record=True)
