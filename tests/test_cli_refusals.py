"""Full disks, empty paths, pipes and calls at the same time: `ingest --out`, `export` and `inspect`."""

import json
import multiprocessing
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest
from commands import PROGRAM, file_size_limit, invoke, write_log
from typer.testing import CliRunner

import traceforge
from artifacts.locks import alone
from artifacts.tables import iter_rows, open_table
from flows.ingest_logs import ingest_logs
from tasks.sources.base import reward_outcome


@pytest.mark.parametrize("target", ["openai", "sharegpt"])
def test_a_failed_export_leaves_what_was_there(tmp_path: Path, target: str) -> None:
    write_log(tmp_path / "logs" / "a.json", "long " * 100_000)
    assert invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")[0] == 0
    exported = tmp_path / "exported" / "x.jsonl"
    arguments = ("export", tmp_path / "out" / "trajectories.arrow", "--format", target, "--out", exported)
    assert invoke(*arguments)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    with file_size_limit(100_000):
        code, _, complaint = invoke(*arguments)
    assert code == 1
    (line,) = complaint.splitlines()
    assert line.startswith(f"error: {tmp_path / 'exported'}/{next(iter(before))}: File too large (")
    assert {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()} == before


def test_a_folder_is_exported_whole_or_not_at_all(tmp_path: Path) -> None:
    """And into a new or empty folder only: documents of an earlier export would be read with it."""
    write_log(tmp_path / "logs" / "a.json", "long " * 100_000)
    assert invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")[0] == 0
    exported = tmp_path / "deep" / "exported"
    arguments = ("export", tmp_path / "out" / "trajectories.arrow", "--format", "atif", "--out", exported)
    with file_size_limit(100_000):
        code, _, complaint = invoke(*arguments)
    assert code == 1
    assert complaint.startswith(f"error: {exported}: File too large (")
    assert not list(exported.parent.iterdir())
    exported.mkdir()
    assert invoke(*arguments)[0] == 0
    assert len(list(exported.iterdir())) == 1
    code, _, complaint = invoke(*arguments)
    assert code == 2
    assert complaint == f"error: {exported}: a folder with something in it (give --out a new or empty folder)\n"


@pytest.mark.parametrize(("command", "option"), [("export", "--out"), ("inspect", "--html")])
def test_what_is_read_is_not_overwritten(tmp_path: Path, command: str, option: str) -> None:
    write_log(tmp_path / "logs" / "a.json", "a")
    assert invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")[0] == 0
    table = tmp_path / "out" / "trajectories.arrow"
    (tmp_path / "other.arrow").symlink_to(table)
    before = table.read_bytes()
    for written in (table, tmp_path / "other.arrow"):
        code, _, complaint = invoke(command, table, option, written)
        assert code == 2
        assert complaint == f"error: {written}: it would overwrite what is read (give {option} another file)\n"
    assert table.read_bytes() == before


@pytest.mark.parametrize("command", ["export nope --out x --json", "artifacts list --store {tmp}/store --json"])
@pytest.mark.parametrize("stdout", ["> /dev/full", ">&-"])
def test_results_that_cannot_be_printed_are_one_line(tmp_path: Path, command: str, stdout: str) -> None:
    (tmp_path / "store").mkdir()
    words = f"{PROGRAM} {command.format(tmp=tmp_path)} {stdout}"
    done = subprocess.run(words, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_a_configuration_of_the_project_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "a.json", "a")
    monkeypatch.chdir(tmp_path)
    assert invoke("inspect", "a.json")[0] == 0


def test_aider_names_its_log_like_a_hidden_file(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / ".aider.chat.history.md").write_text(
        "# aider chat started at 2026-01-02 03:04:05\n\n#### fix it\n\nDone.\n"
    )
    code, out, _ = invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")
    assert (code, out.partition(" ")[0]) == (0, "1")


def test_a_full_disk_while_ingesting_names_the_folder(tmp_path: Path) -> None:
    write_log(tmp_path / "logs" / "a.json", "long " * 100_000)
    with file_size_limit(200_000):
        code, _, complaint = invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")
    assert code == 1
    (line,) = complaint.splitlines()
    assert line.startswith(f"error: {tmp_path / 'out'}")
    assert "`store`" not in line
    assert invoke("ingest", tmp_path / "logs", "--out", tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ingest", "", "--out", "{tmp}/out"], "PATH...: an empty path"),
        (["ingest", "{tmp}/a.json", "--out", ""], "--out: an empty path"),
        (["export", "{tmp}/a.json", "--out", " "], "--out: an empty path"),
        (["inspect", "{tmp}/pipe"], "a pipe, socket or device"),
        (["inspect", "{tmp}"], "a folder, not a file"),
        (["inspect", "{tmp}/none"], "no such file"),
        (["export", "{tmp}/pipe", "--out", "{tmp}/out"], "a pipe, socket or device"),
        (["export", "{tmp}/a.json", "--out", "{tmp}"], "a folder lies there"),
        (
            ["ingest", "{tmp}/a.json", "--out", "{tmp}/out", "--set", "source.redact=false"],
            "--set: it changes a config",
        ),
        (["ingest", "{tmp}/a.json", "--out", "{tmp}/out", "--refresh", "sft"], "--refresh: it changes a configuration"),
        (["ingest", "{tmp}/a.json", "--out", "{tmp}/out", "--format", ""], "--format: String should have at least 1"),
        (["ingest", "a" * 5000, "--out", "{tmp}/out"], "PATH...: String should have at most 4096 characters"),
        (["ingest"], "ingest: missing argument 'PATH...' ("),
        (["ingest", "{tmp}/a.json", "--bogus"], "no such option: --bogus"),
        (["plan", "--tokens", "-1"], "invalid value for '--tokens'"),
        (["inspect", "{tmp}/a.json", "--row", "abc"], "invalid value for '--row'"),
        (["nonsense"], "no such command 'nonsense'"),
        (["--nonsense"], "no such option: --nonsense"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write_log(tmp_path / "a.json", "a")
    os.mkfifo(tmp_path / "pipe")
    given = [word.format(tmp=tmp_path) for word in arguments]
    code, _, complaint = invoke(*given)
    assert code == 2
    (line,) = complaint.splitlines()
    assert expected in line
    told = CliRunner().invoke(traceforge.app, [*given, "--json"])
    assert told.exit_code == 2
    assert f"error: {json.loads(told.stdout)['error']}" == told.stderr.strip()


def test_a_call_waits_for_the_one_before(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "a.json", "a"), tmp_path / "out"
    with ThreadPoolExecutor(1) as pool:
        with alone(out / ".store" / "ingest.lock"):
            call = pool.submit(ingest_logs, [str(log)], out)
            with pytest.raises(TimeoutError):
                call.result(timeout=0.5)
            assert not (out / "ingest.json").exists()
        assert call.result(timeout=300).n_rows == 1


def _n_rows(paths: list[str], out: Path) -> int:
    return ingest_logs(paths, out).n_rows


def test_calls_at_the_same_time_all_succeed_and_the_last_one_stands_whole(tmp_path: Path) -> None:
    sets = [[str(write_log(tmp_path / f"{i}-{j}.json", f"{i} {j}")) for j in range(i + 1)] for i in range(2)]
    out = tmp_path / "out"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(_n_rows, [(paths, out) for paths in sets] * 2, chunksize=1) == [1, 2] * 2
    n_rows = len(list(iter_rows(open_table(out / "trajectories.arrow"))))
    assert json.loads((out / "ingest.json").read_text())["n_trajectories"] == n_rows
    assert {path.name for path in out.iterdir()} == {".store", "trajectories.arrow", "ingest.json", "ingest.md"}


@pytest.mark.parametrize("value", [2**70, -1, -0.1, 1.5, 100, float("nan"), float("inf"), None, "1"])
def test_a_reward_of_another_scale_is_unknown(value: object) -> None:
    outcome = reward_outcome(value)
    assert (outcome.status, outcome.score) == ("unknown", None)


def test_rewards_in_the_unit_interval_are_outcomes() -> None:
    assert [reward_outcome(value).status for value in (0, 0.5, 1, True)] == ["failed", "failed", "resolved", "resolved"]
