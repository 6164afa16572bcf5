"""What a log holds where a turn, a call or an observation stands is kept, or told: never passed over unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest
from ingest_inputs import damage, first_words, run

from schemas.trajectory import Message
from tasks.sources import BY_NAME, SourceError, find_adapter, read_document


def messages(expected_format: str, value: Any, *, lines: bool = False) -> tuple[Message, ...]:
    """The messages of the one run that the value, or the lines, hold."""
    data = "\n".join(map(json.dumps, value)) if lines else json.dumps(value)
    document = read_document(data.encode())
    assert find_adapter(document).name == expected_format
    (run,) = BY_NAME[expected_format].read_document(document)
    return run.messages


def contents(expected_format: str, value: Any, *, lines: bool = False) -> list[str]:
    return [message.content for message in messages(expected_format, value, lines=lines)]


def atif(**step: Any) -> dict[str, Any]:
    opening = {"source": "user", "message": "task"}
    return {"schema_version": "ATIF-v1.5", "steps": [opening, {"source": "agent", "message": "m", **step}]}


def nebius(text: Any) -> dict[str, Any]:
    steps = [{"role": "system", "system_prompt": "s", "text": None, "mask": False}, {"role": "user", "text": "task"}]
    return {"instance_id": "o__r-1", "target": True, "trajectory": [*steps, {"role": "ai", "text": text, "mask": True}]}


def moatless(**node: Any) -> dict[str, Any]:
    action = {"scratch_pad": "thought", "action_args_class": "x.FindArgs", "q": 1}
    nodes = [{"node_id": 0, "message": "task"}, {"node_id": 1, "parent_id": 0, "action": action, **node}]
    return {"nodes": nodes}


def moatless_response(response: Any) -> dict[str, Any]:
    return moatless(completions={"build_action": {"response": response}})


def v0(**event: Any) -> list[dict[str, Any]]:
    opening = {"id": 0, "source": "user", "action": "message", "args": {"content": "task"}}
    return [opening, {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls"}}, {"id": 2, **event}]


def sdk(*events: dict[str, Any]) -> list[dict[str, Any]]:
    opening = {"id": "1", "kind": "MessageEvent", "llm_message": {"role": "user", "content": "task"}}
    return [opening, *events]


def llm_log(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "task"}],
        "response": {"choices": []},
        "kwargs": {},
        "context_window": 1,
        "latency_sec": 1.0,
        **fields,
    }


def debug_gym(**step: Any) -> dict[str, Any]:
    return {"problem": "p", "log": [{"action": None, "obs": "task"}, {"obs": "o", "content": "c", **step}]}


def gemini(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"type": "user", "content": "task"}, {"type": "gemini", "content": "a"}, *turns]}


ACTION = {"kind": "ExecuteBashAction", "command": "ls"}
SHOWN = {"content": [{"type": "text", "text": "seen"}], "is_error": False}


@pytest.mark.parametrize(
    ("expected_format", "value", "kept"),
    [
        ("atif", atif(observation="seen"), "seen"),
        ("atif", atif(observation=[{"content": "seen"}]), "seen"),
        ("atif", atif(observation={"content": "seen"}), "seen"),
        ("nebius", nebius([{"type": "text", "text": "seen"}]), "seen"),
        ("moatless", moatless(observation="seen"), "seen"),
        ("openhands", v0(source="agent", action="message", args={"content": ["seen"]}), "seen"),
        ("openhands", v0(source="agent", action="run", args={"thought": ["seen"], "command": "ls"}), "seen"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ObservationEvent", "observation": "seen"}), "seen"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ObservationEvent", "observation": [SHOWN]}), "seen"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ObservationEvent", "observation": {"message": "seen"}}), "seen"),
    ],
)
def test_what_has_a_text_is_kept_whatever_holds_it(expected_format: str, value: Any, kept: str) -> None:
    assert contents(expected_format, value)[-1] == kept


@pytest.mark.parametrize(
    ("expected_format", "value"),
    [("atif", atif(reasoning_content=["why"])), ("debug-gym", debug_gym(reasoning=[{"type": "text", "text": "why"}]))],
)
def test_reasoning_in_parts_is_kept(expected_format: str, value: Any) -> None:
    assert next(turn for turn in messages(expected_format, value) if turn.role == "assistant").reasoning == "why"


@pytest.mark.parametrize(
    ("expected_format", "value", "told"),
    [
        ("atif", atif(observation={"results": [{"new": "seen"}]}), "results: an object with none of content"),
        ("moatless", moatless(observation=[{"message": "seen"}]), "observation: expected an object"),
        ("moatless", moatless(observation={"new": "seen"}), "observation: an object with none of message"),
        ("moatless", moatless(completions=[{"build_action": {}}]), "completions: expected an object"),
        ("moatless", moatless(completions={"build_action": "seen"}), "build_action: expected an object"),
        ("moatless", moatless_response("seen"), "response: expected an object"),
        ("moatless", moatless_response({"new": "seen"}), "response: an object with none of"),
        ("moatless", moatless_response({"choices": ["seen"]}), "choices: expected an object"),
        ("moatless", {"nodes": [{"node_id": 0, "message": "task"}, {"new": {"node_id": 1}}]}, "without node_id"),
        ("openhands", v0(source="agent", action="message", args=["seen"]), "args: expected an object"),
        ("openhands", v0(source="user", action="message", args={"new": "seen"}), "message without content"),
        ("openhands", [*v0(source="agent", observation="run"), {"new": "seen"}], "neither action nor observation"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ObservationEvent", "observation": {"new": 1}}), "none of"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ActionEvent", "tool_call": {"new": "seen"}}), "names no function"),
        ("openhands-sdk", sdk({"id": "2", "kind": "ActionEvent", "action": ["seen"]}), "action: expected an object"),
        ("openhands-llm-log", llm_log(response=["seen"]), "response: expected an object"),
        ("openhands-llm-log", llm_log(raw_response="seen"), "raw_response: expected an object"),
        ("openhands-llm-log", llm_log(response={"choices": {"0": "seen"}}), "choices: expected a list"),
        ("openhands-llm-log", llm_log(response={"choices": [{"message": "seen"}]}), "message: expected an object"),
        ("openhands-llm-log", llm_log(response={"choices": [{"message": {"new": 1}}]}), "message: an object with none"),
        ("moatless", {"initial_message": "task", "transitions": [{"new": "seen"}]}, "transitions: an object with none"),
        ("debug-gym", debug_gym(action=[{"name": "pdb"}]), "action: expected an object"),
        ("debug-gym", {"problem": "p", "log": [{"new": "seen"}]}, "log: an object with none of"),
        ("gemini-cli", gemini({"type": "info"}, {"type": "model", "content": "seen"}), "unknown message type 'model'"),
    ],
)
def test_what_cannot_be_read_is_told(expected_format: str, value: Any, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        messages(expected_format, value)


def test_notes_of_the_gemini_program_are_no_messages() -> None:
    assert contents("gemini-cli", gemini({"type": "info", "content": "update"}))[-1] == "a"


# OpenHands SDK: calls --------------------------------------------------------------------------------------------

CALL = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"tool_call": CALL}, '{"command": "ls"}'),
        ({"tool_call": {"id": "t1", "name": "bash", "arguments": '{"command": "ls"}'}}, '{"command": "ls"}'),
        ({"action": ACTION, "tool_name": "bash", "tool_call_id": "t1"}, '{"command": "ls"}'),
    ],
)
def test_calls_of_the_openhands_sdk_in_every_shape(fields: dict[str, Any], arguments: str) -> None:
    turn = messages("openhands-sdk", sdk({"id": "2", "kind": "ActionEvent", "thought": [], **fields}))[-1]
    (call,) = turn.tool_calls
    assert (call.name, call.arguments, call.call_id) == ("bash", arguments, "t1")


def test_an_event_that_was_written_twice_is_one() -> None:
    act = {"id": "2", "kind": "ActionEvent", "tool_call": CALL, "llm_response_id": "r"}
    seen = {"id": "3", "kind": "ObservationEvent", "observation": SHOWN, "tool_call_id": "t1"}
    found = messages("openhands-sdk", sdk(act, act, seen, seen))
    assert [(message.role, len(message.tool_calls)) for message in found] == [
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
    ]
    event = {"id": 2, "source": "agent", "observation": "run", "content": "seen"}
    assert contents("openhands", [*v0(**event), event]) == ["task", "", "seen"]


# Codex -----------------------------------------------------------------------------------------------------------


def rollout(*lines: dict[str, Any], **session: Any) -> list[dict[str, Any]]:
    opening = {"type": "session_meta", "payload": {"id": "c", **session}}
    return [opening, said("user", "task"), *lines]


def said(role: str, text: str) -> dict[str, Any]:
    return item(type="message", role=role, content=[{"type": "input_text", "text": text}])


def item(**payload: Any) -> dict[str, Any]:
    return {"type": "response_item", "payload": payload}


def event(kind: str, **payload: Any) -> dict[str, Any]:
    return {"type": "event_msg", "payload": {"type": kind, **payload}}


def codex_call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return item(type="function_call", name="sh", arguments=arguments, call_id=call_id)


def codex_output(call_id: str, output: Any) -> dict[str, Any]:
    return item(type="function_call_output", call_id=call_id, output=output)


@pytest.mark.parametrize("instructions", ["be good", {"text": "be good"}, [{"text": "be good"}]])
def test_instructions_of_a_codex_session_are_kept(instructions: Any) -> None:
    assert contents("codex", rollout(base_instructions=instructions), lines=True) == ["be good", "task"]


@pytest.mark.parametrize("output", ["seen", {"content": "seen"}, {"text": "seen"}, [{"type": "text", "text": "seen"}]])
def test_outputs_of_codex_calls_are_kept(output: Any) -> None:
    assert contents("codex", rollout(codex_call("1"), codex_output("1", output)), lines=True)[-1] == "seen"


@pytest.mark.parametrize("payload", [["seen"], "seen", None])
def test_an_item_of_a_codex_rollout_that_is_no_object_is_told(payload: Any) -> None:
    with pytest.raises(SourceError, match="payload: expected an object"):
        messages("codex", rollout({"type": "response_item", "payload": payload}), lines=True)


def test_a_codex_call_that_was_written_twice_is_one() -> None:
    call, output = codex_call("1"), codex_output("1", "seen")
    other = codex_call("1", '{"other": 1}')  # the same id, and yet another call
    found = messages("codex", rollout(call, call, output, output, other), lines=True)
    assert [(message.role, len(message.tool_calls)) for message in found] == [
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
        ("assistant", 1),
    ]


def test_a_codex_turn_that_was_rolled_back_is_no_turn() -> None:
    refused = [said("user", "second"), codex_call("1"), codex_output("1", "seen"), said("assistant", "refused")]
    lines = rollout(
        *(said("assistant", "first"), *refused, event("thread_rolled_back", num_turns=1)),
        *(said("user", "third"), said("assistant", "end")),
    )
    assert contents("codex", lines, lines=True) == ["task", "first", "third", "end"]


def exec_stream(*items: Any) -> list[dict[str, Any]]:
    opening = {"type": "item.completed", "item": {"id": "0", "type": "agent_message", "text": "hello"}}
    return [{"type": "thread.started", "thread_id": "t"}, opening] + [
        {"type": "item.completed", "item": value} for value in items
    ]


def test_failed_and_collaborating_calls_of_a_codex_stream_are_kept() -> None:
    failed = {"id": "1", "type": "mcp_tool_call", "server": "s", "tool": "t", "arguments": {}, "status": "failed"}
    failed |= {"result": None, "error": {"message": "it failed"}}
    spawn = {"id": "2", "type": "collab_tool_call", "tool": "spawn_agent", "prompt": "go", "receiver_thread_ids": ["x"]}
    found = messages("codex-exec", exec_stream(failed, failed, spawn), lines=True)
    assert [(m.role, m.content, m.failed) for m in found[1:-1]] == [("tool", "it failed", True)]
    assert [call.name for message in found for call in message.tool_calls] == ["s.t", "spawn_agent"]
    assert json.loads(found[-1].tool_calls[0].arguments) == {"prompt": "go", "receiver_thread_ids": ["x"]}


def test_errors_of_a_codex_stream_are_how_it_ended() -> None:
    document = read_document("\n".join(map(json.dumps, exec_stream({"type": "error", "message": "cut off"}))).encode())
    (run,) = BY_NAME["codex-exec"].read_document(document)
    assert run.exit_status == "cut off"


@pytest.mark.parametrize(
    ("odd", "told"), [(["seen"], "item: expected an object"), ({"type": "new"}, "unknown item type 'new'")]
)
def test_an_item_of_a_codex_stream_that_cannot_be_read_is_told(odd: Any, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        messages("codex-exec", exec_stream(odd), lines=True)


# SWE-agent, inspect, refusals -------------------------------------------------------------------------------------


def test_an_agent_that_only_demonstrates_is_not_the_policy() -> None:
    history = [
        {"role": "user", "content": "demo", "agent": "demo", "is_demo": True},
        {"role": "assistant", "content": "shown", "agent": "demo", "is_demo": True},
        {"role": "user", "content": "task", "agent": "primary"},
        {"role": "assistant", "content": "done", "agent": "primary"},
    ]
    found = messages("swe-agent", {"history": history, "trajectory": []})
    assert [message.author for message in found] == ["demonstration", "demonstration", "harness", "policy"]


def sample(number: int, *said: str, **fields: Any) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=False)]
    return {"id": number, "epoch": 1, "target": "t", "messages": turns, **fields}


def inspect_log(*samples: dict[str, Any]) -> dict[str, Any]:
    return {"version": 2, "eval": {"task": "t", "run_id": "r"}, "plan": {}, "samples": list(samples)}


def test_a_sample_without_messages_costs_only_itself(logs: Path) -> None:
    log = inspect_log(sample(1, "one", "a"), sample(2), sample(3, "three", "a"))
    (logs / "log.json").write_text(json.dumps(log))
    result = run(logs)
    assert set(first_words(result)) == {"good", "one", "three"}
    assert damage(result) == ["record 2: inspect-ai: sample 2 holds no messages"]


REFERENCE = "attachment://0123abcd"


def test_attachments_are_resolved_or_told() -> None:
    stored = {"0123abcd": "seen"}
    call = {"id": "1", "function": "f", "arguments": {"data": REFERENCE}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": REFERENCE}], "tool_calls": [call]}
    image = {"role": "user", "content": [{"type": "image", "image": REFERENCE}]}
    found = messages("inspect-ai", inspect_log(sample(1, messages=[image, turn], attachments=stored)))
    assert [message.content for message in found] == ["[image]", "seen"]
    assert found[1].tool_calls[0].arguments == '{"data": "seen"}'
    assert contents("inspect-ai", inspect_log(sample(1, messages=[image]))) == ["[image]"]
    for odd in ({"content": REFERENCE}, {"content": "", "tool_calls": [call]}):
        with pytest.raises(SourceError, match="attachment 0123abcd is not in the log"):
            messages("inspect-ai", inspect_log(sample(1, messages=[{"role": "assistant", **odd}])))


def test_a_refusal_is_what_the_model_said() -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "refusal": "I will not"}]
    assert contents("openai-chat", {"messages": said})[1] == "I will not"


def test_reasoning_in_parts_beside_a_chat_message_is_kept() -> None:
    turn = {"role": "assistant", "content": "a", "reasoning_content": [{"type": "text", "text": "why"}]}
    assert messages("openai-chat", {"messages": [{"role": "user", "content": "q"}, turn]})[1].reasoning == "why"


CLAUDE = {"type": "user", "uuid": "u", "parentUuid": None, "sessionId": "s", "message": {"content": "task"}}


@pytest.mark.parametrize(
    ("lines", "odd", "told"),
    [
        ([CLAUDE], {"new": CLAUDE}, "a line without type"),
        ([CLAUDE], {**CLAUDE, "uuid": "v", "message": 7}, "message: expected an object, found a number"),
        (rollout(), {"type": "response_item", "payload": ["seen"]}, "payload: expected an object, found a list"),
        (exec_stream(), {"type": "item.completed", "item": {"type": "new"}}, "unknown item type 'new'"),
        (exec_stream(), {"new": {"type": "item.completed"}}, "a line without type"),
        (
            v0(source="agent", action="think"),
            {"id": 3, "action": "run", "args": 7},
            "args: expected an object, found a number",
        ),
        (sdk(), {"id": "2", "kind": "ActionEvent", "tool_call": {"x": 1}}, "a tool call that names no function"),
    ],
)
def test_a_line_of_a_session_that_cannot_be_read_costs_only_itself(
    logs: Path, lines: list[dict[str, Any]], odd: dict[str, Any], told: str
) -> None:
    (logs / "a.jsonl").write_text("\n".join(map(json.dumps, [*lines, odd, *lines[-1:]])))
    result = run(logs)
    assert len(first_words(result)) == 2
    assert damage(result) == [f"line {len(lines) + 1}: {told}"]
