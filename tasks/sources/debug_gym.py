"""debug-gym: one JSON object a run with `problem` and `log[]`; `prompt_response_pairs` repeats the prompt each step."""

from typing import Any

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, dicts, get, json_text, objects, reported, string, text_of, tool_call
from tasks.sources.chat import read_messages
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.strict import known, text_or_none

NAME = "debug-gym"

_STEP_KEYS = ("action", "obs", "content", "prompt_response_pairs")


def detect(document: Document) -> bool:
    first = document.first
    return {"problem", "log"} <= first.keys() and isinstance(first["log"], list)


def _opening(log: list[dict[str, Any]]) -> list[Message]:
    """System and task message, as the first prompt shows them; the first observation where no prompt is kept."""
    for step in log:
        for pair in dicts(step.get("prompt_response_pairs")):
            prompt = pair.get("prompt")
            if isinstance(prompt, list):
                shown = read_messages(prompt, user="harness")
                turns = [index for index, message in enumerate(shown) if message.role == "assistant"]
                return shown[: turns[0]] if turns else shown
    text = text_of(log[0].get("obs")) if log else ""
    return [Message(role="user", author="harness", content=text)] if text else []


def _step(step: dict[str, Any]) -> list[Message]:
    action = known(step, "log", _STEP_KEYS).get("action")
    responses = [pair.get("response") for pair in objects(step.get("prompt_response_pairs") or [], "responses")]
    content = text_of(step.get("content")) if "content" in step else text_of(next(iter(responses), None))
    if action is None and not content:
        return []
    calls = ()
    if action is not None:
        action = as_dict(action, "action")
        calls = (tool_call(action.get("name"), action.get("arguments"), action.get("id")),)
    turn = Message(
        role="assistant",
        author="policy",
        content=content,
        reasoning=text_or_none(step.get("reasoning")),
        tool_calls=calls,
    )
    call_id, name = string(get(action, "id")), string(get(action, "name"))
    observed = Message(
        role="tool", author="environment", content=text_of(step.get("obs")), tool_call_id=call_id, name=name
    )
    return [turn, observed]


def _read_run(document: Document, run: dict[str, Any]) -> Run:
    log = objects(run.get("log"), "log")
    messages = _opening(log)
    for step in log:
        messages += _step(step)
    tools = run.get("tools")
    return build(
        document,
        NAME,
        messages,
        task_id=f"debug-gym/{problem}" if (problem := string(run.get("problem"))) else None,
        outcome=reported(run.get("success")),
        run_id=string(run.get("uuid")),
        agent=NAME,
        tools_json=json_text(tools) if tools else None,
    )


def read(document: Document) -> list[Run]:
    runs = [_read_run(document, run) for run in dicts(document.records)]
    if not runs:
        raise SourceError("debug-gym: no run in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True)
