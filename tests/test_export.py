"""Each exporter, on each shared run and on random ones: what comes back is the run that went out."""

from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.store import Store
from schemas.config import SourceConfig
from schemas.tables import TRAJECTORIES
from schemas.trajectory import CharSpan, Message, Outcome, ToolCall, Trajectory
from tasks.columns import record_batch
from tasks.export import EXPORTERS, Format, export, trajectories_of
from tasks.ingest import ingest
from tasks.sources import SourceError, draft, find_adapter, parse, read_document
from tasks.sources.side_files import read_side_file

FORMATS: tuple[Format, ...] = ("atif", "openai", "sharegpt")
READERS = {"atif": "atif", "openai": "openai-chat", "sharegpt": "sharegpt"}


def there_and_back(trajectory: Trajectory, target: Format) -> Trajectory:
    data = orjson.dumps(EXPORTERS[target](trajectory))
    document = read_document(data)
    assert find_adapter(document).name == READERS[target]
    (back,) = parse(data)
    return back


@pytest.mark.parametrize("target", FORMATS)
def test_shared_runs_come_back_equal(shared_dir: Path, target: Format) -> None:
    n_runs = 0
    for path in sorted(shared_dir.rglob("*")):
        if not path.is_file():
            continue
        document = read_document(path.read_bytes(), path.name)
        if read_side_file(document) is not None:
            continue
        try:
            runs = find_adapter(document).read_document(document)
        except SourceError:
            continue  # tests/test_sources_expected.py says which files those are
        for run in runs:
            assert there_and_back(run, target) == run
            n_runs += 1
    assert n_runs >= 98


text = st.text(st.characters(codec="utf-8"), max_size=60)
optional = st.none() | text
calls = st.builds(ToolCall, name=text, arguments=text | st.just('{"a": 1.10, "a": 2}'), call_id=optional)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(("system", "user", "assistant", "tool")))
    content = draw(text)
    authors = st.sampled_from(("policy", "environment", "human", "harness", "copied_context", "invented"))
    if role != "assistant":
        return Message(
            role=role,
            author=draw(authors),
            content=content,
            tool_call_id=draw(optional),
            name=draw(optional),
            failed=draw(st.none() | st.booleans()),
        )
    spans = ()
    if content:
        start = draw(st.integers(0, len(content) - 1))
        spans = (CharSpan(start=start, end=draw(st.integers(start + 1, len(content)))),)
    return Message(
        role="assistant",
        author=draw(authors),
        content=content,
        reasoning=draw(optional),
        tool_calls=tuple(draw(st.lists(calls, max_size=3))),
        action_spans=spans if draw(st.booleans()) else (),
    )


trajectories = st.builds(
    Trajectory,
    trajectory_id=text,
    task_id=text,
    source_format=text,
    source_path=text,
    source_blake3=text,
    messages=st.lists(messages(), min_size=1, max_size=8).map(tuple),
    outcome=st.builds(
        Outcome,
        status=st.sampled_from(("resolved", "failed", "unknown")),
        source=st.sampled_from(("test_report", "reward", "none")),
        score=st.none() | st.floats(0, 1),
    ),
    repo=optional,
    run_id=optional,
    agent=optional,
    model=optional,
    tools_json=optional | st.just('[{"type": "function"}]'),
    exit_status=optional,
    patch=optional,
    parent_id=optional,
    parent_link=st.none() | st.sampled_from(("subagent", "fork", "continuation")),
)


@pytest.mark.parametrize("target", FORMATS)
@given(trajectory=trajectories)
@settings(max_examples=120, deadline=None)
def test_random_runs_come_back_equal(target: Format, trajectory: Trajectory) -> None:
    assert there_and_back(trajectory, target) == trajectory


@pytest.mark.parametrize("target", FORMATS)
def test_a_written_export_can_be_ingested(tmp_path: Path, target: Format) -> None:
    run = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "```bash\nls\n```"}]}
    (tmp_path / "run.json").write_bytes(orjson.dumps(run))
    store = Store(tmp_path / "store")
    first = ingest(SourceConfig(paths=(str(tmp_path / "run.json"),)), store)
    out = tmp_path / "out" / "runs"
    assert export(first.trajectories, out, target) == 1
    second = ingest(SourceConfig(paths=(str(out),)), store)
    assert list(trajectories_of(second.trajectories)) == list(trajectories_of(first.trajectories))


def test_plain_fields_are_what_other_tools_read() -> None:
    """The `traceforge` entry adds to the format; it does not replace it."""
    turn = Message(
        role="assistant",
        author="policy",
        content="look",
        reasoning="why",
        tool_calls=(ToolCall(name="bash", arguments='{"command":"ls"}', call_id="c1"),),
    )
    result = Message(role="tool", author="environment", content="a.py", tool_call_id="c1", name="bash")
    run = Trajectory(
        trajectory_id="t", task_id="k", source_format="f", source_path="p", source_blake3="s", messages=(turn, result)
    )
    chat = EXPORTERS["openai"](run)["messages"]
    assert chat[0]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
    assert chat[1] == {"role": "tool", "content": "a.py", "tool_call_id": "c1", "name": "bash"}
    step = EXPORTERS["atif"](run)["steps"][0]
    assert step["tool_calls"] == [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}]
    assert step["observation"]["results"] == [{"content": "a.py", "source_call_id": "c1"}]
    value = EXPORTERS["sharegpt"](run)["conversations"][0]["value"]
    assert (
        value
        == '<think>\nwhy\n</think>\nlook\n<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call>'
    )


def test_runs_that_share_an_id_or_name_a_folder_have_a_file_each(tmp_path: Path) -> None:
    ids = ["same", "same", "../outside", ".hidden", "a/b", "x" * 300]
    path = tmp_path / "table.arrow"
    turn = draft.Message(role="assistant", author="policy", content="a")
    fields = {"task_id": "k", "source_format": "f", "source_path": "p", "source_blake3": "s", "messages": (turn,)}
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TRAJECTORIES) as writer:
        writer.write_batch(record_batch([draft.Run(trajectory_id=name, **fields) for name in ids]))
    assert export(path, tmp_path / "out", "atif") == len(ids)
    assert len(list((tmp_path / "out").iterdir())) == len(ids)
    assert {"same.json", "same.2.json"} < {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"table.arrow", "out"}


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("edit", ["text", "shorter", "longer"])
def test_an_edited_export_is_told_not_half_believed(target: Format, edit: str) -> None:
    """Its spans would lie at other words, its authors at other messages."""
    run = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "```bash\nls\n```"}] * 2}
    (trajectory,) = parse(orjson.dumps(run))
    row = orjson.loads(orjson.dumps(EXPORTERS[target](trajectory)))
    turns = row.get("steps") or row.get("messages") or row["conversations"]
    text = next(key for key in ("message", "content", "value") if key in turns[0])
    if edit == "text":
        turns[1][text] = "x" + turns[1][text]
    elif edit == "shorter":
        del turns[0]
    else:
        turns.insert(0, turns[0])
    with pytest.raises(SourceError, match="an export that was edited since: without its 'traceforge' entry"):
        parse(orjson.dumps(row))
    (row["extra"] if target == "atif" else row).pop("traceforge")
    assert parse(orjson.dumps(row))


@pytest.mark.parametrize("target", FORMATS)
def test_empty_entries_that_tools_add_are_no_edit(target: Format) -> None:
    run = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "```bash\nls\n```"}]}
    (trajectory,) = parse(orjson.dumps(run))
    row = orjson.loads(orjson.dumps(EXPORTERS[target](trajectory)))
    turns = row.get("steps") or row.get("messages") or row["conversations"]
    turns[0] |= {"reasoning_content": None}
    (back,) = parse(orjson.dumps(row | {"added": None}))
    assert back == trajectory
