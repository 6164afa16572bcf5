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


def test_claude_code_compaction_starts_anew(renderer: Renderer) -> None:
    def line(kind: str, uuid: str, parent: str | None, text: str, **fields: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if kind == "assistant" else text
        message = {"role": kind, "content": content, "id": uuid}
        return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **fields}

    records = [
        line("user", "u1", None, "Fix it."),
        line("assistant", "a1", "u1", "looked"),
        line("user", "u2", None, "It looked before.", isCompactSummary=True),
        line("assistant", "a2", "u2", "edited"),
    ]
    runs = read(records, "claude-code")
    assert sorted(text.count("<|im_start|>assistant") for text in texts(runs, renderer)) == [1, 1]
    assert not any("looked<" in text and "edited" in text for text in texts(runs, renderer))
    assert scored(runs, renderer).count("edited") == scored(runs, renderer).count("looked") == 1
