"""Claude Code sessions whose lines are out of order, written twice, without ids, or not what a user said."""

import itertools
import json
from typing import Any

import pytest

from schemas.trajectory import Message
from tasks.sources import SourceError
from tasks.sources.claude_code import ADAPTER


def line(kind: str, uuid: str | None, parent: str | None, content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **({"id": fields.pop("id")} if "id" in fields else {})}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(call_id: str | None, command: str = "ls") -> dict[str, Any]:
    block = {"type": "tool_use", "name": "Bash", "input": {"command": command}}
    return block if call_id is None else {**block, "id": call_id}


def result(call_id: str, content: str = "seen") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def read(lines: list[dict[str, Any]]) -> list[Message]:
    (run,) = ADAPTER.parse("\n".join(map(json.dumps, lines)).encode())
    return list(run.messages)


def told(lines: list[dict[str, Any]]) -> list[str]:
    """What each message says, calls after the text."""
    return [
        " ".join(filter(None, [message.content, *(call.arguments for call in message.tool_calls)]))
        for message in read(lines)
    ]


SESSION = [
    line("user", "u", None, "go"),
    line("assistant", "a1", "u", [text("look")], id="m1"),
    line("assistant", "a2", "a1", [use("c")], id="m1"),
    line("user", "r", "a2", [result("c")]),
    line("assistant", "b", "r", [text("done")], id="m2"),
]
SAID = ["go", 'look {"command": "ls"}', "seen", "done"]


def test_lines_in_any_order_are_one_run() -> None:
    assert all(told(list(lines)) == SAID for lines in itertools.permutations(SESSION))


@pytest.mark.parametrize("repeated", range(len(SESSION)))
def test_a_line_that_was_written_twice_is_one(repeated: int) -> None:
    assert told([*SESSION, SESSION[repeated]]) == SAID
    assert told([*SESSION[: repeated + 1], *SESSION[repeated:]]) == SAID


def test_a_line_that_was_written_again_is_the_later_one() -> None:
    partial = line("assistant", "a1", "u", [text("lo")], id="m1")
    assert told([SESSION[0], partial, *SESSION[1:]]) == SAID
    early = line("user", "r", "a2", [result("c", "se")])
    assert told([*SESSION[:3], early, *SESSION[3:]]) == SAID
    again = line("user", "r2", "a2", [result("c")])  # the same result under a name of its own
    assert told([*SESSION[:4], again, *SESSION[4:]]) == SAID


def test_blocks_of_one_line_are_no_repeats_of_each_other() -> None:
    blocks = [text("look"), use(None, "a"), use(None, "b"), use(None, "b"), text("look again")]
    turn = read([SESSION[0], line("assistant", "a", "u", blocks)])[1]
    assert turn.content == "look\nlook again"
    assert [json.loads(call.arguments)["command"] for call in turn.tool_calls] == ["a", "b", "b"]


@pytest.mark.parametrize("prompt", ["stop", [text("stop")]])
def test_what_the_user_typed_meanwhile_is_said(prompt: Any) -> None:
    queued: dict[str, Any] = {"type": "attachment", "uuid": "q", "parentUuid": "r", "sessionId": "s"}
    queued["attachment"] = {"type": "queued_command", "prompt": prompt}
    found = read([*SESSION[:4], queued, {**SESSION[4], "parentUuid": "q"}])
    assert [(message.author, message.content) for message in found[3:]] == [("human", "stop"), ("policy", "done")]


def test_lines_without_ids_follow_the_one_before() -> None:
    lines = [{**each, "uuid": None, "parentUuid": None} for each in SESSION]
    assert told([SESSION[0], *lines[1:]]) == SAID
    one = line("user", None, "r", "wait")
    assert told([*SESSION[:4], one, SESSION[4]]) == [*SAID[:3], "wait", SAID[3]]


@pytest.mark.parametrize(
    ("content", "author"),
    [
        ("<task-notification>built</task-notification>", "environment"),
        ("<user-prompt-submit-hook>note</user-prompt-submit-hook>", "harness"),
        ("Stop hook feedback:\nrun the tests", "harness"),
        ("This session is being continued from a previous conversation that ran out of context.", "copied_context"),
        ("<task>fix it</task>", "human"),
        ("Stop the hook", "human"),
    ],
)
def test_only_what_a_human_said_is_human(content: str, author: str) -> None:
    assert read([*SESSION, line("user", "n", "b", content)])[-1].author == author


@pytest.mark.parametrize("message", ["more", [text("more")], {"content": "more"}, {"content": text("more")}])
@pytest.mark.parametrize("kind", ["user", "assistant"])
def test_messages_of_another_type_are_kept(kind: str, message: Any) -> None:
    assert told([*SESSION, {**line(kind, "n", "b", None), "message": message}])[-1] == "more"


@pytest.mark.parametrize("message", [None, 7, [{"role": "user", "content": "more"}], {"new": "more"}])
def test_a_line_whose_message_cannot_be_read_is_told(message: Any) -> None:
    with pytest.raises(SourceError, match="message: "):
        read([*SESSION, {**line("user", "n", "b", None), "message": message}])
