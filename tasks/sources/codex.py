"""Codex CLI rollout files (`response_item` lines).

`event_msg` lines repeat many items and are not read, but `token_count` tells where a response ends. A turn
is all items of one response: reasoning, text, calls. Compaction starts a new context, hence a new trajectory. Turns
that the user rolled back are left out: the model saw nothing of them from there on, and the user refused them.
"""

import re
from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, dicts, digest, get, objects, string, text_of, tool_call
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall
from tasks.sources.plain_values import kind_of
from tasks.sources.strict import Repeats
from tasks.sources.text_calls import exit_code_failed

NAME = "codex"

_HARNESS_MARKS = ("<environment_context>", "<user_instructions>", "# AGENTS.md", "<turn_aborted>", "<INSTRUCTIONS>")
_MODEL_ITEMS = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_EXIT_CODE = re.compile(r'"exit_code":\s*(-?\d+)')


class Turns:
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

    def roll_back(self, n_turns: int) -> None:
        """Takes back the last `n_turns` messages of the user with all that followed them."""
        self.end_response()
        starts = [index for index, message in enumerate(self.messages) if message.author == "human"]
        if starts and n_turns > 0:
            del self.messages[starts[-min(n_turns, len(starts))] :]


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise SourceError(f"num_turns: expected a number, found {kind_of(value)}")
    return value


def _item(record: dict[str, Any]) -> dict[str, Any] | None:
    """The response item of a line; older rollouts have no wrapper around it."""
    if record.get("type") == "response_item":
        return as_dict(record.get("payload"), "payload")
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
    content = text_of(output["content"] if isinstance(output, dict) and "content" in output else output)
    found = _EXIT_CODE.search(content[-400:])
    failed = int(found.group(1)) != 0 if found else exit_code_failed(content)
    success = get(output, "success")
    if failed is None and isinstance(success, bool):
        failed = not success
    return Message(
        role="tool", author="environment", content=content, tool_call_id=string(item.get("call_id")), failed=failed
    )


def _said(item: dict[str, Any], turns: Turns) -> None:
    if item.get("role") == "assistant":
        turns.text(text_of(item.get("content")))
        return
    message = read_message(item, user="human")
    if message.role == "system" and any(earlier.role == "user" for earlier in turns.messages):
        message = replace(message, role="user")  # templates take system messages at the start only
    elif message.role == "user" and message.content.startswith(_HARNESS_MARKS):
        message = replace(message, author="harness")
    turns.add(message)


def _add_item(item: dict[str, Any], turns: Turns) -> None:
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
    turns = Turns()
    for item in objects(get(payload, "replacement_history") or [], "replacement_history"):
        _add_item(item, turns)
    turns.end_response()
    if not turns.messages and string(get(payload, "message")):
        turns.messages.append(Message(role="user", author="copied_context", content=text_of(get(payload, "message"))))
    return [
        replace(message, author="copied_context") if message.role == "assistant" else message
        for message in turns.messages
    ]


def _check(record: dict[str, Any]) -> None:
    if record.get("type") == "session_meta":
        as_dict(record.get("payload"), "payload")
    _item(record)


def _instructions(session: dict[str, Any]) -> str:
    base = session.get("base_instructions")
    return text_of(base["text"] if isinstance(base, dict) and "text" in base else base) or text_of(
        session.get("instructions")
    )


def read(document: Document) -> list[Run]:
    segments = [Turns()]
    session: dict[str, Any] = {}
    model = None
    repeats = Repeats()
    for record in dicts(document.records):
        kind, payload = record.get("type"), record.get("payload")
        turns = segments[-1]
        item = _item(record)
        if item is not None:
            call_id = string(item.get("call_id"))
            if (call_id and f"{item.get('type')}/{call_id}", item) not in repeats:
                _add_item(item, turns)
        elif kind == "session_meta" and not session:
            session = as_dict(payload, "payload")
            instructions = _instructions(session)
            if instructions:
                turns.add(Message(role="system", author="harness", content=instructions))
        elif kind == "turn_context":
            model = model or string(get(payload, "model"))
        elif kind == "event_msg" and get(payload, "type") == "token_count":
            turns.end_response()
        elif kind == "event_msg" and get(payload, "type") == "thread_rolled_back":
            turns.roll_back(_count(get(payload, "num_turns")))
        elif kind == "compacted":
            turns.end_response()
            opening = [message for message in turns.messages[:2] if message.role == "system"]
            segments.append(Turns())
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


ADAPTER = Adapter(NAME, detect, read, check=_check)
