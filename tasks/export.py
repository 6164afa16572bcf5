"""Trajectories to other tools' formats: ATIF documents, OpenAI chat rows, ShareGPT rows. Each can be ingested again.

What a format has no place for (who speaks, action spans, outcome, exact argument text) goes into a `traceforge` entry:
for each message just the fields that a plain reading of the export would get wrong. Reading it back gives the same run.
"""

import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import IO, Any, Literal

import orjson
from msgspec import to_builtins

from artifacts.tables import iter_rows, open_table
from schemas.refs import Ref
from schemas.trajectory import Message, ToolCall, Trajectory
from tasks.sources import atif, draft, openai_chat, sharegpt
from tasks.sources.base import METADATA_KEY, digest, json_text
from tasks.sources.document import loads
from tasks.sources.exported import SHOWN_KEY, shown_digest

Format = Literal["atif", "openai", "sharegpt"]

ATIF_VERSION = "ATIF-v1.6"
_PLAIN_NAME = re.compile(r"\w[\w-]{0,99}", re.ASCII)


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return loads(text)
    except ValueError:
        return None


def _metadata(trajectory: Trajectory, row: dict[str, Any], plain: list[draft.Message]) -> dict[str, Any]:
    """The run's own fields, and per message what a plain reading of the row gets wrong."""
    metadata = {**trajectory.model_dump(mode="json", exclude={"messages"}), SHOWN_KEY: shown_digest(row)}
    wanted = [message.model_dump(mode="json") for message in trajectory.messages]
    read = [to_builtins(message) for message in plain]
    if len(read) != len(wanted):
        return {**metadata, "messages": wanted, "whole": True}
    changes = [
        {name: value for name, value in right.items() if value != wrong[name]}
        for right, wrong in zip(wanted, read, strict=True)
    ]
    return {**metadata, "messages": changes, "whole": False}


# OpenAI ---------------------------------------------------------------------------------------------------------


def _openai_call(call: ToolCall) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return made if call.call_id is None else {"id": call.call_id, **made}


def _openai_message(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [_openai_call(call) for call in message.tool_calls]
    if message.role == "tool":
        row |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return row


def to_openai(trajectory: Trajectory) -> dict[str, Any]:
    """One OpenAI chat row: `messages`, `tools`, and `traceforge`."""
    row: dict[str, Any] = {"messages": [_openai_message(message) for message in trajectory.messages]}
    tools = _parsed(trajectory.tools_json)
    if tools:
        row["tools"] = tools
    return {**row, METADATA_KEY: _metadata(trajectory, row, openai_chat.plain_messages(row))}


# ShareGPT -------------------------------------------------------------------------------------------------------

_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def _sharegpt_value(message: Message) -> str:
    """Reasoning, text and calls in one string, in the notation of Hermes (`<think>`, `<tool_call>`)."""
    parts = [] if message.reasoning is None else [f"<think>\n{message.reasoning}\n</think>"]
    parts += [message.content] if message.content else []
    for call in message.tool_calls:
        arguments = call.arguments if isinstance(_parsed(call.arguments), dict) else json_text([call.arguments])[1:-1]
        parts.append(f'<tool_call>\n{{"name": {json_text([call.name])[1:-1]}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def to_sharegpt(trajectory: Trajectory) -> dict[str, Any]:
    """One ShareGPT row: `conversations` of from and value, `tools`, and `traceforge`."""
    row: dict[str, Any] = {
        "conversations": [
            {"from": _SPEAKERS[message.role], "value": _sharegpt_value(message)} for message in trajectory.messages
        ]
    }
    if trajectory.tools_json is not None:
        row["tools"] = trajectory.tools_json
    return {**row, METADATA_KEY: _metadata(trajectory, row, sharegpt.plain_messages(row))}


# ATIF -----------------------------------------------------------------------------------------------------------


def _atif_step(message: Message, step_id: int) -> dict[str, Any]:
    step: dict[str, Any] = {"step_id": step_id, "source": "agent", "message": message.content}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = []
        for number, call in enumerate(message.tool_calls, start=1):
            arguments = _parsed(call.arguments)
            step["tool_calls"].append(
                {
                    "tool_call_id": call.call_id or f"call_{step_id}_{number}",
                    "function_name": call.name,
                    "arguments": arguments if isinstance(arguments, dict) else {},
                }
            )
    if message.author == "copied_context":
        step["is_copied_context"] = True
    return step


def _atif_steps(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            if not steps or steps[-1]["source"] != "agent":  # a result without a turn before it
                steps.append({"step_id": len(steps) + 1, "source": "system", "message": ""})
            result = {"content": message.content}
            if message.tool_call_id:
                result["source_call_id"] = message.tool_call_id
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        elif message.role == "assistant":
            steps.append(_atif_step(message, len(steps) + 1))
        else:
            steps.append({"step_id": len(steps) + 1, "source": message.role, "message": message.content})
    return steps


def to_atif(trajectory: Trajectory) -> dict[str, Any]:
    """One ATIF document; what ATIF has no key for stands in `extra`."""
    agent: dict[str, Any] = {"name": trajectory.agent or "unknown", "version": "unknown"}
    if trajectory.model:
        agent["model_name"] = trajectory.model
    tools = _parsed(trajectory.tools_json)
    if isinstance(tools, list):
        agent["tool_definitions"] = tools
    value: dict[str, Any] = {
        "schema_version": ATIF_VERSION,
        "session_id": trajectory.run_id or trajectory.trajectory_id,
        "agent": agent,
        "steps": _atif_steps(trajectory.messages),
    }
    return {**value, "extra": {METADATA_KEY: _metadata(trajectory, value, atif.plain_messages(value))}}


EXPORTERS: dict[Format, Callable[[Trajectory], dict[str, Any]]] = {
    "atif": to_atif,
    "openai": to_openai,
    "sharegpt": to_sharegpt,
}


def trajectories_of(table: Ref | Path) -> Iterator[Trajectory]:
    """The rows of a trajectories table as trajectories, one in memory at a time."""
    for row in iter_rows(open_table(table)):
        yield Trajectory.model_validate(row)


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name once all of it is on disk: a failure leaves what was there before. Anything that is no
    regular file, such as a pipe, is written to directly.

    Raises:
        OSError: it cannot be written; it names `path`, also where the system names none.
    """
    path = path.resolve()  # through links: their target is replaced, not they
    direct = path.exists() and not path.is_file()
    temporary = path if direct else path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            if not direct:
                file.flush()
                os.fsync(file.fileno())
        if not direct:
            os.replace(temporary, path)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if not direct:
            with suppress(OSError):  # a disk that cannot be written says so of a file that is not there, too
                temporary.unlink()


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A folder that gets its name once everything lies in it.

    Raises:
        OSError: it cannot be written, or something lies in `path` already; it names `path`.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        os.replace(temporary, path)  # in place of an empty folder, too
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        rmtree(temporary, ignore_errors=True)


def _document_name(trajectory_id: str, taken: Counter[str]) -> str:
    """A file name of its own for each run, also where runs share an id (repeats that were kept) or where a log made up
    one that is no name.
    """
    name = trajectory_id if _PLAIN_NAME.fullmatch(trajectory_id) else digest(trajectory_id)
    taken[name] += 1
    return f"{name}.json" if taken[name] == 1 else f"{name}.{taken[name]}.json"


def export(table: Ref | Path, out: Path, target: Format) -> int:
    """Writes the runs of a table: `openai` and `sharegpt` as one JSON Lines file, `atif` as a folder of documents,
    which must be new or empty. All of it is written, or nothing.

    Returns:
        the number of runs written.

    Raises:
        ArtifactError: `table` is not a trajectories table.
        OSError: `out` cannot be written.
    """
    exporter = EXPORTERS[target]
    n_runs = 0
    if target == "atif":
        taken = Counter[str]()
        with _whole_folder(out) as folder:
            for trajectory in trajectories_of(table):
                document = orjson.dumps(exporter(trajectory))
                (folder / _document_name(trajectory.trajectory_id, taken)).write_bytes(document)
                n_runs += 1
        return n_runs
    out.parent.mkdir(parents=True, exist_ok=True)
    with _whole(out) as file:
        for trajectory in trajectories_of(table):
            file.write(orjson.dumps(exporter(trajectory)) + b"\n")
            n_runs += 1
    return n_runs
