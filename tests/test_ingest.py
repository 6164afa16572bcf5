"""Ingestion as a whole: tables, joins, redaction, repeats, incremental nights, archives, data sets, bad input."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from ingest_inputs import rows

from artifacts.store import Store, file_sha256
from artifacts.tables import iter_rows, open_table
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import Ingested
from schemas.tables import TRAJECTORIES
from schemas.trajectory import Trajectory
from tasks import read_logs
from tasks.ingest import ingest, source_digest


def chat(text: str, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"done: {text}"}]
    return {"messages": turns, **fields}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")
    return path


def run(store: Store, *paths: Path | str, **fields: Any) -> Ingested:
    return ingest(SourceConfig(paths=tuple(map(str, paths)), **fields), store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_shared_runs_by_the_whole_way(shared_dir: Path, store: Store) -> None:
    result = run(store, shared_dir)
    report = result.report
    assert result.trajectories.n_rows == report.n_trajectories == 98
    assert [Path(dropped.what).name for dropped in report.quarantined] == ["SOURCES.md"]
    assert (report.n_files, report.n_side_files, report.n_unpaired_results) == (80, 6, 12)
    assert sum(report.length_chars.values()) == 98
    table = open_table(result.trajectories)
    assert table.schema.equals(TRAJECTORIES, check_metadata=True)
    for row in iter_rows(table):
        assert Trajectory.model_validate(row).model_dump(mode="json") == row


def test_outcomes_are_joined_on_run_and_instance(tmp_path: Path, store: Store) -> None:
    for folder in ("one", "two", "three"):
        write(tmp_path / "logs" / folder / "o__r-1.json", chat(folder, instance_id="o__r-1"))
    write(tmp_path / "logs" / "one" / "report.json", {"resolved_ids": ["o__r-1"], "unresolved_ids": []})
    write(tmp_path / "logs" / "model.two.json", {"resolved_ids": [], "unresolved_ids": ["o__r-1"]})
    write(tmp_path / "logs" / "model.other.json", {"resolved_ids": ["o__r-1"], "unresolved_ids": []})
    found = {row["run_id"]: row["outcome"]["status"] for row in rows(run(store, tmp_path / "logs"))}
    assert found == {"one": "resolved", "two": "failed", "three": "unknown"}


def test_a_report_that_names_the_run_wins_over_one_in_its_folder(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "two" / "o__r-1.json", chat("x", instance_id="o__r-1"))
    write(tmp_path / "logs" / "two" / "report.json", {"resolved_ids": ["o__r-1"]})
    write(tmp_path / "logs" / "model.two.json", {"resolved_ids": [], "unresolved_ids": ["o__r-1"]})
    assert rows(run(store, tmp_path / "logs"))[0]["outcome"]["status"] == "failed"


def test_the_nearest_report_wins(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "a" / "b" / "o__r-1.json", chat("x", instance_id="o__r-1"))
    write(tmp_path / "logs" / "report.json", {"resolved_ids": ["o__r-1"]})
    write(tmp_path / "logs" / "a" / "b" / "report.json", {"resolved_ids": [], "unresolved_ids": ["o__r-1"]})
    assert rows(run(store, tmp_path / "logs"))[0]["outcome"]["status"] == "failed"


def test_reward_files_of_a_trial(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "trial-1" / "agent" / "run.json", chat("a"))
    (tmp_path / "logs" / "trial-1" / "verifier").mkdir()
    (tmp_path / "logs" / "trial-1" / "verifier" / "reward.txt").write_text("0.0\n")
    write(tmp_path / "logs" / "trial-2" / "agent" / "run.json", chat("b"))
    found = [row["outcome"] for row in rows(run(store, tmp_path / "logs"))]
    assert found[0] == {"status": "failed", "source": "reward", "score": 0.0}
    assert found[1]["status"] == "unknown"


@pytest.mark.parametrize("reward", ["3", "-0.5", "1e400", "1" + 400 * "0"])
def test_a_reward_of_another_scale_is_told(reward: str, tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "trial-1" / "run.json", chat("a"))
    (tmp_path / "logs" / "trial-1" / "reward.json").write_text(f'{{"reward": {reward}}}')
    result = run(store, tmp_path / "logs")
    assert [row["outcome"]["status"] for row in rows(result)] == ["unknown"]
    (left_out,) = result.report.quarantined
    said = reward.replace("1e400", "inf")[:20]
    assert left_out.reason == f"a reward of {said} where one in [0, 1] is expected: rescale it"


def test_nothing_secret_reaches_the_disk(tmp_path: Path, store: Store) -> None:
    token = "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"
    write(tmp_path / "run.json", chat(f"use {token} of nora@corp.io"))
    result = run(store, tmp_path / "run.json")
    assert result.report.redactions == {"email": 2, "github_token": 2}
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()
    open_result = run(store, tmp_path / "run.json", redact=False)
    assert not open_result.report.redact
    assert open_result.report.redactions == {}
    assert token in rows(open_result)[0]["messages"][0]["content"]


def test_equal_runs_stay_once_the_known_outcome_first(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "a.json", chat("same"))
    write(tmp_path / "logs" / "b.json", chat("same", resolved=True))
    result = run(store, tmp_path / "logs")
    assert [row["outcome"]["status"] for row in rows(result)] == ["resolved"]
    (dropped,) = result.report.duplicates
    assert dropped.what.endswith("a.json")
    assert dropped.reason.endswith("b.json")
    assert len(rows(run(store, tmp_path / "logs", dedupe="off"))) == 2


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_equal_runs_with_contradicting_verdicts_are_unknown_whatever_their_names(
    names: tuple[str, str], tmp_path: Path, store: Store
) -> None:
    for name, resolved in zip(names, (True, False), strict=True):
        write(tmp_path / "logs" / f"{name}.json", chat("same", resolved=resolved))
    write(tmp_path / "logs" / "c.json", chat("same"))
    result = run(store, tmp_path / "logs")
    assert [row["outcome"] for row in rows(result)] == [{"status": "unknown", "source": "none", "score": None}]
    assert [Path(dropped.what).name for dropped in result.report.duplicates] == ["b.json", "c.json"]
    assert all(" contradicting outcomes" in dropped.reason for dropped in result.report.duplicates)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_verdict_of_tests_counts_more_than_a_claim(names: tuple[str, str], tmp_path: Path, store: Store) -> None:
    verdicts = ({"success": True}, {"success": True, "test_result": {"report": {"resolved": False}}})
    events = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "same"}},
        {"id": 1, "source": "agent", "action": "finish", "args": {"final_thought": "end"}},
    ]
    for name, verdict in zip(names, verdicts, strict=True):
        write(tmp_path / "logs" / f"{name}.json", {"instance_id": "o__r-1", "history": events, **verdict})
    (row,) = rows(run(store, tmp_path / "logs"))
    assert row["outcome"] == {"status": "failed", "source": "test_report", "score": None}


def test_earlier_states_of_one_conversation_are_repeats(tmp_path: Path, store: Store) -> None:
    messages = [{"role": "user", "content": "go"}]
    for number in range(3):
        answer = {"role": "assistant", "content": f"step {number}"}
        log = {"messages": list(messages), "response": {"choices": [{"message": answer}]}}
        write(tmp_path / "logs" / f"call-{number}.json", log)
        messages += [answer, {"role": "user", "content": f"EXECUTION RESULT of [terminal]: {number}"}]
    result = run(store, tmp_path / "logs")
    (row,) = rows(result)
    assert sum(message["role"] == "assistant" for message in row["messages"]) == 3
    assert {Path(dropped.what).name for dropped in result.report.duplicates} == {"call-0.json", "call-1.json"}


def test_near_repeats_need_equal_outcomes(tmp_path: Path, store: Store) -> None:
    words = [f"word{number}" for number in range(400)]
    for name, ending, resolved in (("a", "x", True), ("b", "y", True), ("c", "z", False)):
        log = {"messages": [{"role": "user", "content": "t"}], "task_id": "t", "resolved": resolved}
        log["messages"].append({"role": "assistant", "content": " ".join([*words, ending])})
        write(tmp_path / "logs" / f"{name}.json", log)
    write(tmp_path / "logs" / "d.json", chat("something else", task_id="t", resolved=True))
    result = run(store, tmp_path / "logs", dedupe="near")
    assert [Path(row["source_path"]).stem for row in rows(result)] == ["a", "c", "d"]
    assert [Path(dropped.what).stem for dropped in result.report.duplicates] == ["b"]


def test_only_changed_files_are_read_again(tmp_path: Path, store: Store) -> None:
    logs = tmp_path / "logs"
    for name in "abc":
        write(logs / f"{name}.json", chat(name))
    first = run(store, logs)
    keys = [source_digest(SourceConfig(paths=(str(logs),)))]
    again = run(store, logs)
    assert again.trajectories == first.trajectories
    assert (again.report.n_files, again.report.n_files_reused) == (3, 3)
    write(logs / "b.json", chat("b changed"))
    (logs / "c.json").unlink()
    write(logs / "d.json", chat("d"))
    keys.append(source_digest(SourceConfig(paths=(str(logs),))))
    second = run(store, logs)
    assert (second.report.n_files, second.report.n_files_reused) == (3, 1)
    assert [row["messages"][0]["content"] for row in rows(second)] == ["a", "b changed", "d"]
    assert second.trajectories == run(Store(tmp_path / "fresh"), logs).trajectories.model_copy(
        update={"path": second.trajectories.path}
    )
    assert len(set(keys)) == 2


def test_an_interrupted_night_is_not_read_again(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        write(tmp_path / "logs" / f"{name}.json", chat(name))
    monkeypatch.setattr(read_logs, "_RECORDED_RUNS", 1)
    monkeypatch.setattr(read_logs, "ROWS_PER_BATCH", 1)

    def stop(n_files: int) -> None:
        if n_files == 3:
            raise KeyboardInterrupt

    config = SourceConfig(paths=(str(tmp_path / "logs"),))
    with pytest.raises(KeyboardInterrupt):
        ingest(config, store, progress=stop)
    result = ingest(config, store)
    assert result.report.n_files_reused == 2
    assert [row["messages"][0]["content"] for row in rows(result)] == list("abcd")
    leftover = {path.name for path in (tmp_path / "store" / "ingested").rglob("*.arrow")}
    assert len(leftover) == 2


def segments(store: Store) -> list[Path]:
    return sorted((store.root / "ingested").rglob("*.arrow"))


def test_rows_of_a_first_night_are_written_once(tmp_path: Path, store: Store) -> None:
    for name in "abc":
        write(tmp_path / "logs" / f"{name}.json", chat(name))
    first = run(store, tmp_path / "logs")
    assert [path.stat().st_ino for path in segments(store)] == [Path(first.trajectories.path).stat().st_ino]
    write(tmp_path / "logs" / "d.json", chat("a"))  # a repeat: the table is not the segment any more
    write(tmp_path / "logs" / "e.json", chat("e"))
    second = run(store, tmp_path / "logs")
    assert len(segments(store)) == 2
    assert [row["messages"][0]["content"] for row in rows(second)] == list("abce")


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("how", ["overwritten", "cut", "segment gone"])
def test_a_damaged_table_or_segment_is_read_anew(tmp_path: Path, store: Store, how: str, changed: bool) -> None:
    for name in "abc":
        write(tmp_path / "logs" / f"{name}.json", chat(name))
    table = Path(run(store, tmp_path / "logs").trajectories.path)
    if how == "segment gone":
        segments(store)[0].unlink()
    else:
        data = table.read_bytes()
        with table.open("r+b") as file:  # in place: the segment is the same file
            file.write(data.replace(b"done", b"gone"))
            file.truncate(len(data) if how == "overwritten" else len(data) // 2)
    if changed:
        write(tmp_path / "logs" / "d.json", chat("d"))
    result = run(store, tmp_path / "logs")
    fresh = run(Store(tmp_path / "fresh"), tmp_path / "logs")
    assert result.trajectories.sha256 == fresh.trajectories.sha256
    assert file_sha256(Path(result.trajectories.path)) == fresh.trajectories.sha256


def test_a_segment_of_mostly_dead_rows_is_given_up(tmp_path: Path, store: Store) -> None:
    for name in "abcd":
        write(tmp_path / "logs" / f"{name}.json", chat(name))
    run(store, tmp_path / "logs")
    (old,) = segments(store)
    for name in "abc":
        write(tmp_path / "logs" / f"{name}.json", chat(f"{name} changed"))
    second = run(store, tmp_path / "logs")
    assert old not in segments(store)
    third = run(store, tmp_path / "logs")
    assert (second.report.n_files_reused, third.report.n_files_reused) == (1, 3)
    assert third.trajectories == second.trajectories


def test_a_report_that_comes_later_is_joined_without_reading_runs_again(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "logs" / "run.json", chat("a", instance_id="o__r-1"))
    assert rows(run(store, tmp_path / "logs"))[0]["outcome"]["status"] == "unknown"
    write(tmp_path / "logs" / "report.json", {"resolved_ids": ["o__r-1"]})
    result = run(store, tmp_path / "logs")
    assert result.report.n_files_reused == 1
    assert rows(result)[0]["outcome"] == {"status": "resolved", "source": "test_report", "score": None}


def make_tar(path: Path, members: dict[str, bytes], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_every_container_gives_the_same_runs(tmp_path: Path, store: Store) -> None:
    records = [chat(f"task {number}") for number in range(5)]
    members = {f"run/{number}.json": json.dumps(record).encode() for number, record in enumerate(records)}
    lines = "\n".join(map(json.dumps, records)).encode()
    (tmp_path / "lines.jsonl").write_bytes(lines)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines))
    make_zip(tmp_path / "runs.zip", members)
    make_tar(tmp_path / "runs.tar.gz", members)
    make_tar(tmp_path / "runs.tar", members, "w")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    expected = [record["messages"][0]["content"] for record in records]
    for name in ("lines.jsonl", "lines.jsonl.gz", "runs.zip", "runs.tar.gz", "runs.tar", "rows.parquet"):
        found = rows(run(store, tmp_path / name))
        assert [row["messages"][0]["content"] for row in found] == expected, name
        assert {row["trajectory_id"] for row in found} == {
            row["trajectory_id"] for row in rows(run(store, tmp_path / name))
        }


def test_reports_inside_archives_are_joined(tmp_path: Path, store: Store) -> None:
    members = {
        "a/run.json": json.dumps(chat("x", instance_id="o__r-1")).encode(),
        "a/report.json": b'{"resolved_ids": ["o__r-1"]}',
    }
    assert rows(run(store, make_zip(tmp_path / "a.zip", members)))[0]["outcome"]["status"] == "resolved"


@pytest.mark.parametrize("zstd", [False, True])
def test_eval_archives(shared_dir: Path, tmp_path: Path, store: Store, zstd: bool) -> None:
    log = json.loads((shared_dir / "inspect" / "browser.json").read_bytes())
    sample = json.dumps(log.pop("samples")[0]).encode()
    path = tmp_path / "run.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("header.json", json.dumps(log))
        archive.writestr("summaries.json", "[]")
        archive.writestr("samples/1_epoch_1.json", zstandard.compress(sample) if zstd else sample)
    if zstd:  # method 93, which this Python cannot write: patched into both headers
        data = bytearray(path.read_bytes())
        for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            at = data.rfind(mark)
            data[at + offset : at + offset + 2] = (93).to_bytes(2, "little")
        path.write_bytes(data)
    (row,) = rows(run(store, path))
    (plain,) = rows(run(store, shared_dir / "inspect" / "browser.json"))
    assert row["messages"] == plain["messages"]
    assert (row["task_id"], row["outcome"]) == (plain["task_id"], plain["outcome"])


def test_a_local_data_set_by_name(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([chat("one"), chat("two")]), folder / "train.parquet")
    found = rows(run(store, f"hf:{folder}:train"))
    assert [row["messages"][0]["content"] for row in found] == ["one", "two"]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda folder: folder / "missing", "no such file or folder"),
        (lambda folder: folder, "an empty folder"),
        (lambda folder: folder / "*.none", "no such file or folder"),
        (lambda folder: write(folder / "x.json", {"a": 1}), "no run found in 1 files; most often: no known log format"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, store: Store, make: Any, what: str) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with pytest.raises(UserError, match=what) as caught:
        run(store, make(folder))
    assert "\n" not in str(caught.value)


def test_an_unknown_format_names_the_known_ones(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "a.json", chat("a"))
    with pytest.raises(UserError, match=r"unknown log format 'x'.*mini-swe-agent"):
        run(store, tmp_path / "a.json", format="x")


def test_globs_and_repeated_paths(tmp_path: Path, store: Store) -> None:
    for name in "ab":
        write(tmp_path / "logs" / name / "run.json", chat(name))
    write(tmp_path / "logs" / ".hidden" / "run.json", chat("hidden"))
    result = run(store, tmp_path / "logs" / "*" / "run.json", tmp_path / "logs")
    assert [row["messages"][0]["content"] for row in rows(result)] == ["a", "b"]
