"""`codex exec --json` streams: started and completed items are one action; what no model reads is left out."""

from typing import Any

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, dicts, get, string, text_of, tool_call
from tasks.sources.codex import Turns
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall
from tasks.sources.strict import Repeats

NAME = "codex-exec"

_ITEMS = (
    *("agent_message", "reasoning", "command_execution", "file_change", "mcp_tool_call", "collab_tool_call"),
    *("web_search", "error", "todo_list"),
)


def detect(document: Document) -> bool:
    kinds = [record.get("type") for record in dicts(document.records[:4])]
    return bool(kinds) and kinds[0] in ("thread.started", "turn.started", "item.started", "item.completed")


def _item(record: dict[str, Any]) -> dict[str, Any] | None:
    """The item of a line that begins or ends one; None for other lines.

    Raises:
        SourceError: it is none that is known.
    """
    kind = record.get("type")
    if not isinstance(kind, str):
        raise SourceError("a line without type")
    if not kind.startswith("item."):
        return None
    item = as_dict(record.get("item"), "item")
    if item.get("type") not in _ITEMS:
        raise SourceError(f"unknown item type {str(item.get('type'))[:200]!r}")
    return item


def _call(item: dict[str, Any]) -> ToolCall | None:
    kind, call_id = item.get("type"), item.get("id")
    if kind == "command_execution":
        return tool_call("shell", {"command": item.get("command")}, call_id)
    if kind == "file_change":
        return tool_call("apply_patch", {"changes": item.get("changes")}, call_id)
    if kind == "mcp_tool_call":
        return tool_call(f"{item.get('server')}.{item.get('tool')}", item.get("arguments"), call_id)
    if kind == "collab_tool_call":
        arguments = item.get("arguments")
        if arguments is None:
            arguments = {key: item[key] for key in ("prompt", "receiver_thread_ids") if item.get(key) is not None}
        return tool_call(item.get("tool"), arguments, call_id)
    if kind == "web_search":
        return tool_call("web_search", {"query": item.get("query")}, call_id)
    return None


def _failure(record: dict[str, Any]) -> str | None:
    """What an error says to the user; no model reads it."""
    error = record.get("error")
    return string(get(error, "message")) or string(error) or string(record.get("message"))


def _result(item: dict[str, Any]) -> Message | None:
    """The result of a completed item; None where the stream shows none."""
    output = item.get("aggregated_output") if item.get("type") == "command_execution" else item.get("result")
    if output is None and item.get("type") == "collab_tool_call":
        output = item.get("agents_states")
    if output is None:
        error = item.get("error")
        output = error["message"] if isinstance(error, dict) and "message" in error else error
    if output is None:
        return None
    code, status = item.get("exit_code"), item.get("status")
    failed = code != 0 if isinstance(code, int) else status == "failed" if isinstance(status, str) else None
    return Message(
        role="tool", author="environment", content=text_of(output), tool_call_id=string(item.get("id")), failed=failed
    )


def read(document: Document) -> list[Run]:
    turns = Turns()
    thread = None
    announced: set[str] = set()
    repeats = Repeats()
    failure = None
    for record in dicts(document.records):
        kind, item = record.get("type"), _item(record)
        thread = thread or string(record.get("thread_id"))
        if kind == "error" or kind == "turn.failed":
            failure = _failure(record) or failure
        if item is None:
            continue
        call, item_id = _call(item), string(item.get("id")) or ""
        if kind == "item.completed" and (item_id or None, item) in repeats:
            continue
        if kind == "item.started" and call is not None:
            turns.call(call)
            announced.add(item_id)
        elif kind == "item.completed":
            if call is not None and item_id not in announced:
                turns.call(call)
            result = _result(item) if call is not None else None
            if result is not None:
                turns.add(result)
            elif call is not None:
                turns.end_response()
            elif item.get("type") == "agent_message":
                turns.text(text_of(item.get("text")))
            elif item.get("type") == "reasoning":
                turns.reasoning(text_of(item.get("text")))
            elif item.get("type") == "error":
                failure = _failure(item) or failure
    turns.end_response()
    if not turns.messages:
        raise SourceError("codex-exec: no item in the stream")
    return [build(document, NAME, turns.messages, run_id=thread, agent="codex", exit_status=failure)]


ADAPTER = Adapter(NAME, detect, read, check=_item)
