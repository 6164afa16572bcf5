"""SWE-agent `.traj` files and demonstration files (JSON or YAML).

`history` holds the conversation once; `trajectory[].messages` and `.query` repeat it at every step and are not read.
`trajectory[].action` is the parsed command, not what the model wrote, so the span is found in the content.
Turns that no model wrote are context: pasted demonstrations, demonstration files, replays (the log counts no received
token), and the note that the program itself leaves when a limit is reached.
"""

from typing import Any

from msgspec.structs import replace

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, get, objects, spans, string
from tasks.sources.chat import read_message
from tasks.sources.document import Document, SourceError, loads
from tasks.sources.draft import CharSpan, Message, Run
from tasks.sources.text_calls import COMMAND_TAG, XML_CALL, last_fence

NAME = "swe-agent"

_EXIT_NOTE = "Exit due to "


def detect(document: Document) -> bool:
    first = document.first
    history = first.get("history")
    if not isinstance(history, list) or not history or not isinstance(history[0], dict):
        return False
    marks = any(key in entry for entry in dicts(history[:4]) for key in ("agent", "message_type", "thought"))
    return "role" in history[0] and marks


def _text_spans(content: str, action: str) -> tuple[CharSpan, ...]:
    marked = spans(content, COMMAND_TAG) or spans(content, XML_CALL) or last_fence(content)
    if marked or not action.strip() or action.strip() not in content:
        return marked
    start = content.rindex(action.strip())
    return (CharSpan(start=start, end=start + len(action.strip())),)


def _turn(raw: dict[str, Any], author: Author) -> Message:
    message = replace(read_message(raw), author=author)
    if message.tool_calls:
        return message
    return replace(message, action_spans=_text_spans(message.content, str(raw.get("action") or "")))


def _replay_config(run: dict[str, Any]) -> Any:
    config = run.get("replay_config")
    if isinstance(config, str):
        try:
            return loads(config)
        except ValueError as error:
            raise SourceError("swe-agent: replay_config is no JSON") from error
    return config


def _is_demonstration(run: dict[str, Any], config: Any) -> bool:
    if not isinstance(run.get("trajectory"), list):  # hand-cut demonstrations hold the history only
        return True
    if get(config, "agent", "model", "name") in ("replay", "human", "human_thought"):
        return True
    return get(run, "info", "model_stats", "tokens_received") == 0


def _read_run(document: Document, run: dict[str, Any]) -> Run:
    config = _replay_config(run)
    history = objects(run.get("history"), "history")
    turn_author: Author = "demonstration" if _is_demonstration(run, config) else "policy"
    turns = (raw for raw in history if raw.get("role") == "assistant" and not raw.get("is_demo"))
    main_agent = next((turn.get("agent") for turn in turns), None)
    messages: list[Message] = []
    started = False
    for raw in history:
        if raw.get("role") == "assistant":
            author = turn_author
            if raw.get("is_demo"):
                author = "demonstration"
            elif str(raw.get("content")).startswith(_EXIT_NOTE):
                author = "invented"
            elif raw.get("agent") != main_agent:
                author = "other_agent"
            messages.append(_turn(raw, author))
            continue
        message = read_message(raw, user="environment" if started else "harness")
        ids = raw.get("tool_call_ids")
        if raw.get("is_demo"):
            message = replace(message, author="demonstration")
        elif message.role == "user":
            started = True  # the first user message that is no demonstration is the task
        if message.role == "tool" and isinstance(ids, list) and ids:
            message = replace(message, tool_call_id=string(ids[0]))
        messages.append(message)
    environment = string(run.get("environment"))
    return build(
        document,
        NAME,
        messages,
        instance_id=environment if environment and "__" in environment else None,
        agent=NAME,
        model=string(get(config, "agent", "model", "name")),
        exit_status=string(get(run, "info", "exit_status")),
        patch=string(get(run, "info", "submission")),
    )


def read(document: Document) -> list[Run]:
    runs = dicts(document.records)
    if not runs:
        raise SourceError("swe-agent: no run in the file")
    return [_read_run(document, run) for run in runs]


ADAPTER = Adapter(NAME, detect, read, by_record=True)
