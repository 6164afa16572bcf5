"""mini-swe-agent: v1 (fenced text), v1.1 (tool calls), bare message lists, data-set rows, Responses API items.

The `exit` message is no message of the conversation: its content is the patch or an error, which no model wrote or saw.
`extra.raw_output` is longer than what the model saw, so only `content` is read. A malformed turn is not stored by the
agent and was not in the model's context afterwards; its format-error note stays.
"""

import re
from typing import Any, TypedDict

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import (
    METADATA_KEY,
    as_list,
    build,
    dicts,
    get,
    objects,
    reported,
    spans,
    string,
    text_of,
    tool_call,
)
from tasks.sources.chat import looks_like_chat, read_message, read_response_items, return_code_failed
from tasks.sources.document import Document, Shape, SourceError, loads
from tasks.sources.draft import CharSpan, Message, Run, ToolCall
from tasks.sources.enclosed import Enclosed
from tasks.sources.side_files import SideFields

NAME = "mini-swe-agent"

_FENCE = Enclosed(re.compile(r"```(?:bash|mswea_bash_command)[^\S\n]*\n"), "```")
_XML_CALL = Enclosed(re.compile(r"<function=[^<>\n]+>"), "</function>")
_OBSERVATION = re.compile(r"\s*(?:<exception>.*?</exception>\s*)?<returncode>", re.DOTALL)


class _Extra(TypedDict, total=False):
    actions: Any
    exception_info: Any
    exit_status: Any
    interrupt_type: Any
    returncode: Any


class _Copies(TypedDict, total=False):
    reasoning_content: Any


class _Message(TypedDict, total=False):
    role: Any
    content: Any
    name: Any
    reasoning: Any
    reasoning_content: Any
    thinking_blocks: Any
    provider_specific_fields: _Copies | None
    tool_calls: Any
    function_call: Any
    tool_call_id: Any
    object: Any
    type: Any
    output: Any
    call_id: Any
    extra: _Extra | None


class _Model(TypedDict, total=False):
    model_name: Any


class _Config(TypedDict, total=False):
    model: _Model | None


class _Info(TypedDict, total=False):
    mini_version: Any
    exit_status: Any
    submission: Any
    config: _Config | None


class _Run(SideFields, total=False):
    trajectory_format: Any
    instance_id: Any
    info: _Info | None
    messages: list[_Message]
    verified: Any
    model: Any
    patch: Any
    traceforge: Any


SHAPE = Shape(b'"trajectory_format"', _Run)
"""Without `extra.response`, `raw_output` and the configuration: three quarters of a real file."""


def _is_recording(messages: Any) -> bool:
    """A bare list is this agent's when an assistant wrote its kind of fence and a return code answered."""
    if not looks_like_chat(messages):
        return False
    texts = [(raw.get("role"), text_of(raw.get("content"))) for raw in dicts(messages[:12])]
    fenced = any(role == "assistant" and spans(text, _FENCE) for role, text in texts)
    return fenced and any(role == "user" and _OBSERVATION.match(text) for role, text in texts)


def detect(document: Document) -> bool:
    first = document.first
    if document.kind not in ("json", "jsonl") or METADATA_KEY in first:  # an export of ours has its own reader
        return False
    form = first.get("trajectory_format")
    if isinstance(form, str) and form.startswith("mini-swe-agent"):
        return True
    messages = first.get("messages")
    if isinstance(messages, list):
        return get(first, "info", "mini_version") is not None or _is_recording(messages)
    return document.kind == "json" and _is_recording(document.value)


def _action_calls(raw: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Calls from `extra.actions`: with `function` (name, arguments), or a bare `command`."""
    found = []
    for action in dicts(get(raw, "extra", "actions")):
        function = action.get("function")
        call_id = action.get("tool_call_id") or action.get("id")
        if isinstance(function, dict):
            found.append(tool_call(function.get("name"), function.get("arguments"), call_id))
        elif isinstance(action.get("command"), str):
            found.append(tool_call("bash", {"command": action["command"]}, call_id))
    return tuple(found)


def _said(call: ToolCall) -> list[str]:
    """The texts that a call passes on."""
    try:
        arguments = loads(call.arguments)
    except ValueError:
        return [call.arguments.strip()]
    values = arguments.values() if isinstance(arguments, dict) else ()
    return [value.strip() for value in values if isinstance(value, str)]


def _written(content: str, calls: tuple[ToolCall, ...]) -> tuple[CharSpan, ...]:
    """Where in the text each of the calls stands; nothing if one of them stands nowhere."""
    fences = {content[span.start : span.end]: span for span in spans(content, _FENCE)}
    tags = {content[span.start : span.end]: span for span in spans(content, _XML_CALL)}
    fenced = {text.partition("\n")[2].removesuffix("```").strip(): span for text, span in fences.items()}
    found = set[CharSpan]()
    for call in calls:
        said = _said(call)
        span = fenced.get(said[0]) if len(said) == 1 else None
        span = span or next((span for text, span in tags.items() if all(value in text for value in said)), None)
        if span is None:
            return ()
        found.add(span)
    return tuple(sorted(found, key=lambda span: span.start))


def _assistant(raw: dict[str, Any]) -> Message:
    message = read_message(raw)
    if message.tool_calls:
        return message
    calls = _action_calls(raw)
    if calls:  # what ran: other fences and tags in the text are examples
        marked = _written(message.content, calls)
        return replace(message, action_spans=marked) if marked else replace(message, tool_calls=calls)
    marked = spans(message.content, _FENCE, first_only=True) or spans(message.content, _XML_CALL)
    return replace(message, action_spans=marked)


def _failed(extra: dict[str, Any], content: Any) -> bool | None:
    if extra.get("interrupt_type") or extra.get("exception_info"):
        return True
    code = extra.get("returncode")
    return code != 0 if isinstance(code, int) else return_code_failed(text_of(content))


def _read_item(raw: dict[str, Any], *, started: bool) -> Message | None:
    """One stored message; None for those that are no part of the conversation."""
    role = raw.get("role")
    if raw.get("object") == "response" or (role is None and isinstance(raw.get("output"), list)):
        return read_response_items(as_list(raw.get("output"), "output"))
    if role == "assistant":
        return _assistant(raw)
    extra = raw.get("extra")
    extra = extra if isinstance(extra, dict) else {}
    if raw.get("type") == "function_call_output":
        return Message(
            role="tool",
            author="environment",
            content=text_of(raw.get("output")),
            tool_call_id=string(raw.get("call_id")),
            failed=_failed(extra, raw.get("output")),
        )
    if role == "exit":
        return None
    if role == "system":
        return read_message(raw)
    observes = started or role != "user" or bool(extra.get("interrupt_type"))
    failed = _failed(extra, raw.get("content")) if observes else None
    return read_message(raw, user="environment" if observes else "harness", failed=failed)


def _read_run(document: Document, run: dict[str, Any]) -> Run:
    messages: list[Message] = []
    started = False
    stored = objects(run.get("messages"), "messages")
    for raw in stored:
        message = _read_item(raw, started=started)
        if message is not None:
            messages.append(message)
            # the first user message is the task; later ones are observations and notes
            started = started or message.role in ("assistant", "user")
    info = run.get("info") if isinstance(run.get("info"), dict) else {}
    return build(
        document,
        NAME,
        messages,
        instance_id=string(run.get("instance_id")),
        outcome=reported(run.get("resolved") if run.get("verified") is None else run["verified"]),
        agent=NAME,
        model=string(get(info, "config", "model", "model_name")) or string(run.get("model")),
        exit_status=string(get(info, "exit_status"))
        or next((string(get(raw, "extra", "exit_status")) for raw in stored if raw.get("role") == "exit"), None),
        patch=string(get(info, "submission")) or string(run.get("patch")),
    )


def read(document: Document) -> list[Run]:
    if document.kind == "json" and looks_like_chat(document.value):
        return [_read_run(document, {"messages": document.value})]
    runs = [_read_run(document, run) for run in dicts(document.records)]
    if not runs:
        raise SourceError("mini-swe-agent: no run in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True, shape=SHAPE)
