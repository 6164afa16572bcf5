"""OpenHands V1 SDK events (`kind`: ActionEvent, ObservationEvent, ...) and LLM completion logs."""

import re
from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, as_list, build, dicts, get, json_text, spans, string, text_of, tool_call
from tasks.sources.chat import calls_of, read_message, read_messages, reasoning_of
from tasks.sources.condensed import Segments
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run, ToolCall
from tasks.sources.openhands import SINGLE_EVENT
from tasks.sources.strict import first_choice, part, unrepeated
from tasks.sources.text_calls import XML_CALL, exit_code_failed

EVENTS_NAME = "openhands-sdk"
LOG_NAME = "openhands-llm-log"

_LOG_KEYS = {"kwargs", "context_window", "latency_sec"}

_OBSERVATION_TEXTS = ("content", "output", "message")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def _detect_events(document: Document) -> bool:
    kinds = [event.get("kind") for event in dicts(document.records[:5])]
    return bool(kinds) and all(isinstance(kind, str) and kind.endswith("Event") for kind in kinds)


def _calls(event: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The call of an action: flat, as the API has it, or only as the action it was parsed to."""
    call_id = string(event.get("tool_call_id"))
    if event.get("tool_call"):
        calls = calls_of({"tool_calls": [event["tool_call"]]})
        return tuple(replace(call, call_id=call_id or call.call_id) for call in calls)
    action = part(event, "action")
    arguments = {key: value for key, value in action.items() if key != "kind"}
    return (tool_call(event.get("tool_name"), arguments, call_id),) if action else ()


def _action(event: dict[str, Any]) -> Message:
    content = text_of(event.get("thought"))
    reasoning = reasoning_of(event)
    block = _THINK.match(content)
    if block and (reasoning is None or block.group(1).strip() == reasoning.strip()):
        reasoning = reasoning or block.group(1)  # the thought repeats the reasoning: counted once
        content = content[block.end() :]
    return Message("assistant", "policy", content, reasoning, tool_calls=_calls(event))


def _merge(first: Message, second: Message) -> Message:
    """Two events of one model response."""
    return replace(
        first,
        content="\n".join(text for text in (first.content, second.content) if text),
        reasoning=first.reasoning or second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _check(event: dict[str, Any]) -> None:
    if event.get("kind") == "MessageEvent":
        as_dict(event.get("llm_message"), "llm_message")
    elif event.get("kind") == "ActionEvent":
        _calls(event)
    elif event.get("kind") == "ObservationEvent":
        _seen(event)


def _seen(event: dict[str, Any]) -> Any:
    """An observation that can be read, whatever holds it."""
    observation = event.get("observation")
    return part(event, "observation", "kind", *_OBSERVATION_TEXTS) if isinstance(observation, dict) else observation


def _observation(event: dict[str, Any]) -> Message:
    observation = _seen(event)
    if isinstance(observation, dict):
        content = next(filter(None, (text_of(observation.get(key)) for key in _OBSERVATION_TEXTS)), "")
    else:
        content = text_of(observation)
    content = content or text_of(event.get("error")) or text_of(event.get("rejection_reason"))
    failed = get(observation, "is_error")
    code = get(observation, "exit_code")
    if failed is not True and isinstance(code, int):
        failed = None if code == -1 else code != 0
    if event.get("kind") in ("AgentErrorEvent", "UserRejectObservation"):
        failed = True
    return Message(
        role="tool",
        author="environment",
        content=content,
        tool_call_id=string(event.get("tool_call_id")),
        name=string(event.get("tool_name")),
        failed=failed if isinstance(failed, bool) else None,
    )


def _read_events(document: Document) -> list[Run]:
    if isinstance(document.value, dict):
        raise SourceError(SINGLE_EVENT)
    segments = Segments()
    tools: str | None = None
    for event in unrepeated(dicts(document.records)):
        kind, event_id = event.get("kind"), string(event.get("id"))
        if kind == "SystemPromptEvent":
            system = Message(role="system", author="harness", content=text_of(event.get("system_prompt")))
            segments.add(system, event_id)
            tools = json_text(event["tools"]) if event.get("tools") else None
        elif kind == "MessageEvent":
            raw = as_dict(event.get("llm_message"), "llm_message")
            segments.add(read_message(raw, user="human"), event_id)
        elif kind == "ActionEvent":
            response = string(event.get("llm_response_id"))
            index = segments.of_response(response, event_id)
            if index is None:
                segments.add(_action(event), event_id, response)
            else:
                segments.messages[index] = _merge(segments.messages[index], _action(event))
        elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
            segments.add(_observation(event), event_id)
        elif kind == "Condensation":
            forgotten = event.get("forgotten_event_ids")
            segments.condense(
                set(map(str, forgotten)) if isinstance(forgotten, list) else (), text_of(event.get("summary"))
            )
    return segments.runs(document, EVENTS_NAME, agent="openhands", tools_json=tools)


def _detect_log(document: Document) -> bool:
    first = document.first
    if not isinstance(first.get("messages"), list) or "response" not in first:
        return False
    return isinstance(get(first, "response", "choices"), list) or first.keys() >= _LOG_KEYS


def _last_turn(record: dict[str, Any]) -> Message | None:
    """The logged response; `raw_response` is what the model wrote where calls are prompted as text."""
    for key in ("raw_response", "response"):
        message = first_choice(part(record, key, "choices"))
        if message is not None:
            return read_message({**message, "role": "assistant"})
    return None


def _read_log(document: Document) -> list[Run]:
    runs = []
    for record in dicts(document.records):
        messages = read_messages(as_list(record.get("messages"), "messages"), user="harness")
        last = _last_turn(record)
        if last is not None:
            messages.append(last)
        started = False
        for index, message in enumerate(messages):
            if message.role == "assistant":
                started = True
                if not message.tool_calls:
                    messages[index] = replace(message, action_spans=spans(message.content, XML_CALL))
            elif message.role == "tool" or (
                message.role == "user" and started and message.content.startswith("EXECUTION RESULT")
            ):
                failed = exit_code_failed(message.content)
                messages[index] = replace(message, author="environment", failed=failed)
        tools = record.get("tools")
        runs.append(
            build(
                document,
                LOG_NAME,
                messages,
                agent="openhands",
                model=string(get(record, "response", "model")),
                tools_json=json_text(tools) if tools else None,
            )
        )
    if not runs:
        raise SourceError("openhands-llm-log: no completion in the file")
    return runs


EVENTS = Adapter(EVENTS_NAME, _detect_events, _read_events, check=_check)
LLM_LOG = Adapter(LOG_NAME, _detect_log, _read_log, by_record=True, snapshots=True)
