"""Shapes that no shared file has, and pitfalls that one of them could not show."""

import json
from typing import Any

import pytest

from schemas.trajectory import Trajectory
from tasks.sources import BY_NAME, SourceError, find_adapter, parse, read_document


def read(value: Any, expected_format: str | None = None) -> list[Trajectory]:
    lines = isinstance(value, list) and expected_format in ("claude-code", "codex", "codex-exec")
    data = "\n".join(map(json.dumps, value)) if lines else json.dumps(value)
    document = read_document(data.encode(), "renamed.dat")
    if expected_format is not None:
        assert find_adapter(document).name == expected_format
    return parse(data.encode())


def shape(run: Trajectory) -> list[tuple[str, str, int]]:
    """(role, author, number of calls) of each message."""
    return [(m.role, m.author, len(m.tool_calls) + len(m.action_spans)) for m in run.messages]


def mini(*messages: dict[str, Any]) -> dict[str, Any]:
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "t"}]
    return {"trajectory_format": "mini-swe-agent-1.1", "info": {}, "messages": [*opening, *messages]}


def test_mini_swe_agent_responses_api() -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "think"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "name": "bash", "arguments": '{"command":"ls"}', "call_id": "c1"},
    ]
    (run,) = read(
        mini(
            {"object": "response", "output": output, "extra": {"actions": [{"command": "ls", "tool_call_id": "c1"}]}},
            {"type": "function_call_output", "call_id": "c1", "output": "<returncode>1</returncode>\nx"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "format error"}]},
        ),
        "mini-swe-agent",
    )
    turn, result, note = run.messages[2:]
    assert (turn.content, turn.reasoning, turn.tool_calls[0].arguments) == ("look", "think", '{"command":"ls"}')
    assert (result.role, result.tool_call_id, result.failed) == ("tool", "c1", True)
    assert (note.role, note.author, note.content) == ("user", "environment", "format error")


def test_mini_swe_agent_actions_with_a_function() -> None:
    actions = [{"function": {"name": "pdb", "arguments": '{"command": "b 3"}'}, "tool_call_id": "c1"}]
    (run,) = read(mini({"role": "assistant", "content": "stop there", "extra": {"actions": actions}}))
    (call,) = run.messages[2].tool_calls
    assert (call.name, call.arguments, call.call_id) == ("pdb", '{"command": "b 3"}', "c1")


def test_mini_swe_agent_text_action_is_marked_where_it_stands() -> None:
    content = "Look:\n\n```mswea_bash_command\ncat <<'E'\n```\nE\n```\n\nthen more ```bash\nno\n```"
    (run,) = read(mini({"role": "assistant", "content": content, "extra": {"actions": [{"command": "cat <<'E'"}]}}))
    message = run.messages[2]
    (span,) = message.action_spans
    assert message.content == content
    assert message.content[span.start : span.end].startswith("```mswea_bash_command\ncat")
    assert not message.tool_calls


def test_exit_role_is_no_message() -> None:
    exit_message = {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted", "submission": "diff"}}
    (run,) = read(mini({"role": "assistant", "content": "x"}, exit_message))
    assert [message.role for message in run.messages] == ["system", "user", "assistant"]
    assert run.exit_status == "Submitted"
    assert run.outcome.status == "unknown"


def test_swe_agent_demonstrations_notes_and_other_agents_are_context() -> None:
    def entry(role: str, content: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": content, "agent": "main", **fields}

    history = [
        entry("system", "s"),
        entry("assistant", "old\n```\nls\n```", is_demo=True),
        entry("user", "ISSUE:\nbug\n\nINSTRUCTIONS: go"),
        entry("assistant", "new\n```\nls -a\n```"),
        entry("user", "a b"),
        entry("assistant", "review", agent="reviewer"),
        entry("assistant", "Exit due to cost limit", action="submit"),
    ]
    run = {"history": history, "trajectory": [], "info": {"model_stats": {"tokens_received": 9}}}
    (found,) = read(run, "swe-agent")
    authors = [message.author for message in found.messages]
    assert authors == ["harness", "demonstration", "harness", "policy", "environment", "other_agent", "invented"]
    assert found.n_turns == 1


def test_swe_smith_exporter_sentence_is_invented() -> None:
    invented = (
        "Since we have successfully fixed the issue and verified it works, let's submit the changes:\n\n"
        "<function=submit>\n</function>"
    )
    messages = [{"role": "user", "content": "t"}, {"role": "assistant", "content": "a\n\n<function=bash>\n</function>"}]
    messages += [{"role": "user", "content": "OBSERVATION:\nok"}, {"role": "assistant", "content": invented}]
    row = {"instance_id": "o__r.1234abcd.x__y", "messages": json.dumps(messages), "resolved": True, "traj_id": "t"}
    (run,) = read(row, "swe-smith")
    assert [message.author for message in run.messages] == ["harness", "policy", "environment", "invented"]


def line(kind: str, uuid: str, parent: str | None, content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **({"id": fields.pop("id")} if "id" in fields else {})}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **fields}


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": {"command": call_id}}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": call_id}


def test_claude_code_parallel_calls_are_no_fork() -> None:
    (run,) = read(
        [
            line("user", "u", None, "go"),
            line("assistant", "a1", "u", [use("c1")], id="m1"),
            line("user", "r1", "a1", [result("c1")]),
            line("assistant", "a2", "a1", [use("c2")], id="m1"),
            line("user", "r2", "a2", [result("c2")]),
            line("assistant", "b", "r2", [{"type": "text", "text": "done"}], id="m2"),
        ],
        "claude-code",
    )
    assert [message.role for message in run.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert len(run.messages[1].tool_calls) == 2


def test_claude_code_repeated_and_partial_blocks_are_merged() -> None:
    (run,) = read(
        [
            line("user", "u", None, "go"),
            line("assistant", "a1", "u", [{"type": "text", "text": "I wi"}], id="m1"),
            line("assistant", "a2", "a1", [{"type": "text", "text": "I will"}, use("c1")], id="m1"),
            line("assistant", "a3", "a2", [use("c1")], id="m1"),
        ],
        "claude-code",
    )
    turn = run.messages[1]
    assert (turn.content, len(turn.tool_calls)) == ("I will", 1)


def test_claude_code_forks_share_their_opening_as_copied_context() -> None:
    records = [
        line("user", "u", None, "go"),
        line("assistant", "a", "u", [{"type": "text", "text": "shared"}], id="m1"),
        line("user", "v1", "a", "first try"),
        line("assistant", "b1", "v1", [{"type": "text", "text": "old"}], id="m2"),
        line("user", "v2", "a", "second try"),
        line("assistant", "b2", "v2", [{"type": "text", "text": "new"}], id="m3"),
    ]
    main, fork = read(records, "claude-code")
    assert [message.content for message in main.messages] == ["go", "shared", "second try", "new"]
    assert [message.content for message in fork.messages] == ["go", "shared", "first try", "old"]
    assert (main.n_turns, fork.n_turns) == (2, 1)
    assert (fork.parent_id, fork.parent_link) == (main.trajectory_id, "fork")


def test_claude_code_subagents_name_their_session() -> None:
    (main,) = read([line("user", "u", None, "go"), line("assistant", "a", "u", "hi", id="m1")], "claude-code")
    side = [
        line("user", "x", None, "sub task", isSidechain=True, agentId="7"),
        line("assistant", "y", "x", "done", id="m9", isSidechain=True, agentId="7"),
    ]
    (child,) = read(side, "claude-code")
    assert (child.parent_id, child.parent_link) == (main.trajectory_id, "subagent")
    assert child.messages[0].author == "harness"


def test_codex_compaction_starts_a_continuation() -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"type": "response_item", "payload": payload}

    def said(role: str, text: str) -> dict[str, Any]:
        return item(type="message", role=role, content=[{"type": "text", "text": text}])

    first, second = read(
        [
            {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "sys"}}},
            said("user", "go"),
            said("assistant", "one"),
            {"type": "compacted", "payload": {"message": "summary of one"}},
            said("user", "more"),
            said("assistant", "two"),
        ],
        "codex",
    )
    assert first.n_turns == second.n_turns == 1
    assert [message.content for message in second.messages] == ["sys", "summary of one", "more", "two"]
    assert (second.parent_id, second.parent_link) == (first.trajectory_id, "continuation")
    assert second.task_id == first.task_id


def test_codex_started_and_completed_are_one_action() -> None:
    started = {
        "id": "i1",
        "type": "command_execution",
        "command": "ls",
        "aggregated_output": "",
        "status": "in_progress",
    }
    completed = {**started, "aggregated_output": "x", "exit_code": 1, "status": "failed"}
    (run,) = read(
        [
            {"type": "thread.started", "thread_id": "t"},
            {"type": "item.started", "item": started},
            {"type": "item.completed", "item": completed},
            {"type": "item.started", "item": {**started, "id": "i2"}},
        ],
        "codex-exec",
    )
    assert [message.role for message in run.messages] == ["assistant", "tool", "assistant"]
    assert run.messages[1].failed is True


def test_atif_copied_context_dispatches_and_subagents() -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "t"},
        {"step_id": 2, "source": "agent", "message": "old", "is_copied_context": True},
        {"step_id": 3, "source": "agent", "message": "auto", "llm_call_count": 0},
        {"step_id": 4, "source": "agent", "message": "new"},
    ]
    child = {"schema_version": "ATIF-v1.7", "agent": {"name": "c"}, "steps": [steps[0], steps[3]]}
    run = {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": steps, "subagent_trajectories": [child]}
    main, sub = read(run, "atif")
    assert [message.author for message in main.messages] == ["harness", "copied_context", "invented", "policy"]
    assert (sub.parent_id, sub.parent_link) == (main.trajectory_id, "subagent")


def test_moatless_tree_with_two_leaves() -> None:
    def node(number: int, parent: int | None, **fields: Any) -> dict[str, Any]:
        return {"node_id": number, "parent_id": parent, **fields}

    def act(text: str) -> dict[str, Any]:
        return {
            "action": {"scratch_pad": text, "x": 1, "action_args_class": "m.FindArgs"},
            "observation": {"message": "o"},
        }

    tree = {
        "nodes": [node(0, None, message="t"), node(1, 0, **act("a")), node(2, 1, **act("b")), node(3, 1, **act("c"))]
    }
    first, second = read(tree, "moatless")
    assert [message.content for message in first.messages] == ["t", "a", "o", "b", "o"]
    assert [message.author for message in second.messages if message.role == "assistant"] == [
        "copied_context",
        "policy",
    ]
    assert second.parent_id == first.trajectory_id


def test_openhands_response_with_several_calls_is_one_turn() -> None:
    calls = [{"id": f"c{n}", "function": {"name": "run", "arguments": f'{{"n":{n}}}'}} for n in range(2)]
    response = {"id": "r1", "choices": [{"message": {"role": "assistant", "content": "both", "tool_calls": calls}}]}

    def event(number: int, call: str, **fields: Any) -> dict[str, Any]:
        metadata = {"tool_call_id": call, "function_name": "run", "model_response": response}
        return {"id": number, "source": "agent", "tool_call_metadata": metadata, **fields}

    (run,) = read(
        [
            {"id": 0, "source": "user", "action": "message", "args": {"content": "go"}},
            event(1, "c0", action="run", args={"command": "a"}),
            event(2, "c0", observation="run", content="A", extras={"metadata": {"exit_code": 2}}),
            event(3, "c1", action="run", args={"command": "b"}),
            event(4, "c1", observation="run", content="B"),
        ],
        "openhands",
    )
    opening, *results = shape(run)[1:]
    assert opening == ("assistant", "policy", 2)
    assert results == [("tool", "environment", 0)] * 2
    assert run.messages[2].failed is True


@pytest.mark.parametrize(
    "event",
    [
        {"id": 3, "source": "agent", "action": "run", "args": {"command": "ls"}},
        {"kind": "ActionEvent", "tool_name": "terminal", "thought": []},
    ],
)
def test_one_event_alone_is_no_run(event: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="session store"):
        read(event)


def test_sharegpt_from_and_value() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "x <execute>ls</execute>"},
    ]
    (run,) = read({"conversations": turns}, "sharegpt")
    assert [role for role, _, _ in shape(run)] == ["system", "user", "assistant", "tool", "assistant"]
    assert [n for _, _, n in shape(run)] == [0, 0, 1, 0, 1]


def test_plain_anthropic_messages() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "t"}, use("c1")]},
        {"role": "user", "content": [{**result("c1"), "is_error": True}, {"type": "text", "text": "and?"}]},
    ]
    (run,) = read({"system": "sys", "messages": messages}, "anthropic-messages")
    assert [role for role, _, _ in shape(run)] == ["system", "user", "assistant", "tool", "user"]
    assert (run.messages[2].reasoning, run.messages[3].failed) == ("hm", True)


def test_all_text_blocks_of_a_response_are_kept() -> None:
    blocks = [{"type": "text", "text": "one"}, use("c1"), {"type": "text", "text": "two"}]
    (run,) = read({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks}]})
    assert run.messages[1].content == "one\ntwo"


def test_gemini_api_contents() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "q"}]},
        {
            "role": "model",
            "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "f", "args": {"a": 1}}}],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "r"}}}]},
    ]
    (run,) = read({"contents": contents}, "gemini-cli")
    assert shape(run) == [("user", "human", 0), ("assistant", "policy", 1), ("tool", "environment", 0)]
    assert (run.messages[1].reasoning, run.messages[2].content) == ("hm", "r")


def test_images_never_reach_the_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "see"}, image]
    (run,) = read({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]})
    assert run.messages[0].content == "see\n[image]"


@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("    retu\n\n> ^C again to exit  ", "Okay, done."),
        ("    retu\n\n> ^C again to exit  ", "Okay:\n\n```python\nx\n```"),
        ("    retu", "Okay, done."),
    ],
)
def test_what_the_user_says_ends_a_fence_of_aider_that_was_broken_off(inside: str, after: str) -> None:
    text = (
        f"# aider chat started at 2024-08-22\n\n#### f\n\nSo\n\n```python\ndef f():\n{inside}\n\n#### no\n\n{after}\n"
    )
    (run,) = parse(text.encode())
    said = [(message.author, message.content) for message in run.messages]
    assert said[0] == ("human", "f")
    assert said[1][1].startswith("So\n\n```python\ndef f():\n    retu")
    assert said[-2:] == [("human", "no"), ("policy", after)]


def test_headings_in_a_closed_fence_of_aider_are_the_assistants() -> None:
    answer = "So\n\n```md\n#### Use\n> note\n```"
    (run,) = parse(f"# aider chat started at 2024-08-22\n\n#### f\n\n{answer}\n\n#### no  \n\nOkay.\n".encode())
    assert [message.content for message in run.messages] == ["f", answer, "no", "Okay."]


def test_an_aider_session_whose_answer_begins_like_yaml() -> None:
    (run,) = parse(b"# aider chat started at 2024-08-22\n\n#### f\n\nSure:\n  all - of: it\n")
    assert run.messages[-1].content == "Sure:\n  all - of: it"


EXAMPLE_AND_CALL = "For example\n```bash\nls\n```\nso:\n```mswea_bash_command\nls -la\n```"


@pytest.mark.parametrize(
    ("content", "actions", "marked", "called"),
    [
        (EXAMPLE_AND_CALL, [{"command": "ls -la"}], ["```mswea_bash_command\nls -la\n```"], []),
        (EXAMPLE_AND_CALL, [{"command": "ls"}], ["```bash\nls\n```"], []),
        (EXAMPLE_AND_CALL, None, ["```bash\nls\n```"], []),
        (EXAMPLE_AND_CALL, [{"command": "rm x"}], [], ['{"command": "rm x"}']),
        (
            EXAMPLE_AND_CALL,
            [{"function": {"name": "bash", "arguments": '{"command": "pwd"}'}}],
            [],
            ['{"command": "pwd"}'],
        ),
        (EXAMPLE_AND_CALL, [{"command": "ls"}, {"command": "pwd"}], [], ['{"command": "ls"}', '{"command": "pwd"}']),
        (
            "```bash\nls\n``` or <function=bash><parameter=command>pwd</parameter></function>",
            [{"function": {"name": "bash", "arguments": '{"command": "pwd"}'}}],
            ["<function=bash><parameter=command>pwd</parameter></function>"],
            [],
        ),
    ],
)
def test_what_ran_decides_which_text_of_a_mini_swe_agent_turn_is_the_action(
    content: str, actions: list[dict[str, Any]] | None, marked: list[str], called: list[str]
) -> None:
    (run,) = read(mini({"role": "assistant", "content": content, "extra": {"actions": actions}}), "mini-swe-agent")
    turn = run.messages[2]
    assert [content[span.start : span.end] for span in turn.action_spans] == marked
    assert [call.arguments for call in turn.tool_calls] == called


def test_formats_can_be_forced() -> None:
    data = b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}'
    assert parse(data, source_format="openai-chat")[0].source_format == "openai-chat"
    assert len(BY_NAME) >= 20


def test_calls_that_only_old_langchain_fields_hold_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    fields = {"content": "", "additional_kwargs": {"tool_calls": [call]}}
    (run,) = read([{"type": "human", "data": {"content": "x"}}, {"type": "ai", "data": fields}], "langchain")
    assert run.messages[1].tool_calls[0].arguments == '{"a": 1}'


def test_calls_of_the_providers_own_tools_are_turns_too() -> None:
    output = [{"type": "computer_call", "call_id": "c1", "action": {"type": "click"}}]
    (run,) = read(mini({"object": "response", "output": output}), "mini-swe-agent")
    (call,) = run.messages[2].tool_calls
    assert (call.name, call.arguments, call.call_id) == ("computer", '{"type": "click"}', "c1")
    with pytest.raises(SourceError, match="names no function"):
        read(mini({"object": "response", "output": [{"type": "function_call", "call_id": "c1"}]}))


def test_text_beside_results_in_a_claude_code_line_is_kept() -> None:
    (run,) = read(
        [
            {
                "type": "user",
                "uuid": "a",
                "message": {"role": "user", "content": ["plain", {"type": "text", "text": "x"}]},
            },
            {
                "type": "assistant",
                "uuid": "b",
                "parentUuid": "a",
                "message": {"id": "m", "role": "assistant", "content": [{"type": "text", "text": "y"}]},
            },
        ],
        "claude-code",
    )
    assert run.messages[0].content == "plain\nx"
