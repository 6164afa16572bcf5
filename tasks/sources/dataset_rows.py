"""Rows of published data sets of coding-agent runs: SWE-smith, SWE-Gym (OpenHands), nebius (SWE-agent)."""

from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_list, build, dicts, get, json_text, objects, reported, spans, string
from tasks.sources.chat import looks_like_chat, read_message, read_messages
from tasks.sources.document import Document, SourceError, loads
from tasks.sources.draft import CharSpan, Message, Run
from tasks.sources.text_calls import XML_CALL, exit_code_failed, last_fence

_INVENTED_SUBMIT = "Since we have successfully fixed the issue and verified it works, let's submit the changes:"
"""What SWE-smith's exporter writes in place of the note that a cost limit was reached. No model said it."""


def _with_span(message: Message, found: tuple[CharSpan, ...]) -> Message:
    return replace(message, action_spans=found)


def _observed(messages: list[Message], *, user_observes: bool) -> list[Message]:
    """Results with what their exit code says; `user_observes`: user messages after the first turn are results too."""
    started = False
    read: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            started = True
        elif message.role == "tool":
            message = replace(message, failed=exit_code_failed(message.content))
        elif message.role == "user" and started and user_observes:
            message = replace(message, author="environment", failed=exit_code_failed(message.content))
        read.append(message)
    return read


def _messages_of(row: dict[str, Any]) -> list[Any]:
    messages = row.get("messages")
    if isinstance(messages, str):  # the released `tools` split stores the list as JSON text
        try:
            messages = loads(messages)
        except ValueError as error:
            raise SourceError("messages: a string that is no JSON") from error
    return as_list(messages, "messages")


# SWE-smith ------------------------------------------------------------------------------------------------------


def _detect_swe_smith(document: Document) -> bool:
    first = document.first
    if "instance_id" not in first:
        return False
    messages = first.get("messages")
    if isinstance(messages, str):
        return messages.lstrip().startswith("[{") and ("traj_id" in first or "resolved" in first)
    if not looks_like_chat(messages):
        return False
    return any(
        raw.get("role") == "assistant" and isinstance(raw.get("content"), str) and "<function=" in raw["content"]
        for raw in dicts(as_list(messages)[:8])
    )


def _read_swe_smith(document: Document) -> list[Run]:
    runs = []
    for row in dicts(document.records):
        messages = []
        for message in read_messages(_messages_of(row), user="harness"):
            if message.role == "assistant" and not message.tool_calls:
                invented = message.content.lstrip().startswith(_INVENTED_SUBMIT)
                author = "invented" if invented else "policy"
                message = replace(message, author=author, action_spans=spans(message.content, XML_CALL))
            messages.append(message)
        instance = string(row.get("instance_id")) or ""
        rollout = string(row.get("traj_id"))
        runs.append(
            build(
                document,
                "swe-smith",
                _observed(messages, user_observes=True),
                instance_id=instance or None,
                outcome=reported(row.get("resolved")),
                run_id=rollout.removeprefix(f"{instance}.") if rollout else None,
                agent="swe-agent",
                model=string(row.get("model")),
                # `patch` belongs to another repository than the instance in rows seen in the wild
            )
        )
    if not runs:
        raise SourceError("swe-smith: no row in the file")
    return runs


# SWE-Gym --------------------------------------------------------------------------------------------------------


def _detect_swe_gym(document: Document) -> bool:
    first = document.first
    return {"instance_id", "messages", "test_result"} <= first.keys() and looks_like_chat(first["messages"])


def _read_swe_gym(document: Document) -> list[Run]:
    runs = []
    for row in dicts(document.records):
        tools = row.get("tools")
        runs.append(
            build(
                document,
                "swe-gym",
                _observed(read_messages(_messages_of(row), user="harness"), user_observes=False),
                instance_id=string(row.get("instance_id")),
                outcome=reported(row.get("resolved")),
                run_id=string(row.get("run_id")),
                agent="openhands",
                tools_json=json_text(tools) if tools else None,
                patch=string(get(row, "test_result", "git_patch")),
            )
        )
    if not runs:
        raise SourceError("swe-gym: no row in the file")
    return runs


# nebius ---------------------------------------------------------------------------------------------------------


def _detect_nebius(document: Document) -> bool:
    first = document.first
    steps = first.get("trajectory")
    return "target" in first and isinstance(steps, list) and any("mask" in step for step in dicts(steps[:3]))


def _nebius_message(step: dict[str, Any], started: bool) -> Message:
    text = step.get("system_prompt") if step.get("text") is None else step["text"]
    message = read_message({"role": step.get("role"), "content": text}, user="environment" if started else "harness")
    if message.role != "assistant":
        return message
    author = "copied_context" if step.get("mask") is False else "policy"
    return replace(message, author=author, action_spans=last_fence(message.content))


def _read_nebius(document: Document) -> list[Run]:
    runs = []
    for row in dicts(document.records):
        messages: list[Message] = []
        for step in objects(row.get("trajectory"), "trajectory"):
            messages.append(_nebius_message(step, any(message.role == "assistant" for message in messages[:4])))
        runs.append(
            build(
                document,
                "nebius",
                messages,
                instance_id=string(row.get("instance_id")),
                outcome=reported(row.get("target")),
                agent="swe-agent",
                model=string(row.get("model_name")),
                exit_status=string(row.get("exit_status")),
                patch=string(row.get("generated_patch")),
            )
        )
    if not runs:
        raise SourceError("nebius: no row in the file")
    return runs


SWE_SMITH = Adapter("swe-smith", _detect_swe_smith, _read_swe_smith, by_record=True)
SWE_GYM = Adapter("swe-gym", _detect_swe_gym, _read_swe_gym, by_record=True)
NEBIUS = Adapter("nebius", _detect_nebius, _read_nebius, by_record=True)
