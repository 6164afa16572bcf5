"""OpenHands V0: event lists (GUI export, replays), eval `output.jsonl` rows with `history`, resolver rows.

What is an action and what an observation is told by the key that is there; `source` is "agent" for both. The model's
own text is in `tool_call_metadata.model_response`; one response with several calls becomes several events.
"""

from collections.abc import Iterable
from typing import Any

from schemas.trajectory import Author, Outcome
from tasks.sources.adapter import Adapter
from tasks.sources.base import dicts, get, json_text, objects, reported, string, text_of, tool_call
from tasks.sources.chat import read_message
from tasks.sources.condensed import Segments
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall
from tasks.sources.strict import part, unrepeated
from tasks.sources.text_calls import exit_code_failed

NAME = "openhands"
ROWS_NAME = "openhands-eval"

SINGLE_EVENT = "one event of a session store: give the folder of all the session's events"
"""A run cannot be read out of one of its events."""

_BOOKKEEPING = ("system", "recall", "change_agent_state", "null", "condensation_request", "pause")
_SILENT = ("null", "agent_state_changed", "recall", "condense", "user_rejected_null")
_NO_ARGUMENTS = (
    *("thought", "is_confirmed", "confirmation_state", "action", "action_risk", "security_risk", "keep_prompt"),
    *("kernel_init_code", "blocking", "hidden", "is_input", "is_static", "translated_ipython_code", "impl_source"),
    *("final_thought", "image_urls", "images_urls"),
)
"""Event fields that are no argument of the call."""


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and ("action" in value or "observation" in value) and "role" not in value


def is_single_event(document: Document) -> bool:
    """Whether a document is one event of a session that is kept as one file an event (V0, or V1 of the SDK)."""
    event = document.value
    if not isinstance(event, dict) or "source" not in event or "role" in event or "history" in event:
        return False
    return _is_event(event) or ("kind" in event and "id" in event)


def _history(row: dict[str, Any]) -> list[Any] | None:
    history = row.get("history")
    if isinstance(history, list) and history and _is_event(history[0]):
        return history
    return None


def _detect_rows(document: Document) -> bool:
    return _history(document.first) is not None


def _detect_events(document: Document) -> bool:
    events = document.records[:3]
    return bool(events) and all(_is_event(event) and ("source" in event or "args" in event) for event in events)


def _response_message(event: dict[str, Any]) -> dict[str, Any] | None:
    choices = get(event, "tool_call_metadata", "model_response", "choices")
    message = get(choices[0], "message") if isinstance(choices, list) and choices else None
    return message if isinstance(message, dict) else None


def _response_id(event: dict[str, Any]) -> str | None:
    return string(get(event, "tool_call_metadata", "model_response", "id"))


def _plain_call(event: dict[str, Any], args: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The call of an event that does not carry the model's response."""
    action = event["action"]
    if action in ("message", "finish", "think") and not event.get("tool_call_metadata"):
        return ()
    metadata = event.get("tool_call_metadata")
    name = string(get(metadata, "function_name")) or action
    arguments = {key: value for key, value in args.items() if key not in _NO_ARGUMENTS and value is not None}
    return (tool_call(name, arguments, get(metadata, "tool_call_id")),)


def _turn(event: dict[str, Any], args: dict[str, Any]) -> Message:
    response = _response_message(event)
    if response is not None:
        message = read_message({**response, "role": "assistant"})
        if message.tool_calls or message.content:
            return message
    texts = [text_of(args.get("thought")), text_of(args.get("content")) if event["action"] == "message" else ""]
    if event["action"] == "finish":
        texts.append(text_of(args.get("final_thought")))
    return Message(
        role="assistant",
        author="policy",
        content="\n\n".join(filter(None, texts)),
        tool_calls=_plain_call(event, args),
    )


def _failed(event: dict[str, Any], content: str) -> bool | None:
    if event.get("observation") == "error":
        return True
    code = get(event, "extras", "metadata", "exit_code")
    code = event.get("exit_code") if code is None else code
    if isinstance(code, int):
        return None if code == -1 else code != 0
    return exit_code_failed(content)


def _observation(event: dict[str, Any]) -> Message:
    content = text_of(event.get("content"))
    metadata = part(event, "tool_call_metadata")
    if not metadata:
        return Message(role="user", author="environment", content=content, failed=_failed(event, content))
    return Message(
        role="tool",
        author="environment",
        content=content,
        tool_call_id=string(metadata.get("tool_call_id")),
        name=string(metadata.get("function_name")),
        failed=_failed(event, content),
    )


def _forgotten(args: dict[str, Any]) -> set[str]:
    """Ids of the events that a condensation takes out of the history: a list, or the ends of a range."""
    listed = args.get("forgotten_event_ids")
    if isinstance(listed, list):
        return set(map(str, listed))
    start, end = args.get("forgotten_events_start_id"), args.get("forgotten_events_end_id")
    return set(map(str, range(start, end + 1))) if isinstance(start, int) and isinstance(end, int) else set()


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    """What stands under an event's `args`; the event itself in the resolver's flat ones.

    Raises:
        SourceError: the event holds nothing that can be read.
    """
    if "action" not in event and "observation" not in event:
        raise SourceError("an event that is neither action nor observation")
    args = event if event.get("args") is None else part(event, "args")
    if event.get("action") == "message" and event.get("source") == "user" and "content" not in args:
        raise SourceError("a user's message without content")
    return args


def read_events(events: Iterable[dict[str, Any]], *, user: Author) -> tuple[Segments, str | None]:
    """(messages, tool schemas as JSON text) of a V0 event stream."""
    segments = Segments()
    tools: str | None = None
    started = False
    for event in unrepeated(events):
        args = _arguments(event)
        event_id = string(event.get("id"))
        if "action" not in event:
            if event.get("observation") not in _SILENT:
                segments.add(_observation(event), event_id)
            continue
        action = event["action"]
        from_user = event.get("source") == "user" or ("source" not in event and action == "message" and not started)
        if action == "system":
            segments.add(Message(role="system", author="harness", content=text_of(args.get("content"))), event_id)
            tools = json_text(args["tools"]) if args.get("tools") else None
        elif action == "condensation":
            segments.condense(_forgotten(args), text_of(args.get("summary")))
        elif action in _BOOKKEEPING:
            continue
        elif from_user:
            text = text_of(args.get("content")) or text_of(args.get("command"))
            segments.add(Message(role="user", author=user, content=text), event_id)
        elif event.get("source") != "environment":
            response = _response_id(event)
            if segments.of_response(response, event_id) is None:
                segments.add(_turn(event, args), event_id, response)
        started = True
    return segments, tools


def _row_outcome(row: dict[str, Any]) -> Outcome:
    for verdict in (get(row, "test_result", "report", "resolved"), get(row, "report", "resolved")):
        outcome = reported(verdict)
        if outcome.status != "unknown":
            return outcome
    judged = reported(row.get("success"))  # the resolver lets a model judge the run
    return judged if judged.status == "unknown" else judged.model_copy(update={"source": "agent"})


def _row_instance(row: dict[str, Any]) -> str | None:
    issue = row.get("issue")
    if isinstance(issue, dict) and all(issue.get(key) for key in ("owner", "repo", "number")):
        return f"{issue['owner']}__{issue['repo']}-{issue['number']}"
    return string(row.get("instance_id"))


def _read_row(document: Document, row: dict[str, Any]) -> list[Run]:
    segments, tools = read_events(objects(row.get("history"), "history"), user="harness")
    return segments.runs(
        document,
        ROWS_NAME,
        instance_id=_row_instance(row),
        outcome=_row_outcome(row),
        agent=NAME,
        model=string(get(row, "metadata", "llm_config", "model")),
        tools_json=tools,
        exit_status=string(row.get("error")),
        patch=string(get(row, "test_result", "git_patch")) or string(row.get("git_patch")),
    )


def _read_rows(document: Document) -> list[Run]:
    runs = [run for row in dicts(document.records) for run in _read_row(document, row)]
    if not runs:
        raise SourceError("openhands-eval: no row in the file")
    return runs


def _read_events(document: Document) -> list[Run]:
    if isinstance(document.value, dict):
        raise SourceError(SINGLE_EVENT)
    events = dicts(document.records)
    if not events:
        raise SourceError("openhands: no event in the file")
    segments, tools = read_events(events, user="human")
    models = (string(get(event, "tool_call_metadata", "model_response", "model")) for event in events)
    return segments.runs(document, NAME, agent=NAME, model=next(filter(None, models), None), tools_json=tools)


EVENTS = Adapter(NAME, _detect_events, _read_events, check=_arguments)
ROWS = Adapter(ROWS_NAME, _detect_rows, _read_rows, by_record=True)
