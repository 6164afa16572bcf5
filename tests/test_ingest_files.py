"""Which files are read, and when again: sessions of one file an event, hidden edits, digests; what is left out."""

import json
import os
import socket
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ingest_inputs import line, rows

from artifacts.store import Store
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import LISTED, Ingested
from tasks import archives, input_files
from tasks.ingest import ingest, source_digest
from tasks.input_files import InputFile, find_files


def run(store: Path, *paths: Path | str, **fields: Any) -> Ingested:
    return ingest(SourceConfig(paths=tuple(map(str, paths)), **fields), Store(store))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


# sessions of one file an event ----------------------------------------------------------------------------------


def keep_as_events(shared_dir: Path, folder: Path) -> list[dict[str, Any]]:
    events = json.loads((shared_dir / "openhands" / "replay_basic_gui_mode.json").read_bytes())
    folder.mkdir(parents=True)
    for number, event in enumerate(events):
        (folder / f"{number}.json").write_text(json.dumps(event))
    assert len(events) > 10  # 10.json sorts before 2.json
    return events


def test_a_session_of_one_file_an_event_is_one_run(shared_dir: Path, tmp_path: Path, logs: Path) -> None:
    keep_as_events(shared_dir, logs / "sessions" / "s1" / "events")
    (logs / "sessions" / "s1" / "event_cache").mkdir()
    (logs / "sessions" / "s1" / "event_cache" / "0-25.json").write_text("[]")
    (logs / "sessions" / "s1" / "metadata.json").write_text("{}")
    result = run(tmp_path / "store", logs)
    (row,) = rows(result)
    (plain,) = rows(run(tmp_path / "plain", shared_dir / "openhands" / "replay_basic_gui_mode.json"))
    assert row["messages"] == plain["messages"]
    assert row["source_path"] == str(logs / "sessions" / "s1" / "events")
    assert [dropped.reason for dropped in result.report.quarantined if "event_cache" in dropped.what] == [
        "a copy of events that lie beside it"
    ]


def packed(folder: Path, archive: Path, kind: str) -> None:
    """The folder's files, last name first: an archive has them in any order."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), reverse=True)
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for path in files:
                zipped.write(path, path.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz") as tarred:
            for path in files:
                tarred.add(path, path.relative_to(folder))


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_sessions_in_an_archive_are_read_like_those_in_folders(
    shared_dir: Path, tmp_path: Path, logs: Path, kind: str
) -> None:
    for name in ("s1", "s2"):
        keep_as_events(shared_dir, tmp_path / "sessions" / name / "events")
    (tmp_path / "sessions" / "s1" / "event_cache").mkdir()
    (tmp_path / "sessions" / "s1" / "event_cache" / "0-25.json").write_text("[]")
    (tmp_path / "sessions" / "s1" / "7.json").write_bytes(line("a run called like an event"))
    packed(tmp_path / "sessions", logs / f"all.{kind}", kind)
    result = run(tmp_path / "store", logs, dedupe="off")
    inside = {row["source_path"].partition("!/")[2]: row["messages"] for row in rows(result)}
    (plain,) = rows(run(tmp_path / "plain", shared_dir / "openhands" / "replay_basic_gui_mode.json"))
    assert set(inside) == {"s1/events", "s2/events", "s1/7.json"}
    assert inside["s1/events"] == inside["s2/events"] == plain["messages"]
    assert [dropped.reason for dropped in result.report.quarantined] == ["a copy of events that lie beside it"]


def test_sessions_larger_than_the_limit_are_refused_in_bounded_memory(
    shared_dir: Path, tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_as_events(shared_dir, tmp_path / "events")
    packed(tmp_path, logs / "all.zip", "zip")
    (logs / "good.json").write_bytes(line("good"))
    n_bytes = sum(path.stat().st_size for path in (tmp_path / "events").iterdir())
    monkeypatch.setattr(archives, "MAX_DOCUMENT_BYTES", n_bytes - 1)
    result = run(tmp_path / "store", logs)
    assert [row["messages"][0]["content"] for row in rows(result)] == ["good"]
    assert {dropped.reason for dropped in result.report.quarantined} == {
        "sessions of more than 0 MiB in an archive: unpack it first"
    }


def test_events_of_the_sdk_are_a_session_too(shared_dir: Path, tmp_path: Path, logs: Path) -> None:
    lines = (shared_dir / "openhands" / "sdk_events.jsonl").read_text().splitlines()
    (logs / "events").mkdir()
    for number, event in enumerate(lines):
        (logs / "events" / f"event-{number:05d}-0a1b2c3d-0000.json").write_text(event)
    (row,) = rows(run(tmp_path / "store", logs))
    (plain,) = rows(run(tmp_path / "plain", shared_dir / "openhands" / "sdk_events.jsonl"))
    assert row["messages"] == plain["messages"]


def test_a_session_that_grows_or_loses_an_event_is_read_again(shared_dir: Path, tmp_path: Path, logs: Path) -> None:
    events = keep_as_events(shared_dir, logs / "events")
    last = logs / "events" / f"{len(events) - 1}.json"
    text = last.read_text()
    last.unlink()
    first = run(tmp_path / "store", logs)
    assert run(tmp_path / "store", logs).report.n_files_reused == 1
    last.write_text(text)
    grown = run(tmp_path / "store", logs)
    assert grown.report.n_files_reused == 0
    assert grown.trajectories.sha256 != first.trajectories.sha256
    (logs / "events" / "3.json").write_text('{"cut')
    damaged = run(tmp_path / "store", logs).report.damaged
    assert [dropped.reason.partition(":")[0] for dropped in damaged] == ["3.json"]


def test_numbered_runs_are_no_session(tmp_path: Path, logs: Path) -> None:
    for number in (1, 2, 10):
        (logs / f"{number}.json").write_bytes(line(f"run {number}"))
    assert [row["messages"][0]["content"] for row in rows(run(tmp_path / "store", logs))] == [
        "run 1",
        "run 10",
        "run 2",
    ]


# when a file is read again --------------------------------------------------------------------------------------


def edit_in_secret(path: Path, data: bytes) -> None:
    """Another content of the same size, with the time of the last write put back."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("settled_ns", [0, 10**12])
def test_an_edit_that_keeps_size_and_time_is_seen(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, settled_ns: int
) -> None:
    monkeypatch.setattr(input_files, "_SETTLED_NS", settled_ns)
    config = SourceConfig(paths=(str(logs),))
    (logs / "a.json").write_bytes(line("one"))
    keys = [source_digest(config, tmp_path / "store")]
    run(tmp_path / "store", logs)
    assert run(tmp_path / "store", logs).report.n_files_reused == 1
    edit_in_secret(logs / "a.json", line("two"))
    keys.append(source_digest(config, tmp_path / "store"))
    assert [row["messages"][0]["content"] for row in rows(run(tmp_path / "store", logs))] == ["two"]
    assert keys[0] != keys[1]
    assert keys[1] == source_digest(config)


def test_a_fresh_file_is_told_by_content_when_its_times_say_nothing(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (logs / "a.json").write_bytes(line("one"))
    (found,) = find_files([str(logs)])
    frozen = InputFile(found.path, "always the same", is_settled=False)
    monkeypatch.setattr("tasks.ingest.find_files", lambda _: iter([frozen]))
    run(tmp_path / "store", logs)
    assert run(tmp_path / "store", logs).report.n_files_reused == 1
    (logs / "a.json").write_bytes(line("two"))
    assert [row["messages"][0]["content"] for row in rows(run(tmp_path / "store", logs))] == ["two"]


def test_each_file_is_hashed_once_for_the_key_and_the_rows(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_SETTLED_NS", 0)
    (logs / "a.json").write_bytes(line("one"))
    config = SourceConfig(paths=(str(logs),))
    hashed: list[Path] = []

    def note(path: Path) -> str:
        hashed.append(path)
        return "f" * 64

    monkeypatch.setattr(input_files, "file_blake3", note)
    source_digest(config, tmp_path / "store")
    (row,) = rows(run(tmp_path / "store", logs))
    source_digest(config, tmp_path / "store")
    assert hashed == [logs / "a.json"]
    assert row["source_blake3"] == "f" * 64


# what is left out -----------------------------------------------------------------------------------------------


def test_long_lists_are_counted_whole_and_lie_in_the_store(tmp_path: Path, logs: Path) -> None:
    (logs / "good.json").write_bytes(line("good"))
    (logs / "same.json").write_bytes(line("good"))
    for number in range(LISTED + 50):
        (logs / f"bad-{number}.json").write_bytes(b"{")
    report = run(tmp_path / "store", logs).report
    assert (report.n_quarantined, len(report.quarantined), report.n_duplicates) == (LISTED + 50, LISTED, 1)
    listed = list(map(json.loads, Path(report.left_out).read_text().splitlines()))
    assert sum(entry["kind"] == "quarantined" for entry in listed) == LISTED + 50
    assert listed[-1] == {"kind": "duplicates", **report.duplicates[0].model_dump()}
    assert sum(report.left_out_by_reason.values()) == LISTED + 51
    assert report.left_out_by_reason["repeats …"] == 1


# data sets on a hub ---------------------------------------------------------------------------------------------


def test_a_hub_that_cannot_be_reached_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(UserError, match="data set cannot be loaded") as caught:
        run(tmp_path / "store", "hf:nobody/nothing:train")
    assert "\n" not in str(caught.value)
