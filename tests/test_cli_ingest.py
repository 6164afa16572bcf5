"""`traceforge ingest PATH... --out DIR` and `traceforge export` of what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, write_log

from artifacts.tables import iter_rows, open_table
from schemas.trajectory import Trajectory

TOKEN = "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(iter_rows(open_table(folder / "trajectories.arrow")))


def test_paths_go_into_a_folder(tmp_path: Path) -> None:
    write_log(tmp_path / "logs" / "a.json", f"use {TOKEN}", resolved=True)
    single = write_log(tmp_path / "b.json", "b")
    (tmp_path / "logs" / "bad.json").write_text("{")
    out = tmp_path / "out"
    code, text, _ = invoke("ingest", tmp_path / "logs", single, "--out", out, "--json")
    assert code == 0
    told = json.loads(text)
    assert told["n_rows"] == 2
    assert json.loads((out / "ingest.json").read_text()) == told["report"]
    assert told["report"]["redactions"] == {"github_token": 2}
    assert [Path(dropped["what"]).name for dropped in told["report"]["quarantined"]] == ["bad.json"]
    card = (out / "ingest.md").read_text()
    assert "runs by length" in card
    assert "not valid JSON" in card
    assert [row["messages"][0]["content"] for row in rows(out)] == ["use [github_token-1]", "b"]
    assert {path.name for path in out.iterdir()} == {".store", "trajectories.arrow", "ingest.json", "ingest.md"}


def test_only_what_is_new_is_read_and_one_table_is_kept(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_log(logs / "a.json", "a")
    assert invoke("ingest", logs, "--out", out)[0] == 0
    write_log(logs / "b.json", "b")
    code, text, _ = invoke("ingest", logs, "--out", out)
    assert code == 0
    assert text == f"2 runs (2 unknown): {out / 'trajectories.arrow'}\n"
    assert json.loads((out / "ingest.json").read_text())["n_files_reused"] == 1
    assert len(rows(out)) == 2
    assert len(list((out / ".store").rglob("trajectories.arrow"))) == 1


def test_no_redact_is_explicit_and_recorded(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.json", f"use {TOKEN}")
    assert invoke("ingest", log, "--out", tmp_path / "out", "--no-redact")[0] == 0
    assert TOKEN in rows(tmp_path / "out")[0]["messages"][0]["content"]
    assert json.loads((tmp_path / "out" / "ingest.json").read_text())["redact"] is False
    assert "Not redacted" in (tmp_path / "out" / "ingest.md").read_text()


def test_a_format_can_be_forced(shared_dir: Path, tmp_path: Path) -> None:
    log = shared_dir / "mini-swe-agent" / "harbor_v1" / "mini-swe-agent-trajectory.json"
    for name in ("mini-swe-agent", "openai-chat"):
        assert invoke("ingest", log, "--out", tmp_path / name, "--format", name)[0] == 0
        assert rows(tmp_path / name)[0]["source_format"] == name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{tmp}/a.json"], "add --out DIR, or give one .toml file"),
        (["{tmp}/a.json", "{tmp}/b.toml"], "add --out DIR"),
        (["{tmp}/missing", "--out", "{tmp}/out"], "no such file or folder"),
        (["{tmp}/a.json", "--out", "{tmp}/out", "--format", "x"], "unknown log format 'x'"),
        (["{tmp}/a.json", "--out", "{tmp}/out", "--dedupe", "x"], "exact, near or off"),
        (["{tmp}/a.json", "--out", "{tmp}/a.json"], "not a folder"),
        (["{tmp}", "--out", "{tmp}/out"], "the output folder lies among the logs"),
        (["{tmp}/bad.json", "--out", "{tmp}/out"], "no run found in 1 files"),
        (["nowhere.toml"], "no such configuration file"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write_log(tmp_path / "a.json", "a")
    (tmp_path / "bad.json").write_text("{")
    code, _, complaint = invoke("ingest", *[word.format(tmp=tmp_path) for word in arguments])
    assert code == 2
    (line,) = complaint.splitlines()
    assert expected in line


@pytest.mark.parametrize("target", ["atif", "openai", "sharegpt"])
def test_what_is_exported_is_ingested_as_it_was(tmp_path: Path, target: str) -> None:
    write_log(tmp_path / "logs" / "a.json", "a", resolved=True)
    write_log(tmp_path / "logs" / "b.json", "b")
    assert invoke("ingest", tmp_path / "logs", "--out", tmp_path / "first")[0] == 0
    exported = tmp_path / ("exported" if target == "atif" else "exported.jsonl")
    code, _, _ = invoke("export", tmp_path / "first" / "trajectories.arrow", "--format", target, "--out", exported)
    assert code == 0
    assert invoke("ingest", exported, "--out", tmp_path / "second")[0] == 0
    first, second = (
        {row["trajectory_id"]: Trajectory.model_validate(row) for row in rows(tmp_path / name)}
        for name in ("first", "second")
    )
    assert first == second


def test_nothing_of_earlier_calls_stays_in_the_folder(tmp_path: Path) -> None:
    write_log(tmp_path / "logs" / "a.json", f"use {TOKEN}")
    out = tmp_path / "out"
    assert invoke("ingest", tmp_path / "logs", "--out", out, "--no-redact")[0] == 0
    left_half_done = out / ".store" / "staging" / "tmpkilled"
    left_half_done.mkdir(parents=True)
    for _ in range(2):
        assert invoke("ingest", tmp_path / "logs", "--out", out)[0] == 0
        assert not left_half_done.exists()
        assert {path.name for path in out.iterdir()} == {".store", "trajectories.arrow", "ingest.json", "ingest.md"}
        for path in out.rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert {oct((out / name).stat().st_mode) for name in ("ingest.json", "ingest.md", "trajectories.arrow")} == {
        "0o100644"
    }
