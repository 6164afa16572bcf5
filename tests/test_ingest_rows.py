"""The fast way through ingestion gives what the plain way gives: pruned reading, drafts, columns, batches passed on."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from artifacts.store import Store
from schemas.config import SourceConfig
from schemas.tables import TRAJECTORIES
from schemas.trajectory import Author, Outcome, Role, Trajectory
from tasks import read_logs
from tasks.catalog import Catalog
from tasks.columns import record_batch
from tasks.ingest import ingest
from tasks.redact import redact
from tasks.sources import SourceError, find_adapter, load_document, read_document
from tasks.sources.draft import CharSpan, Message, Run, ToolCall, from_trajectory, is_sound, to_trajectory
from tasks.sources.side_files import read_side_file

texts = st.text(max_size=12)
maybe = st.none() | texts
calls = st.builds(ToolCall, texts, texts, maybe)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role: Role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    content = draw(st.text(max_size=30))
    author: Author = draw(st.sampled_from(["policy", "environment", "human"]))
    message = Message(role, author, content)
    if role != "assistant":
        return replace(message, tool_call_id=draw(maybe), name=draw(maybe), failed=draw(st.none() | st.booleans()))
    ends = sorted(draw(st.lists(st.integers(0, len(content)), min_size=2, max_size=2, unique=True))) if content else []
    return replace(
        message,
        reasoning=draw(maybe),
        tool_calls=tuple(draw(st.lists(calls, max_size=3))),
        action_spans=(CharSpan(*ends),) if ends else (),
    )


outcomes = st.builds(
    Outcome,
    status=st.sampled_from(["resolved", "failed", "unknown"]),
    source=st.sampled_from(["reward", "none"]),
    score=st.none() | st.floats(0, 1),
)
runs = st.builds(
    Run,
    trajectory_id=texts,
    task_id=texts,
    source_format=texts,
    source_path=texts,
    source_blake3=texts,
    messages=st.lists(messages(), max_size=4).map(tuple),
    outcome=outcomes,
    repo=maybe,
    model=maybe,
    tools_json=maybe,
    patch=maybe,
    parent_link=st.sampled_from([None, "subagent", "fork"]),
)


def public_rows(batch: list[Run]) -> list[dict[str, Any]]:
    return [to_trajectory(run).model_dump() for run in batch]


def assert_rows_are_trajectories(batch: list[Run]) -> None:
    columns = record_batch(batch)
    assert columns.equals(pa.RecordBatch.from_pylist(public_rows(batch), schema=TRAJECTORIES))
    for row, public in zip(columns.to_pylist(), public_rows(batch), strict=True):
        assert Trajectory.model_validate(row).model_dump() == public


@given(st.lists(runs, max_size=4))
@settings(max_examples=60, deadline=None)
def test_random_runs(batch: list[Run]) -> None:
    assert all(map(is_sound, batch))
    assert [from_trajectory(to_trajectory(run)) for run in batch] == batch
    assert_rows_are_trajectories(batch)


def shared_documents(shared: Path) -> list[Path]:
    return [path for path in sorted(shared.rglob("*")) if path.is_file()]


def test_shared_runs(shared_dir: Path) -> None:
    n_runs = n_pruned = 0
    for path in shared_documents(shared_dir):
        data = path.read_bytes()
        whole, pruned = read_document(data, path.name), load_document(data, path.name)
        n_pruned += whole.value != pruned.value
        assert read_side_file(pruned) == read_side_file(whole)
        if read_side_file(whole) is not None:
            continue
        try:
            adapter = find_adapter(whole)
        except SourceError:
            continue
        assert find_adapter(pruned) is adapter
        found = adapter.read_runs(pruned)
        assert found == adapter.read_runs(whole), path
        assert_rows_are_trajectories([redact(run)[0] for run in found])
        n_runs += len(found)
    assert n_runs > 90
    assert n_pruned > 10


RUN = Run(
    trajectory_id="t",
    task_id="k",
    source_format="f",
    source_path="p",
    source_blake3="s",
    messages=(
        Message("user", "human", "go"),
        Message("assistant", "policy", "text", "why", (ToolCall("f", "{}", "1"),), (CharSpan(0, 4),)),
        Message("tool", "environment", "out", tool_call_id="1", name="f", failed=False),
    ),
)
ODD: tuple[Any, ...] = (None, 1, 1.5, b"x", "", "wizard", "lone \ud800", [], (), {}, (ToolCall("f", "{}"),))
SPANS = ((CharSpan(0, 5),), (CharSpan(2, 2),), (CharSpan(-1, 2),), (CharSpan(3, 1),))


def passes(run: Run) -> bool:
    """As a trajectory, unchanged, and as UTF-8: pydantic takes lone surrogates, which no Arrow string can hold."""
    try:
        to_trajectory(run).model_dump_json()
        return repr(from_trajectory(to_trajectory(run))) == repr(run)
    except (ValidationError, PydanticSerializationError):
        return False


@pytest.mark.parametrize("field", [name for name in Run.__struct_fields__ if name not in ("messages", "outcome")])
def test_a_run_is_sound_when_it_passes_as_a_trajectory(field: str) -> None:
    for value in ODD:
        run = replace(RUN, **{field: value})
        assert is_sound(run) == passes(run), value


@pytest.mark.parametrize("field", Message.__struct_fields__)
@pytest.mark.parametrize("place", range(3))
def test_a_message_is_sound_when_it_passes_as_one(field: str, place: int) -> None:
    lists = field in ("tool_calls", "action_spans")
    odd = [(), *(SPANS if field == "action_spans" else [(ToolCall("f", "{}"),)])] if lists else ODD
    for value in odd:
        if field in ("role", "author") and not isinstance(value, str):
            continue  # adapters take these from lists of their own
        changed = replace(RUN.messages[place], **{field: value})
        run = replace(RUN, messages=(*RUN.messages[:place], changed, *RUN.messages[place + 1 :]))
        assert is_sound(run) == passes(run), value


@pytest.mark.parametrize("field", ToolCall.__struct_fields__)
def test_a_call_is_sound_when_it_passes_as_one(field: str) -> None:
    for value in ODD:
        turn = replace(RUN.messages[1], tool_calls=(replace(RUN.messages[1].tool_calls[0], **{field: value}),))
        run = replace(RUN, messages=(RUN.messages[0], turn))
        assert is_sound(run) == passes(run), value


def test_the_table_has_the_same_bytes_whichever_night_a_run_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    logs = tmp_path / "logs"
    logs.mkdir()

    def write(name: int) -> None:
        turns: list[dict[str, Any]] = [{"role": "user", "content": f"run {name}"}]
        for turn in range(rng.randint(1, 9)):
            turns.append(
                {"role": "assistant", "content": "ü" * rng.randint(0, 9), "reasoning": rng.choice([None, "r"])}
            )
            turns.append({"role": "tool", "tool_call_id": rng.choice([None, f"{turn}"]), "content": "x"})
        extra = rng.choice([{}, {"resolved": True}, {"model": "m"}])
        (logs / f"{name:03d}.json").write_bytes(msgspec.json.encode({"messages": turns, **extra}))

    config = SourceConfig(paths=(str(logs),))
    for night in range(4):
        for name in rng.sample(range(60), 25):
            write(name)
        known = ingest(config, Store(tmp_path / "store"))
        as_written = ingest(config, Store(tmp_path / f"written-{night}"))
        monkeypatch.setattr(Catalog, "finished_segment", lambda _: None)
        passed_on = ingest(config, Store(tmp_path / f"passed-{night}"))
        monkeypatch.setattr(read_logs, "ROWS_PER_BATCH", 7)  # not the table's batches, so that rows are gathered
        gathered = ingest(config, Store(tmp_path / f"gathered-{night}"))
        monkeypatch.undo()
        assert len({result.trajectories.sha256 for result in (known, as_written, passed_on, gathered)}) == 1
        assert (known.trajectories.n_rows or 0) > 16
