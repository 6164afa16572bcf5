"""Runs while they are read: the fields of `schemas.trajectory`, built without being checked one by one.

A log of 5 GB holds some millions of messages, and a pydantic model of each costs as much as parsing the file. So
adapters build these, and a run is checked as a whole.
"""

from typing import Any, get_args

import msgspec

from schemas.trajectory import Author, Outcome, Role, Trajectory


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """`schemas.trajectory.ToolCall`"""

    name: str
    arguments: str
    call_id: str | None = None


class CharSpan(msgspec.Struct, frozen=True, gc=False):
    """`schemas.trajectory.CharSpan`"""

    start: int
    end: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """`schemas.trajectory.Message`"""

    role: Role
    author: Author
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    action_spans: tuple[CharSpan, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    failed: bool | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`schemas.trajectory.Trajectory`"""

    trajectory_id: str
    task_id: str
    source_format: str
    source_path: str
    source_blake3: str
    messages: tuple[Message, ...]
    outcome: Outcome = Outcome()
    repo: str | None = None
    run_id: str | None = None
    agent: str | None = None
    model: str | None = None
    tools_json: str | None = None
    exit_status: str | None = None
    patch: str | None = None
    parent_id: str | None = None
    parent_link: str | None = None


def to_trajectory(run: Run) -> Trajectory:
    """The run as its public type.

    Raises:
        pydantic.ValidationError: a field holds what it must not.
    """
    return Trajectory.model_validate(run, from_attributes=True)


def from_trajectory(trajectory: Trajectory) -> Run:
    """The other way round."""
    messages = msgspec.convert([message.model_dump() for message in trajectory.messages], tuple[Message, ...])
    fields = {name: value for name, value in trajectory if name != "messages"}
    return Run(messages=messages, **fields)


# checks ---------------------------------------------------------------------------------------------------------

_ROLES, _AUTHORS = frozenset(get_args(Role)), frozenset(get_args(Author))
_FLAG_OR_NONE = frozenset((bool, type(None)))


def _are_texts(values: list[Any]) -> bool:
    """Whether all are strings without a lone surrogate, which no UTF-8 text can hold."""
    try:
        return all(map(str.isascii, values)) or bool("".join(values).encode())
    except (TypeError, UnicodeEncodeError):
        return False


def is_sound(run: Run) -> bool:
    """Whether `to_trajectory` would take the run: the same rules, at a tenth of the time."""
    messages = run.messages
    calls = [call for message in messages for call in message.tool_calls]
    texts = [message.content for message in messages]
    texts += [call.arguments for call in calls]
    texts += [call.name for call in calls]
    texts += (run.trajectory_id, run.task_id, run.source_format, run.source_path, run.source_blake3)
    optional = [message.reasoning for message in messages]
    optional += [message.tool_call_id for message in messages]
    optional += [message.name for message in messages]
    optional += [call.call_id for call in calls]
    optional += (run.repo, run.run_id, run.agent, run.model, run.tools_json, run.exit_status, run.patch, run.parent_id)
    texts += [text for text in optional if text is not None]
    return (
        _ROLES.issuperset([message.role for message in messages])
        and _AUTHORS.issuperset([message.author for message in messages])
        and _are_texts(texts)
        and _FLAG_OR_NONE.issuperset([type(message.failed) for message in messages])
        and run.parent_link in (None, "subagent", "fork", "continuation")
        and not [message for message in messages if message.role != "assistant" and _is_turn(message)]
        and all(_fits_content(message) for message in messages if message.action_spans)
    )


def _is_turn(message: Message) -> bool:
    return bool(message.tool_calls or message.action_spans) or message.reasoning is not None


def _fits_content(message: Message) -> bool:
    return all(0 <= span.start < span.end <= len(message.content) for span in message.action_spans)
