"""Chat messages in the OpenAI shapes, shared by adapters: `tool_calls`, the old `function_call`, Responses items."""

import re
from collections.abc import Iterable
from typing import Any

from schemas.trajectory import Author
from tasks.sources.base import as_dict, as_list, dicts, get, string, text_of, tool_call
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
        role = repr(raw.get("role"))[:200]
        raise SourceError(f"unknown message role {role}: write it as one of system, user, assistant, tool") from None


def _loaded(value: Any, what: str) -> Any:
    """The value itself, or what it is JSON text of."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError as error:
        raise SourceError(f"{what} that is no JSON: {error}") from error


def _call_list(listed: Any) -> list[Any]:
    """`tool_calls` that are no list: one call by itself, or JSON text of either."""
    listed = _loaded(listed, "tool_calls")
    return as_list([listed] if isinstance(listed, dict) else listed, "tool_calls")


def _call(item: Any) -> ToolCall:
    if not isinstance(item, dict):
        item = as_dict(_loaded(item, "a tool call"), "a tool call")
    function = item.get("function")
    if isinstance(function, dict):
        return tool_call(function.get("name"), function.get("arguments"), item.get("id"))
    custom = item.get("custom")
    if isinstance(custom, dict):  # free text, not JSON: kept under one key
        return tool_call(custom.get("name"), {"input": custom.get("input")}, item.get("id"))
    # inspect_ai writes the name itself; flat shapes have `name`
    arguments = item.get("arguments", item.get("args", item.get("input")))
    return tool_call(function or item.get("name"), arguments, item.get("id"))


def calls_of(raw: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message. Some exporters write each call, or the list of them, as a JSON string.

    Raises:
        SourceError: something is no call: one left out, or made up, would be another turn than the model's.
    """
    listed = raw.get("tool_calls")
    if listed:
        return tuple(map(_call, listed if isinstance(listed, list) else _call_list(listed)))
    function = raw.get("function_call")
    if not function:
        return ()
    function = as_dict(_loaded(function, "function_call"), "function_call")
    return (tool_call(function.get("name"), function.get("arguments")),)


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
        if isinstance(value, list) and text_of(value):
            return text_of(value)
    blocks = raw.get("thinking_blocks")
    if not blocks:
        return None
    thoughts = [block.get("thinking") for block in dicts(blocks)]
    return "\n".join(text for text in thoughts if isinstance(text, str) and text) or None


_CALL_BLOCKS = ("tool_use", "server_tool_use", "tool_call", "function_call")


def assistant_blocks(content: Any) -> Message:
    """One response's blocks as one turn. Thinking whose text is withheld (signature only) gives no reasoning."""
    if not isinstance(content, list):
        return Message(role="assistant", author="policy", content=text_of(content))
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _CALL_BLOCKS:
            arguments = block.get("input", block.get("args", block.get("arguments")))
            calls.append(tool_call(block.get("name"), arguments, block.get("call_id") or block.get("id")))
        elif kind in ("thinking", "reasoning"):
            thoughts.append(text_of(block.get(kind, block.get("text"))))
        elif kind != "redacted_thinking" and not str(kind).endswith("_tool_result"):  # no words of the model
            texts.append(block)
    return Message(
        role="assistant",
        author="policy",
        content=text_of(texts),
        reasoning="\n".join(text for text in thoughts if text) or None,
        tool_calls=tuple(calls),
    )


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
        content = text_of(raw.get("refusal") if content is None else content)
    if role == "assistant":
        if not isinstance(raw.get("content"), list):
            return Message("assistant", "policy", content, reasoning_of(raw), calls_of(raw))
        turn = assistant_blocks(raw["content"])
        calls = calls_of(raw) or turn.tool_calls
        return Message("assistant", "policy", turn.content, reasoning_of(raw) or turn.reasoning, calls)
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
    """All messages of a conversation in order.

    Raises:
        SourceError: one of them is none; the text says which.
    """
    messages = []
    for number, raw in enumerate(raws, start=1):
        try:
            messages.append(read_message(as_dict(raw, "a message"), user=user))
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
        item = as_dict(item, "an output item")
        kind = item.get("type")
        if kind == "message":
            texts.append(text_of(item.get("content")))
        elif kind == "reasoning":
            for key in ("summary", "content"):
                reasonings.append(text_of(item.get(key)))
        elif isinstance(kind, str) and kind.endswith("_call"):
            own = kind not in ("function_call", "custom_tool_call")  # the provider's tools have no other name
            name = item.get("name") or (kind.removesuffix("_call") if own else None)
            arguments = item.get("arguments", item.get("input", item.get("action")))
            calls.append(tool_call(name, arguments, item.get("call_id") or item.get("id")))
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
