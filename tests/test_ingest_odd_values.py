"""Values that no adapter thought of: each costs only its own record, nothing is lost unsaid, and nothing is made up."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingest_inputs import chat, damage, first_words, line, reasons, run

from schemas.config import SourceConfig
from tasks.read_logs import file_runs
from tasks.sources import ADAPTERS, Adapter, Document, SourceError, find_adapter, parse, read_document
from tasks.sources.adapter import Guarded


def turn(**fields: Any) -> bytes:
    """A conversation whose answer has these fields."""
    return json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", **fields}]}).encode()


# one odd file costs only itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [5, True, 1.5, "text", [], {}])
def test_info_that_is_no_object_is_read_as_plain_chat(info: Any) -> None:
    document = read_document(json.dumps(chat("x", info=info)).encode())
    assert [adapter.name for adapter in ADAPTERS if adapter.detect(document)] == ["openai-chat"]
    assert len(parse(json.dumps(document.value).encode())) == 1


def test_what_an_adapter_should_not_raise_becomes_a_reason_that_names_it() -> None:
    def fails(_: Document) -> Any:
        return {}["gone"]

    adapter = Adapter("odd", fails, fails)
    document = read_document(b'{"a": 1}')
    with pytest.raises(SourceError, match=r"odd: a value it does not expect \(KeyError: 'gone'\)"):
        adapter.read_runs(document)
    with pytest.raises(SourceError, match=r"odd: .*KeyError"):
        adapter.knows(document)
    with pytest.raises(KeyError):  # what tests of adapters call
        adapter.sound_runs(document)
    with pytest.raises(AssertionError), Guarded("odd"):
        raise AssertionError


ODD_TYPES: tuple[Any, ...] = (
    datetime.datetime(2020, 1, 1, 2, 3),
    datetime.date(2020, 1, 1),
    datetime.time(1, 2),
    datetime.timedelta(seconds=3),
    decimal.Decimal("1.10"),
    b"bytes",
    b"\xff\xfe",
)


@pytest.mark.parametrize("value", ODD_TYPES, ids=lambda value: type(value).__name__)
def test_values_that_json_does_not_have_become_text(logs: Path, value: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"at": value}}}
    messages = [{"role": "user", "content": [value]}, {"role": "assistant", "tool_calls": [call]}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": [{"x": value}]}]), logs / "a.parquet")
    (found,) = file_runs(logs / "a.parquet", redact=False)
    arguments = json.loads(found.messages[1].tool_calls[0].arguments)
    assert isinstance(arguments["at"], str)
    assert found.messages[0].content == arguments["at"]
    assert found.tools_json is not None
    assert json.loads(found.tools_json) == [{"x": arguments["at"]}]


def test_an_unknown_time_zone_is_a_reason(logs: Path) -> None:
    at = pa.array([datetime.datetime(2020, 1, 1)], pa.timestamp("us", tz="Mars/Olympus"))
    pq.write_table(pa.table({"messages": pa.array([chat("x")["messages"]]), "at": at}), logs / "zone.parquet")
    result = run(logs)
    assert first_words(result) == ["good"]
    assert "Mars/Olympus" in reasons(result)["zone.parquet"]


def test_dates_in_yaml_are_text_and_self_reference_is_refused(logs: Path) -> None:
    (logs / "date.yaml").write_text(
        "history:\n- {role: user, content: 2020-01-01, agent: main}\n- {role: assistant, content: b, agent: main}\n"
    )
    (logs / "chat.yaml").write_text("messages:\n- {role: user, content: 2020-01-02}\n- {role: assistant, content: b}\n")
    (logs / "self.yaml").write_text("history: &a [*a]\n")
    many = "\n".join(["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 49)])
    (logs / "many.yaml").write_text(many)
    result = run(logs)
    assert set(first_words(result)) == {"2020-01-01", "2020-01-02", "good"}
    assert "holds itself" in reasons(result)["self.yaml"]
    assert "aliases unfold" in reasons(result)["many.yaml"]


def dataset_runs(folder: Path) -> Any:
    from artifacts.store import Store
    from tasks.ingest import ingest

    good = folder.parent / "good.json"
    good.write_bytes(line("good"))
    return ingest(SourceConfig(paths=(str(good), f"hf:{folder}")), Store(folder.parent / "store"))


BROKEN_DATASETS = {
    "front matter": {"README.md": b"---\na: [b\nc: }\n---\n", "a.jsonl": line("x")},
    "script": {"script.py": b"raise SystemExit\n"},
    "columns": {"a.jsonl": line("x", instance_id="1"), "b.jsonl": b'{"other": 1}\n'},
}


@pytest.mark.parametrize("name", BROKEN_DATASETS)
def test_a_broken_data_set_is_one_line(tmp_path: Path, name: str) -> None:
    folder = tmp_path / (name.replace(" ", "-") if name != "script" else "script")
    folder.mkdir()
    for file, data in BROKEN_DATASETS[name].items():
        (folder / file).write_bytes(data)
    result = dataset_runs(folder)
    assert "good" in first_words(result)
    (dropped,) = result.report.quarantined
    assert dropped.reason.startswith("data set cannot be loaded: ")
    assert "\n" not in dropped.reason


# nothing is lost unsaid -----------------------------------------------------------------------------------------

CALL = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
CUSTOM = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "text"}}


@pytest.mark.parametrize("calls", [CALL, [CALL], json.dumps([CALL]), json.dumps(CALL), [json.dumps(CALL)]])
def test_calls_in_every_packing_are_read(calls: Any) -> None:
    (found,) = parse(turn(content="", tool_calls=calls))
    (call,) = found.messages[1].tool_calls
    assert (call.name, call.arguments, call.call_id) == ("f", '{"a": 1}', "1")


def test_a_custom_call_and_an_old_one_as_text_are_read() -> None:
    assert parse(turn(content="", tool_calls=[CUSTOM]))[0].messages[1].tool_calls[0].arguments == '{"input": "text"}'
    assert parse(turn(content="", function_call='{"name": "f"}'))[0].messages[1].tool_calls[0].name == "f"


@pytest.mark.parametrize(
    "calls",
    [7, "no json", [None], [5], [{"id": 1}], [{"function": None}], [{"function": {"arguments": "{}"}}], [[CALL]]],
)
def test_what_is_no_call_is_never_one(calls: Any) -> None:
    with pytest.raises(SourceError, match=r"message 2: .*(call|tool_calls)"):
        parse(turn(content="", tool_calls=calls))


def test_blocks_in_a_plain_chat_are_calls_and_reasoning() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "look"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    opening = [{"role": "user", "content": str(n)} for n in range(8)]  # beyond where the blocks are looked for
    data = json.dumps({"messages": [*opening, {"role": "assistant", "content": blocks}]}).encode()
    assert find_adapter(read_document(data)).name == "openai-chat"
    message = parse(data)[0].messages[-1]
    assert (message.content, message.reasoning, message.tool_calls[0].arguments) == ("look", "hm", '{"a": 1}')


@pytest.mark.parametrize("odd", [None, 5, "text", [], True])
def test_a_message_that_is_none_costs_its_run_and_is_listed(logs: Path, odd: Any) -> None:
    bad = {"messages": [*chat("bad")["messages"], odd]}
    (logs / "a.jsonl").write_bytes(b"\n".join((line("one"), json.dumps(bad).encode(), line("two"))))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    assert damage(result)[0].startswith("line 2: message 3: a message: expected an object, found ")


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("messages", {"trajectory_format": "mini-swe-agent-1", "info": {}}),
        ("traj", {"task_id": 1, "reward": 1.0}),
        ("steps", {"schema_version": "ATIF-1.4"}),
    ],
)
def test_other_formats_do_not_leave_messages_out(key: str, row: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="expected an object, found null"):
        parse(
            json.dumps(
                {**row, key: [{"role": "user", "content": "x", "source": "user", "message": "x"}, None]}
            ).encode()
        )


@pytest.mark.parametrize(
    ("odd", "name"), [(b"5", "a number"), (b"null", "null"), (b'"text"', "a text"), (b"[1]", "a list")]
)
def test_lines_that_hold_no_object_are_listed(logs: Path, odd: bytes, name: str) -> None:
    (logs / "a.jsonl").write_bytes(b"\n".join((line("one"), b"", odd, line("two"))))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    assert damage(result) == [f"line 3: expected an object, found {name}"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": 1}, '{"a": 1}'),
        ([["x", ["y"]]], "x\ny"),
        ([{"type": "new", "data": 1}, "z"], '{"type": "new", "data": 1}\nz'),
        ([{"type": "text", "text": 7}], "7"),
        ([{"type": "text"}, {}, None], ""),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], "[input_audio]"),
        (7, "7"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_content_of_any_shape_is_kept(content: Any, text: str, role: str) -> None:
    messages = [{"role": "user", "content": "first"}, {"role": role, "content": content}]
    assert parse(json.dumps({"messages": messages}).encode())[0].messages[1].content == text


# numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_arguments_are_always_json(number: str) -> None:
    data = turn(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {"n": 0.5}}}]).replace(
        b"0.5", number.encode()
    )
    with pytest.raises(SourceError, match="cannot be written as JSON"):
        parse(data)
