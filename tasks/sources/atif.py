"""ATIF 1.0-1.8 (Agent Trajectory Interchange Format): one document of steps; action and observation share a step.

`source_call_id` is often missing, so results pair with calls by position. Copied context and steps that no model call
made are context. Subagent trajectories inside the document become trajectories of their own.
"""

from typing import Any

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.base import (
    METADATA_KEY,
    build,
    dicts,
    get,
    json_text,
    objects,
    string,
    text_of,
    tool_call,
)
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import CharSpan, Message, Run
from tasks.sources.exported import restored
from tasks.sources.strict import known, text_or_none
from tasks.sources.text_calls import exit_code_failed

NAME = "atif"

_RESULT_KEYS = ("content", "source_call_id", "subagent_trajectory_ref", "extra")


def detect(document: Document) -> bool:
    first = document.first
    version = first.get("schema_version")
    return isinstance(first.get("steps"), list) and isinstance(version, str) and version.startswith("ATIF")


def _turn_author(step: dict[str, Any]) -> Author:
    if step.get("is_copied_context") is True:
        return "copied_context"
    return "invented" if step.get("llm_call_count") == 0 else "policy"


def _turn(step: dict[str, Any]) -> Message:
    content = text_of(step.get("message"))
    calls = tuple(
        tool_call(call.get("function_name"), call.get("arguments"), call.get("tool_call_id"))
        for call in objects(step.get("tool_calls") or [], "tool_calls")
    )
    written = not calls and step.get("observation") is not None
    return Message(
        role="assistant",
        author=_turn_author(step),
        content=content,
        reasoning=text_or_none(step.get("reasoning_content")),
        tool_calls=calls,
        action_spans=_json_span(content) if written else (),
    )


def _json_span(content: str) -> tuple[CharSpan, ...]:
    start, stop = content.find("{"), content.rfind("}") + 1
    return (CharSpan(start, stop),) if 0 <= start < stop else ()


def _result_list(observation: Any) -> list[dict[str, Any]]:
    """The results of an observation; one that is no object with `results` is one itself, or the list of them."""
    if isinstance(observation, dict) and ("results" in observation or not observation):
        observation = observation.get("results")
    if isinstance(observation, str | dict):
        observation = [{"content": observation}]
    results = objects(observation or [], "results")
    return [known(result, "results", _RESULT_KEYS) for result in results]


def _results(step: dict[str, Any], turn: Message | None) -> list[Message]:
    messages = []
    calls = turn.tool_calls if turn else ()
    for position, result in enumerate(_result_list(step.get("observation"))):
        content = text_of(result.get("content"))
        call_id = string(result.get("source_call_id"))
        call = next((call for call in calls if call_id is not None and call.call_id == call_id), None)
        if call is None and call_id is None and position < len(calls):
            call = calls[position]
        if not calls and call_id is None:
            failed = True if "parsing error" in content[:200] else exit_code_failed(content)
            messages.append(Message(role="user", author="environment", content=content, failed=failed))
            continue
        messages.append(
            Message(
                role="tool",
                author="environment",
                content=content,
                tool_call_id=call_id or (call.call_id if call else None),
                name=call.name if call else None,
                failed=exit_code_failed(content),
            )
        )
    return messages


def _messages(steps: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    task_read = False
    for step in steps:
        turn = None
        source = step.get("source")
        if source == "agent":
            turn = _turn(step)
            messages.append(turn)
        elif source == "system":
            role = "user" if task_read else "system"  # templates take a system message at the start only
            messages.append(Message(role=role, author="harness", content=text_of(step.get("message"))))
        elif source == "user":
            author: Author = "copied_context" if step.get("is_copied_context") is True else "human"
            author = author if task_read else "harness"
            messages.append(Message(role="user", author=author, content=text_of(step.get("message"))))
            task_read = True
        else:
            raise SourceError(f"atif: unknown step source {source!r}")
        messages += _results(step, turn)
    return messages


def plain_messages(value: dict[str, Any]) -> list[Message]:
    """The document's messages, without what an export of ours adds."""
    return _messages(objects(value.get("steps"), "steps"))


def _read_one(document: Document, value: dict[str, Any], parent_id: str | None) -> list[Run]:
    messages = plain_messages(value)
    exported = restored(value, messages, get(value, "extra", METADATA_KEY))
    if exported is not None:
        return [exported]
    tools = get(value, "agent", "tool_definitions")
    run = build(
        document,
        NAME,
        messages,
        run_id=string(value.get("trajectory_id")) or string(value.get("session_id")),
        agent=string(get(value, "agent", "name")),
        model=string(get(value, "agent", "model_name")),
        tools_json=json_text(tools) if tools else None,
        parent_id=parent_id,
        parent_link="subagent" if parent_id else None,
    )
    runs = [run]
    for child in objects(value.get("subagent_trajectories") or [], "subagent_trajectories"):
        runs += _read_one(document, child, run.trajectory_id)
    return runs


def read(document: Document) -> list[Run]:
    runs = [run for value in dicts(document.records) for run in _read_one(document, value, None)]
    if not runs:
        raise SourceError("atif: no trajectory in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True, snapshots=True)
