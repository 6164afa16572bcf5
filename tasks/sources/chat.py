"""Chat messages in the OpenAI shapes, shared by adapters: `tool_calls`, the old `function_call`, Responses items."""

import re
from collections.abc import Iterable
from typing import Any

from schemas.trajectory import Author
from tasks.sources.base import dicts, get, string, text_of, tool_call
from tasks.sources.document import SourceError, loads
from tasks.sources.draft import Message, ToolCall

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}

_RETURN_CODE = re.compile(r"<returncode>\s*(-?\d+)\s*</returncode>")


def role_of(raw: dict[str, Any]) -> str:
    """One of the four roles.

    Raises:
        SourceError: the role is missing or unknown.
    """
    try:
        return _ROLES[raw["role"]]
    except (KeyError, TypeError):
        role = repr(raw.get("role"))[:40]
        raise SourceError(f"unknown message role {role}: write it as one of system, user, assistant, tool") from None


def calls_of(raw: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message. Some exporters write each call as a JSON string."""
    listed = raw.get("tool_calls")
    if not listed and "function_call" not in raw:
        return ()
    found = []
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, str):
            try:
                item = loads(item)
            except ValueError as error:
                raise SourceError(f"a tool call that is no JSON: {error}") from error
        if not isinstance(item, dict):
            continue
        function = item.get("function")
        if isinstance(function, dict):
            found.append(tool_call(function.get("name"), function.get("arguments"), item.get("id")))
        else:  # inspect_ai writes the name itself; flat shapes have `name`
            arguments = item.get("arguments", item.get("args", item.get("input")))
            found.append(tool_call(function or item.get("name"), arguments, item.get("id")))
    if not found and isinstance(raw.get("function_call"), dict):
        function = raw["function_call"]
        found.append(tool_call(function.get("name"), function.get("arguments")))
    return tuple(found)


def reasoning_of(raw: dict[str, Any]) -> str | None:
    """Reasoning text beside the content; copies of it are read once."""
    copies = raw.get("provider_specific_fields")
    for value in (
        raw.get("reasoning_content"),
        raw.get("reasoning"),
        copies and get(copies, "reasoning_content"),
    ):
        if value and isinstance(value, str):
            return value
    blocks = raw.get("thinking_blocks")
    if not blocks:
        return None
    thoughts = [block.get("thinking") for block in dicts(blocks)]
    return "\n".join(text for text in thoughts if isinstance(text, str) and text) or None


def return_code_failed(content: str) -> bool | None:
    """Whether a `<returncode>` in an observation says that the command failed; None where there is none."""
    match = _RETURN_CODE.search(content)
    return None if match is None else int(match.group(1)) != 0


def read_message(raw: dict[str, Any], *, user: Author = "human", failed: bool | None = None) -> Message:
    """One OpenAI-style message; `user` says who speaks in user messages.

    Raises:
        SourceError: unknown role.
    """
    role = role_of(raw)
    content = raw.get("content")
    if not isinstance(content, str):
        content = text_of(content)
    if role == "assistant":
        return Message(
            role="assistant",
            author="policy",
            content=content,
            reasoning=reasoning_of(raw),
            tool_calls=calls_of(raw),
        )
    if role == "tool":
        return Message(
            role="tool",
            author="environment",
            content=content,
            tool_call_id=string(raw.get("tool_call_id")),
            name=string(raw.get("name")),
            failed=failed,
        )
    if role == "system":
        return Message(role="system", author="harness", content=content)
    return Message(role="user", author=user, content=content, failed=failed)


def read_messages(raws: Iterable[Any], *, user: Author = "human") -> list[Message]:
    """All messages of a conversation in order."""
    messages = []
    for number, raw in enumerate(raws, start=1):
        if not isinstance(raw, dict):
            continue
        try:
            messages.append(read_message(raw, user=user))
        except SourceError as error:
            raise SourceError(f"message {number}: {error}") from error
    return messages


def looks_like_chat(value: Any) -> bool:
    """A list of objects that start with a known role and have content or calls."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    role = value[0].get("role")
    return isinstance(role, str) and role in _ROLES and ("content" in value[0] or "tool_calls" in value[0])


def read_response_items(items: Iterable[Any]) -> Message | None:
    """One response of the Responses API (a list of output items) as one turn; None when it holds nothing."""
    texts, reasonings, calls = [], [], []
    for item in items:
        kind = get(item, "type")
        if kind == "message":
            texts.append(text_of(item.get("content")))
        elif kind == "reasoning":
            for key in ("summary", "content"):
                reasonings.append(text_of(item.get(key)))
        elif kind in ("function_call", "custom_tool_call"):
            calls.append(
                tool_call(
                    item.get("name"), item.get("arguments", item.get("input")), item.get("call_id") or item.get("id")
                )
            )
    reasoning = "\n".join(text for text in reasonings if text) or None
    if not texts and not calls and reasoning is None:
        return None
    return Message(
        role="assistant",
        author="policy",
        content="\n".join(text for text in texts if text),
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )
