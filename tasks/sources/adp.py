"""ADP (Agent Data Protocol) standardised trajectories: `content[]` of actions and observations told by `class_`.

The converter ends runs with a `<finish>` sentence of its own and answers a submit with a made-up user line: the
sentence is marked invented, the line is context.
"""

import re
from typing import Any

from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, get, json_text, objects, reported, string, text_of, tool_call
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.text_calls import exit_code_failed

NAME = "adp"

_FINISH = re.compile(r"\s*<finish>.*</finish>\s*", re.DOTALL)
_CLASSES = ("api_action", "code_action", "message_action", "text_observation", "image_observation", "web_observation")


def detect(document: Document) -> bool:
    content = dicts(document.first.get("content"))
    return bool(content) and content[0].get("class_") in _CLASSES


def _turn(entry: dict[str, Any]) -> Message:
    kind, thought = entry["class_"], text_of(entry.get("description"))
    if kind == "message_action":
        text = text_of(entry.get("content"))
        author = "invented" if _FINISH.fullmatch(text) else "policy"
        return Message(role="assistant", author=author, content="\n\n".join(part for part in (thought, text) if part))
    if kind == "api_action":
        call = tool_call(entry.get("function"), entry.get("kwargs"))
    else:
        call = tool_call(entry.get("language"), {"code": entry.get("content")})
    return Message(role="assistant", author="policy", content=thought, tool_calls=(call,))


def _observation(entry: dict[str, Any], waiting: str | None, started: bool) -> Message:
    text = text_of(entry.get("content")) if entry["class_"] != "image_observation" else "[image]"
    if entry["class_"] == "web_observation":
        text = text_of(entry.get("axtree") or entry.get("html") or entry.get("content"))
    if waiting is not None:
        return Message(role="tool", author="environment", content=text, name=waiting, failed=exit_code_failed(text))
    from_user = entry.get("source") == "user"
    author = "harness" if not started else "human" if from_user else "environment"
    return Message(role="user", author=author, content=text)


def _read_run(document: Document, run: dict[str, Any]) -> Run:
    messages: list[Message] = []
    waiting: str | None = None  # the tool whose result comes next
    for entry in objects(run.get("content"), "content"):
        kind = entry.get("class_")
        if kind not in _CLASSES:
            raise SourceError(f"adp: unknown class_ {kind!r}")
        if kind.endswith("_action"):
            messages.append(_turn(entry))
            waiting = messages[-1].tool_calls[0].name if messages[-1].tool_calls else None
        else:
            messages.append(_observation(entry, waiting, bool(messages)))
            waiting = None
    details = run.get("details")
    tools = get(details, "tools")
    return build(
        document,
        NAME,
        messages,
        instance_id=string(run.get("id")) if "__" in str(run.get("id")) else None,
        outcome=reported(get(details, "resolved")),
        run_id=string(run.get("id")),
        tools_json=json_text(tools) if tools else None,
    )


def read(document: Document) -> list[Run]:
    runs = [_read_run(document, run) for run in dicts(document.records)]
    if not runs:
        raise SourceError("adp: no trajectory in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True)
