"""Runs whose history was condensed on the way: each row is what the model saw, and each decision is scored once."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from render_inputs import family_tokenizer, make_renderer, scored_text

from schemas.config import RenderConfig
from schemas.trajectory import Trajectory
from tasks.branch_rows import opening_sha256
from tasks.renderer import Renderer, render_run
from tasks.sources import parse


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer(family_tokenizer("qwen3"))


def read(records: Sequence[dict[str, Any]], source_format: str) -> list[Trajectory]:
    runs = parse("\n".join(map(json.dumps, records)).encode(), "log.jsonl")
    assert {run.source_format for run in runs} == {source_format}
    return runs


def v0(number: int, command: str, response: str | None = None, n_calls: int = 1) -> list[dict[str, Any]]:
    """OpenHands V0: the calls of one response, and what each gave."""
    calls = [
        {
            "id": f"c{number + i}",
            "type": "function",
            "function": {"name": "run", "arguments": json.dumps({"command": f"{command}{i or ''}"})},
        }
        for i in range(n_calls)
    ]
    message = {"role": "assistant", "content": f"I {command}.", "tool_calls": calls}
    model_response = {"id": response or f"r{number}", "choices": [{"message": message}]}
    events = []
    for i, call in enumerate(calls):
        metadata = {"tool_call_id": call["id"], "function_name": "run", "model_response": model_response}
        args = {"command": command}
        events.append(
            {"id": number + i, "source": "agent", "action": "run", "args": args, "tool_call_metadata": metadata}
        )
    for i, call in enumerate(calls):
        metadata = {"tool_call_id": call["id"], "function_name": "run"}
        content = f"output of {command}{i or ''}"
        events.append(
            {
                "id": number + n_calls + i,
                "source": "agent",
                "observation": "run",
                "content": content,
                "extras": {},
                "tool_call_metadata": metadata,
            }
        )
    return events


def v0_condensation(number: int, summary: str | None, **forgotten: Any) -> dict[str, Any]:
    args = {"summary": summary, "summary_offset": 2, **forgotten}
    return {"id": number, "source": "agent", "action": "condensation", "args": args}


V0_OPENING = [
    {"id": 0, "source": "agent", "action": "system", "args": {"content": "You fix bugs."}},
    {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it."}},
]


def shown(run: Trajectory) -> list[tuple[str, str, str]]:
    return [(message.role, message.author, message.content) for message in run.messages]


def texts(runs: Sequence[Trajectory], renderer: Renderer) -> list[str]:
    return [render_run(run, renderer, RenderConfig()).rendering.text for run in runs]


def scored(runs: Sequence[Trajectory], renderer: Renderer) -> str:
    return "".join(scored_text(render_run(run, renderer, RenderConfig()), renderer) for run in runs)


@pytest.mark.parametrize(
    "forgotten",
    [{"forgotten_event_ids": [2, 3]}, {"forgotten_events_start_id": 2, "forgotten_events_end_id": 3}],
)
def test_openhands_v0(forgotten: dict[str, Any], renderer: Renderer) -> None:
    events = [
        *V0_OPENING,
        *v0(2, "look"),
        *v0(4, "read"),
        v0_condensation(6, "It looked.", **forgotten),
        *v0(7, "edit"),
    ]
    runs = first, second = read(events, "openhands")
    assert [content for *_, content in shown(first)][2:] == ["I look.", "output of look", "I read.", "output of read"]
    assert shown(second) == [
        ("system", "harness", "You fix bugs."),
        ("user", "human", "Fix it."),
        ("user", "copied_context", "It looked."),
        ("assistant", "copied_context", "I read."),
        ("tool", "environment", "output of read"),
        ("assistant", "policy", "I edit."),
        ("tool", "environment", "output of edit"),
    ]
    assert (second.parent_id, second.parent_link, second.task_id) == (
        first.trajectory_id,
        "continuation",
        first.task_id,
    )
    before, after = texts(runs, renderer)
    assert "output of edit" not in before
    assert "It looked." not in before
    assert "output of look" not in after
    for command in ("look", "read", "edit"):
        assert scored(runs, renderer).count(command) == 1  # each decision once, over both rows
    assert opening_sha256(first) != opening_sha256(second)


def test_a_second_condensation_takes_the_first_summary_away(renderer: Renderer) -> None:
    events = [
        *V0_OPENING,
        *v0(2, "look"),
        v0_condensation(4, "It looked.", forgotten_event_ids=[2, 3]),
        v0_condensation(5, "It looked well.", forgotten_event_ids=[2, 3]),  # nothing was decided in between
        *v0(6, "read"),
        v0_condensation(8, "It looked and read.", forgotten_event_ids=[6, 7]),
        *v0(9, "edit"),
    ]
    runs = read(events, "openhands")
    contents = [[content for *_, content in shown(run)][2:] for run in runs]
    assert contents == [
        ["I look.", "output of look"],
        ["It looked well.", "I read.", "output of read"],
        ["It looked and read.", "I edit.", "output of edit"],
    ]
    assert len({run.trajectory_id for run in runs}) == 3
    for command in ("look", "read", "edit"):
        assert scored(runs, renderer).count(command) == 1


def test_a_response_of_two_calls_goes_when_all_of_it_is_forgotten() -> None:
    events = [*V0_OPENING, *v0(2, "look", n_calls=2)]
    for forgotten, n_turns in (([2, 4], 1), ([2, 3, 4, 5], 0)):
        condensation = v0_condensation(6, "", forgotten_event_ids=forgotten)
        runs = read([*events, condensation, *v0(7, "edit")], "openhands")
        assert [message.content for message in runs[1].messages].count("I look.") == n_turns


def test_openhands_rows_hand_their_outcome_to_every_part() -> None:
    history = [*V0_OPENING, *v0(2, "look"), v0_condensation(4, "s", forgotten_event_ids=[2, 3]), *v0(5, "edit")]
    row = {"instance_id": "a__b-1", "history": history, "test_result": {"report": {"resolved": True}}}
    runs = read([row], "openhands-eval")
    assert [(run.outcome.status, run.task_id, run.repo) for run in runs] == [("resolved", runs[0].task_id, "a/b")] * 2


def sdk(number: int, command: str) -> list[dict[str, Any]]:
    call = {"name": "run", "arguments": json.dumps({"command": command})}
    return [
        {
            "kind": "ActionEvent",
            "id": f"e{number}",
            "thought": [{"type": "text", "text": f"I {command}."}],
            "tool_name": "run",
            "tool_call_id": f"c{number}",
            "tool_call": call,
            "llm_response_id": f"r{number}",
        },
        {
            "kind": "ObservationEvent",
            "id": f"e{number + 1}",
            "tool_call_id": f"c{number}",
            "tool_name": "run",
            "observation": {"content": [{"type": "text", "text": f"output of {command}"}], "is_error": False},
        },
    ]


def test_openhands_sdk(renderer: Renderer) -> None:
    opening = {"role": "user", "content": [{"type": "text", "text": "Fix it."}]}
    events = [
        {"kind": "SystemPromptEvent", "id": "s", "system_prompt": {"type": "text", "text": "You fix bugs."}},
        {"kind": "MessageEvent", "id": "u", "source": "user", "llm_message": opening},
        *sdk(1, "look"),
        *sdk(3, "read"),
        {"kind": "Condensation", "id": "x", "forgotten_event_ids": ["e1", "e2"], "summary": "It looked."},
        *sdk(5, "edit"),
    ]
    runs = first, second = read(events, "openhands-sdk")
    assert [message.content for message in second.messages] == [
        *("You fix bugs.", "Fix it.", "It looked.", "I read.", "output of read", "I edit.", "output of edit")
    ]
    assert (first.n_turns, second.n_turns, second.parent_link) == (2, 1, "continuation")
    for command in ("look", "read", "edit"):
        assert scored(runs, renderer).count(command) == 1


def claude(kind: str, uuid: str, parent: str | None, text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}] if kind == "assistant" else text
    message = {"role": kind, "content": content, "id": uuid}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **fields}


def boundary(uuid: str, after: str) -> dict[str, Any]:
    """The line that Claude Code writes where it compacts: a root, whose logical parent is the last line before."""
    fields = {"type": "system", "subtype": "compact_boundary", "content": "Conversation compacted", "sessionId": "s"}
    return {**fields, "uuid": uuid, "parentUuid": None, "logicalParentUuid": after}


BEFORE = [claude("user", "u1", None, "Fix it."), claude("assistant", "a1", "u1", "looked")]
AFTER = [
    boundary("b1", "a1"),
    claude("user", "u2", "b1", "It looked before.", isCompactSummary=True),
    claude("user", "u3", "u2", "Go on."),
    claude("assistant", "a2", "u3", "edited"),
]


def test_claude_code_compaction_starts_anew(renderer: Renderer) -> None:
    runs = read([*BEFORE, *AFTER], "claude-code")
    assert sorted(text.count("<|im_start|>assistant") for text in texts(runs, renderer)) == [1, 1]
    assert not any("looked<" in text and "edited" in text for text in texts(runs, renderer))
    assert scored(runs, renderer).count("edited") == scored(runs, renderer).count("looked") == 1
    first, second = runs
    assert [message.content for message in second.messages] == ["It looked before.", "Go on.", "edited"]
    assert (first.parent_id, first.parent_link) == (None, None)
    assert (second.parent_id, second.parent_link) == (first.trajectory_id, "continuation")
    assert second.task_id == first.task_id
    assert opening_sha256(first) != opening_sha256(second)


def test_claude_code_session_keeps_its_name_when_it_is_compacted() -> None:
    (earlier,) = read(BEFORE, "claude-code")
    first, _ = read([*BEFORE, *AFTER], "claude-code")
    assert first.trajectory_id == earlier.trajectory_id  # the same run, not one with fewer messages in its place


@pytest.mark.parametrize(
    "summary",
    [
        [claude("user", "u2", "a1", "Summary.", isCompactSummary=True)],  # hangs on what it sums up
        [boundary("b1", "a1"), claude("user", "u2", "b1", "Summary.")],  # not marked itself
        [
            boundary("b1", "a1"),
            {"type": "attachment", "uuid": "x", "parentUuid": "b1", "sessionId": "s"},
            claude("user", "u2", "x", "Summary."),
        ],
        [{**boundary("b1", "a1"), "parentUuid": "a1"}, claude("user", "u2", "b1", "Summary.")],
    ],
)
def test_claude_code_compaction_is_told_by_any_of_its_marks(summary: list[dict[str, Any]]) -> None:
    first, second = read([*BEFORE, *summary, claude("assistant", "a2", "u2", "edited")], "claude-code")
    assert [message.content for message in second.messages] == ["Summary.", "edited"]
    assert (second.parent_id, second.parent_link) == (first.trajectory_id, "continuation")


def test_claude_code_compacted_twice_and_edited_in_between() -> None:
    edited = [claude("user", "u4", "u2", "Do that."), claude("assistant", "a4", "u4", "did")]
    last = [boundary("b2", "a4"), claude("user", "u5", "b2", "It did."), claude("assistant", "a5", "u5", "ended")]
    first, second, fork, third = read([*BEFORE, *AFTER, *edited, *last], "claude-code")
    links = [(run.parent_id, run.parent_link) for run in (first, second, fork, third)]
    name, second_name = first.trajectory_id, second.trajectory_id
    assert links == [(None, None), (name, "continuation"), (second_name, "fork"), (second_name, "continuation")]
    assert [run.messages[-1].content for run in (first, second, fork, third)] == ["looked", "did", "edited", "ended"]


def test_claude_code_file_that_begins_with_a_summary_goes_on_from_another() -> None:
    (run,) = read(AFTER, "claude-code")
    assert (run.parent_id, run.parent_link) == (None, "continuation")
