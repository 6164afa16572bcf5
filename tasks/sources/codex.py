"""Codex CLI: rollout files (`response_item` lines) and `codex exec --json` streams.

In rollouts `event_msg` lines repeat many items and are not read, but `token_count` tells where a response ends. A turn
is all items of one response: reasoning, text, calls. Compaction starts a new context, hence a new trajectory.
"""

import re
from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, digest, get, string, text_of, tool_call
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall
from tasks.sources.text_calls import exit_code_failed

NAME = "codex"
EXEC_NAME = "codex-exec"

_HARNESS_MARKS = ("<environment_context>", "<user_instructions>", "# AGENTS.md", "<turn_aborted>", "<INSTRUCTIONS>")
_MODEL_ITEMS = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_EXIT_CODE = re.compile(r'"exit_code":\s*(-?\d+)')


class _Turns:
    """Messages with the response that is being put together at their end."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: list[ToolCall] = []

    def text(self, text: str) -> None:
        self._texts.append(text)

    def reasoning(self, text: str) -> None:
        self._reasonings.append(text)

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def end_response(self) -> None:
        content = "\n".join(text for text in self._texts if text)
        reasoning = "\n".join(text for text in self._reasonings if text) or None
        if content or reasoning or self._calls:
            turn = Message(
                role="assistant", author="policy", content=content, reasoning=reasoning, tool_calls=tuple(self._calls)
            )
            self.messages.append(turn)
        self._texts, self._reasonings, self._calls = [], [], []

    def add(self, message: Message) -> None:
        self.end_response()
        self.messages.append(message)


def _item(record: dict[str, Any]) -> dict[str, Any] | None:
    """The response item of a line; older rollouts have no wrapper around it."""
    if record.get("type") == "response_item":
        payload = record.get("payload")
        return payload if isinstance(payload, dict) else None
    if record.get("type") in (*_MODEL_ITEMS, *_OUTPUTS) or (record.get("type") == "message" and "role" in record):
        return record
    return None


def detect(document: Document) -> bool:
    if document.kind not in ("json", "jsonl"):
        return False
    records = dicts(document.records[:20])
    wrapped = any(
        record.get("type") == "response_item" and isinstance(record.get("payload"), dict) for record in records
    )
    bare = any(record.get("type") in _OUTPUTS and "call_id" in record for record in records)
    meta = bool(records) and records[0].get("type") == "session_meta"
    return wrapped or meta or (bare and not any("id" in record and "choices" in record for record in records))


def _call(item: dict[str, Any]) -> ToolCall:
    kind = item["type"]
    if kind == "function_call":
        return tool_call(item.get("name"), item.get("arguments"), item.get("call_id"))
    if kind == "custom_tool_call":  # free text, not JSON: kept under one key
        return tool_call(item.get("name"), {"input": item.get("input")}, item.get("call_id"))
    arguments = item.get("action", item.get("arguments"))
    return tool_call(kind.removesuffix("_call"), arguments, item.get("call_id") or item.get("id"))


def _output(item: dict[str, Any]) -> Message:
    output = item.get("output")
    content = text_of(output.get("content") if isinstance(output, dict) else output)
    found = _EXIT_CODE.search(content[-400:])
    failed = int(found.group(1)) != 0 if found else exit_code_failed(content)
    success = get(output, "success")
    if failed is None and isinstance(success, bool):
        failed = not success
    return Message(
        role="tool", author="environment", content=content, tool_call_id=string(item.get("call_id")), failed=failed
    )


def _said(item: dict[str, Any], turns: _Turns) -> None:
    if item.get("role") == "assistant":
        turns.text(text_of(item.get("content")))
        return
    message = read_message(item, user="human")
    if message.role == "system" and any(earlier.role == "user" for earlier in turns.messages):
        message = replace(message, role="user")  # templates take system messages at the start only
    elif message.role == "user" and message.content.startswith(_HARNESS_MARKS):
        message = replace(message, author="harness")
    turns.add(message)


def _add_item(item: dict[str, Any], turns: _Turns) -> None:
    kind = item.get("type")
    if kind == "message":
        _said(item, turns)
    elif kind == "reasoning":
        turns.reasoning(text_of(item.get("summary")) or text_of(item.get("content")))
    elif kind in _MODEL_ITEMS or str(kind).endswith("_call"):
        turns.call(_call(item))
    elif kind in _OUTPUTS or str(kind).endswith("_output"):
        turns.add(_output(item))


def _replacement(payload: Any) -> list[Message]:
    """What stands in the context after a compaction: copied, not decided again."""
    turns = _Turns()
    for item in dicts(get(payload, "replacement_history")):
        _add_item(item, turns)
    turns.end_response()
    if not turns.messages and string(get(payload, "message")):
        turns.messages.append(Message(role="user", author="copied_context", content=text_of(get(payload, "message"))))
    return [
        replace(message, author="copied_context") if message.role == "assistant" else message
        for message in turns.messages
    ]


def read(document: Document) -> list[Run]:
    segments = [_Turns()]
    session: dict[str, Any] = {}
    model = None
    for record in dicts(document.records):
        kind, payload = record.get("type"), record.get("payload")
        turns = segments[-1]
        item = _item(record)
        if item is not None:
            _add_item(item, turns)
        elif kind == "session_meta" and isinstance(payload, dict) and not session:
            session = payload
            instructions = text_of(get(payload, "base_instructions", "text") or payload.get("instructions"))
            if instructions:
                turns.add(Message(role="system", author="harness", content=instructions))
        elif kind == "turn_context":
            model = model or string(get(payload, "model"))
        elif kind == "event_msg" and get(payload, "type") == "token_count":
            turns.end_response()
        elif kind == "compacted":
            turns.end_response()
            opening = [message for message in turns.messages[:2] if message.role == "system"]
            segments.append(_Turns())
            segments[-1].messages += opening + _replacement(payload)
    session_id = string(session.get("id")) or document.blake3
    runs: list[Run] = []
    for number, turns in enumerate(segments):
        turns.end_response()
        parent = string(get(session, "source", "subagent", "thread_spawn", "parent_thread_id"))
        link = "continuation" if number else "subagent" if parent else None
        runs.append(
            build(
                document,
                NAME,
                turns.messages,
                task_id=runs[0].task_id if runs else None,
                trajectory_id=digest(NAME, session_id, str(number)),
                run_id=session_id,
                agent=NAME,
                model=model,
                parent_id=runs[-1].trajectory_id if number else digest(NAME, parent, "0") if parent else None,
                parent_link=link,
            )
        )
    return runs


# codex exec --json ----------------------------------------------------------------------------------------------


def _detect_exec(document: Document) -> bool:
    kinds = [record.get("type") for record in dicts(document.records[:4])]
    return bool(kinds) and kinds[0] in ("thread.started", "turn.started", "item.started", "item.completed")


def _exec_call(item: dict[str, Any]) -> ToolCall | None:
    kind, call_id = item.get("type"), item.get("id")
    if kind == "command_execution":
        return tool_call("shell", {"command": item.get("command")}, call_id)
    if kind == "file_change":
        return tool_call("apply_patch", {"changes": item.get("changes")}, call_id)
    if kind == "mcp_tool_call":
        return tool_call(f"{item.get('server')}.{item.get('tool')}", item.get("arguments"), call_id)
    if kind == "web_search":
        return tool_call("web_search", {"query": item.get("query")}, call_id)
    return None


def _exec_result(item: dict[str, Any]) -> Message | None:
    """The result of a completed item; None where the stream shows none."""
    output = item.get("aggregated_output") if item.get("type") == "command_execution" else item.get("result")
    if output is None:
        return None
    code, status = item.get("exit_code"), item.get("status")
    failed = code != 0 if isinstance(code, int) else status == "failed" if isinstance(status, str) else None
    return Message(
        role="tool", author="environment", content=text_of(output), tool_call_id=string(item.get("id")), failed=failed
    )


def _read_exec(document: Document) -> list[Run]:
    turns = _Turns()
    thread = None
    announced: set[str] = set()
    for record in dicts(document.records):
        kind, item = record.get("type"), record.get("item")
        thread = thread or string(record.get("thread_id"))
        if not isinstance(item, dict):
            continue
        call, item_id = _exec_call(item), string(item.get("id")) or ""
        if kind == "item.started" and call is not None:
            turns.call(call)
            announced.add(item_id)
        elif kind == "item.completed":
            if call is not None and item_id not in announced:
                turns.call(call)
            result = _exec_result(item) if call is not None else None
            if result is not None:
                turns.add(result)
            elif call is not None:
                turns.end_response()
            elif item.get("type") == "agent_message":
                turns.text(text_of(item.get("text")))
            elif item.get("type") == "reasoning":
                turns.reasoning(text_of(item.get("text")))
    turns.end_response()
    if not turns.messages:
        raise SourceError("codex-exec: no item in the stream")
    return [build(document, EXEC_NAME, turns.messages, run_id=thread, agent=NAME)]


ADAPTER = Adapter(NAME, detect, read)
EXEC = Adapter(EXEC_NAME, _detect_exec, _read_exec)
