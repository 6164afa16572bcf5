"""Files whose records are of several formats."""

import json
from pathlib import Path

import pytest
from ingest_inputs import chat, damage, first_words, rows, run

MINI_TURNS = [
    {"role": "user", "content": "mini"},
    {"role": "assistant", "content": "x\n```mswea_bash_command\nls\n```"},
    {"role": "user", "content": "<returncode>0</returncode>"},
]
MIXED = [
    chat("chat"),
    {"trajectory_format": "mini-swe-agent-1.1", "info": {"submission": "PATCH"}, "messages": MINI_TURNS},
    chat("chat too"),
    {"task_id": 3, "reward": 1.0, "traj": chat("tau")["messages"]},
]
FORMATS = ["openai-chat", "mini-swe-agent", "openai-chat", "tau-bench"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("as_lines", [True, False])
def test_each_record_is_read_by_the_reader_that_knows_it(
    order: tuple[int, ...], as_lines: bool, tmp_path: Path
) -> None:
    records = [MIXED[index] for index in order]
    data = "\n".join(map(json.dumps, records)) if as_lines else json.dumps(records)
    (tmp_path / "mixed.json").write_text(data)
    found = rows(run(tmp_path / "mixed.json"))
    assert [row["source_format"] for row in found] == [FORMATS[index] for index in order]
    (mini,) = (row for row in found if row["source_format"] == "mini-swe-agent")
    assert mini["patch"] == "PATCH"
    assert [message["author"] for message in mini["messages"]] == ["harness", "policy", "environment"]


def test_a_bad_record_of_another_format_costs_only_itself(tmp_path: Path) -> None:
    broken = {**MIXED[1], "messages": [{"role": "nobody", "content": "x"}]}
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, [MIXED[0], broken, MIXED[2]])))
    result = run(tmp_path / "mixed.jsonl")
    assert first_words(result) == ["chat", "chat too"]
    (told,) = damage(result)
    assert told.startswith("line 2: unknown message role 'nobody'")
