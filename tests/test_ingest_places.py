"""Where in a file the damage is: records before the first good one, and numbers that count through the whole file."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingest_inputs import chat, damage, first_words, line, reasons, run

from tasks import archives
from tasks.sources import Document

# a bad first record ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [b'{"meta": 1}', b"{}", b'{"messages": null}', b'{"messages": 5}', b'{"bad', b"5", b"null", b'"x"']
)
def test_a_bad_first_line_costs_only_itself(logs: Path, first: bytes) -> None:
    (logs / "a.jsonl").write_bytes(b"\n".join((first, line("one"), line("two"))))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    assert damage(result)[0].startswith("line 1: ")
    assert not result.report.quarantined


def test_a_bad_first_record_of_an_array_costs_only_itself(logs: Path) -> None:
    (logs / "a.json").write_text(json.dumps([5, {"meta": 1}, chat("one"), None, {"messages": 3}, chat("two")]))
    result = run(logs)
    assert set(first_words(result)) == {"one", "two", "good"}
    assert sorted(reason.split(":")[0] for reason in damage(result)) == [f"record {n}" for n in (1, 2, 4, 5)]


def test_a_conversation_is_not_looked_into_for_another(logs: Path) -> None:
    """A list of messages whose first is unknown is one damaged conversation, and not one that begins later."""
    (logs / "a.json").write_text(json.dumps([{"odd": 1}, *chat("one")["messages"]]))
    assert reasons(run(logs)) == {"a.json": "no known log format"}


def test_an_unknown_file_stays_one_reason(logs: Path) -> None:
    (logs / "a.jsonl").write_bytes(b'{"x": 1}\n' * 100)
    result = run(logs)
    assert reasons(result) == {"a.jsonl": "no known log format"}
    assert not result.report.damaged


def test_rows_are_counted_through_the_whole_of_a_parquet_file(logs: Path) -> None:
    rows: list[dict[str, Any]] = [chat(f"r{n}") for n in range(70)]
    rows[0] = rows[40] = {"messages": None}
    pq.write_table(pa.Table.from_pylist(rows), logs / "a.parquet")
    result = run(logs)
    assert len(first_words(result)) == 69
    assert [reason.split(":")[0] for reason in damage(result)] == ["record 1", "record 41"]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_counted_through_the_whole_of_a_file_read_in_pieces(
    logs: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(archives, "_PIECE_BYTES", 2000)
    monkeypatch.setattr(archives, "MAX_DOCUMENT_BYTES", 6000)
    lines = [line(f"l{number}") for number in range(1, 201)]
    lines[0] = b'{"meta": 1}'
    lines[99] = lines[149] = b'{"messages": 5}'
    lines[119] = b'{"cut'
    lines[139] = line("x" * 20_000)
    data = b"\n".join(lines)
    (logs / "a.jsonl").write_bytes(data) if not packed else (logs / "a.jsonl.gz").write_bytes(gzip.compress(data))
    result = run(logs)
    assert len(first_words(result)) == 196
    assert [reason.split(":")[0] for reason in damage(result)] == [
        "line 1",
        "line 100",
        "line 120",
        "line 140",
        "line 150",
    ]


def test_the_format_that_was_asked_for_also_reads_files_in_pieces(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_PIECE_BYTES", 2000)
    path = logs / "a.jsonl"
    path.write_bytes(b"\n".join(line(f"l{number}") for number in range(100)))
    found = [document for document in archives.file_documents(path, "sharegpt") if isinstance(document, Document)]
    assert len(found) > 1
    assert not list(archives.file_documents(path, "claude-code"))[1:]  # one session, read whole
