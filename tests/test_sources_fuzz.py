"""Each adapter on mutated real files and on made-up JSON: no exception other than SourceError.

Time is bounded by EXAMPLES; raise it for a long run.
"""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.redact import redact
from tasks.sources import ADAPTERS, Adapter, Document, SourceError, find_adapter, read_document
from tasks.sources.draft import Run, from_trajectory, to_trajectory
from tasks.sources.side_files import read_side_file

EXAMPLES = 40
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,  # the machine may be busy; time is bounded by the number of examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["assistant", "user", "tool", "text", "tool_use", "tool_result", "agent", "policy", "", "\0"])
)
KEYS = (
    *("role", "content", "messages", "tool_calls", "function", "name", "arguments", "id", "type", "text", "history"),
    *("trajectory", "steps", "source", "message", "observation", "action", "args", "kind", "uuid", "parentUuid"),
    *("sessionId", "payload", "item", "nodes", "node_id", "parent_id", "conversations", "from", "value", "prompt"),
    *("completion", "reward", "traj", "task_id", "log", "problem", "samples", "eval", "plan", "epoch", "target"),
    *("contents", "parts", "kwargs", "lc", "class_", "input", "output", "results", "extra", "info", "traceforge"),
    *("transitions", "tool_call_metadata", "model_response", "choices", "resolved", "resolved_ids", "instance_id"),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=25,
)


def read_or_refuse(adapter: Adapter, document: Document) -> list[Run]:
    """What must always hold: runs that pass as trajectories, or SourceError; asked for beneath what guards the user."""
    try:
        adapter.detect(document)
        runs = adapter.sound_runs(document)
    except SourceError:
        return []
    assert [from_trajectory(to_trajectory(run)) for run in runs] == runs
    return runs


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
@given(value=values, lines=st.booleans())
@BOUNDED
def test_made_up_values(adapter: Adapter, value: Any, lines: bool) -> None:
    records = value if isinstance(value, list) else [value]
    document = Document("f", "s", "jsonl" if lines else "json", records if lines else value)
    for run in read_or_refuse(adapter, document):
        redact(run)
    read_side_file(document)
    with contextlib.suppress(SourceError):
        read_side_file(replace(document, path="reward.json"))


AIDER_LINES = (
    "# aider chat started at 2024-08-22 10:00:00",
    "#### do it",
    "####",
    "> Added x.py",
    "```python",
    "```",
    "",
)


def mutations(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to places in a JSON value, few per list."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += mutations(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(4, len(value))):
            found += mutations(value[index], (*path, index))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: replaced(value[key], tuple(rest), new)}
    return [*value[:key], replaced(value[key], tuple(rest), new), *value[key + 1 :]]


BY_HAND: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "openai-chat",
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "out"},
    ),
    (
        "anthropic-messages",
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]},
    ),
)


@pytest.fixture(scope="module")
def real_documents(shared_dir: Path) -> dict[str, Document]:
    """The smallest shared document of each format, and one by hand of those without any."""
    found = {
        name: Document("f", "s", "json", {"messages": [{"role": "user", "content": "go"}, turn, result]})
        for name, turn, result in BY_HAND
    }
    for path in sorted(shared_dir.rglob("*"), key=lambda path: path.stat().st_size):
        if path.is_file() and path.stat().st_size < 130_000:
            document = read_document(path.read_bytes(), path.name)
            if document.kind in ("json", "jsonl") and read_side_file(document) is None:
                found.setdefault(find_adapter(document).name, document)
    return found


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
@given(data=st.data())
@BOUNDED
def test_mutated_real_files(adapter: Adapter, real_documents: dict[str, Document], data: st.DataObject) -> None:
    if adapter.name == "aider":
        text = "\n".join(data.draw(st.lists(st.sampled_from(AIDER_LINES) | st.text(max_size=20), max_size=12)))
        read_or_refuse(adapter, Document("f", "s", "text", text))
        return
    document = real_documents[adapter.name]
    value = document.value
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(mutations(value)))
        value = replaced(value, place, data.draw(values))
    records = value if isinstance(value, list) or document.kind == "json" else [value]
    for run in read_or_refuse(adapter, Document("f", "s", document.kind, records)):
        redact(run)


ODD: tuple[Any, ...] = (None, 5, True, 1.5, "text", [], {}, [None], [5], ["text"], {"a": 1})


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_an_odd_value_at_each_of_the_outer_places(adapter: Adapter, real_documents: dict[str, Document]) -> None:
    """Each value at each place near the top of a real file, where random choice seldom puts two and two together."""
    if adapter.name == "aider":
        return  # text has no places
    document = real_documents[adapter.name]
    places = [place for place in mutations(document.value) if len(place) <= 4]
    for place in places[:: 1 + len(places) // 40]:
        for odd in ODD:
            value = replaced(document.value, place, odd)
            for run in read_or_refuse(adapter, Document("f", "s", document.kind, value)):
                assert all(call.name for message in run.messages for call in message.tool_calls)


@given(data=st.binary(max_size=400) | values.map(lambda value: json.dumps(value).encode()))
@BOUNDED
def test_any_bytes(data: bytes) -> None:
    try:
        document = read_document(data)
        find_adapter(document).read_document(document)
    except SourceError:
        return


@given(cut=st.integers(0, 10_000), noise=st.binary(max_size=8))
@BOUNDED
def test_cut_and_noisy_files(real_documents: dict[str, Document], cut: int, noise: bytes) -> None:
    for document in real_documents.values():
        data = orjson.dumps(document.value)
        place = cut % len(data)
        for damaged in (data[:place], data[:place] + noise + data[place + len(noise) :]):
            try:
                parsed = read_document(damaged)
                find_adapter(parsed).read_document(parsed)
            except SourceError:
                continue
