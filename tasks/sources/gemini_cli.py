"""Gemini: CLI sessions (`type` user/gemini, thoughts, toolCalls) and the API's `contents` of parts."""

from typing import Any

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, dicts, get, objects, string, text_of, tool_call
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall

NAME = "gemini-cli"

_NOTES = ("info", "error", "warning")
"""What the program tells its user; no model reads it."""
_KINDS = ("user", "gemini", *_NOTES)

_NO_TEXT = frozenset(("functionCall", "functionResponse"))


def _contents(first: dict[str, Any]) -> list[Any] | None:
    contents = first.get("contents")
    return contents if isinstance(contents, list) and contents and isinstance(get(contents[0], "parts"), list) else None


def detect(document: Document) -> bool:
    first = document.first
    if _contents(first) is not None:
        return True
    kinds = [message.get("type") for message in dicts(first.get("messages"))[:3]]
    if not kinds or kinds[0] not in _KINDS:
        return False
    return "gemini" in kinds or all(kind in _KINDS for kind in kinds)


def _thoughts(thoughts: Any) -> str | None:
    texts = [f"{thought.get('subject', '')}\n{thought.get('description', '')}".strip() for thought in dicts(thoughts)]
    return "\n\n".join(text for text in texts if text) or None


def _result(call: dict[str, Any]) -> Message:
    parts = call.get("result")
    outputs = [get(part, "functionResponse", "response") for part in dicts(parts)]
    texts = [text_of(get(output, "output") or get(output, "error") or output) for output in outputs]
    status = call.get("status")
    return Message(
        role="tool",
        author="environment",
        content="\n".join(texts) if texts else text_of(parts),
        tool_call_id=string(call.get("id")),
        name=string(call.get("name")),
        failed=status != "success" if isinstance(status, str) else None,
    )


def _session(session: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    for raw in objects(session.get("messages"), "messages"):
        if raw.get("type") == "user":
            messages.append(Message(role="user", author="human", content=text_of(raw.get("content"))))
        elif raw.get("type") == "gemini":
            calls = objects(raw.get("toolCalls") or [], "toolCalls")
            messages.append(
                Message(
                    role="assistant",
                    author="policy",
                    content=text_of(raw.get("content")),
                    reasoning=_thoughts(raw.get("thoughts")),
                    tool_calls=tuple(tool_call(call.get("name"), call.get("args"), call.get("id")) for call in calls),
                )
            )
            messages += [_result(call) for call in calls if call.get("result") is not None]
        elif raw.get("type") not in _NOTES:
            raise SourceError(f"unknown message type {str(raw.get('type'))[:200]!r}")
    return messages


def _api_message(content: dict[str, Any]) -> list[Message]:
    parts = objects(content.get("parts") or [], "parts")
    results = [as_dict(part["functionResponse"], "functionResponse") for part in parts if "functionResponse" in part]
    messages = [
        Message(
            role="tool",
            author="environment",
            content=text_of(get(result, "response", "output") or result.get("response")),
            tool_call_id=string(result.get("id")),
            name=string(result.get("name")),
        )
        for result in results
    ]
    text = text_of(
        [
            part
            for part in parts
            if not part.get("thought") and _NO_TEXT.isdisjoint(part) and part.keys() != {"thoughtSignature"}
        ]
    )
    if content.get("role") == "model":
        calls: list[ToolCall] = []
        for part in parts:
            if "functionCall" in part:
                call = as_dict(part["functionCall"], "functionCall")
                calls.append(tool_call(call.get("name"), call.get("args"), call.get("id")))
        reasoning = text_of([part for part in parts if part.get("thought")]) or None
        messages.append(
            Message(role="assistant", author="policy", content=text, reasoning=reasoning, tool_calls=tuple(calls))
        )
    elif text:
        messages.append(Message(role="user", author="human", content=text))
    return messages


def _read_run(document: Document, run: dict[str, Any]) -> Run:
    contents = _contents(run)
    if contents is None:
        messages = _session(run)
        models = (string(raw.get("model")) for raw in dicts(run.get("messages")))
        model = next(filter(None, models), None)
    else:
        system = run.get("systemInstruction") or run.get("system_instruction")
        messages = [Message(role="system", author="harness", content=text_of(get(system, "parts")))] if system else []
        messages += [message for content in objects(contents, "contents") for message in _api_message(content)]
        model = string(run.get("model"))
    return build(document, NAME, messages, run_id=string(run.get("sessionId")), agent=NAME, model=model)


def read(document: Document) -> list[Run]:
    runs = [_read_run(document, run) for run in dicts(document.records)]
    if not runs:
        raise SourceError("gemini-cli: no session in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True)
