"""The command line: help, one JSON object, one line for each error, exit codes, and nothing left behind."""

import json
import resource
import subprocess
from pathlib import Path

import psutil
import pytest
from commands import DEMO, PROGRAM, ended, invoke, processes_of, settings, started, wait_for

import traceforge
from artifacts.store import Store

COMMANDS = [command.callback.__name__ for command in traceforge.app.registered_commands if command.callback]
ARTIFACTS = ["list", "show", "verify", "gc"]


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), *(["artifacts", name] for name in ARTIFACTS)])
def test_help_says_what_is_read_and_written_and_json_is_there(command: list[str]) -> None:
    name = [word.removesuffix("_") for word in command]
    code, text, _ = invoke(*name, "--help")
    words = " ".join(text.replace("│", " ").split())
    assert code == 0
    assert "--json" in words
    assert "eads" in words
    assert "writes" in words.lower() or "trains nothing" in words


def test_help_is_quick() -> None:
    before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run([PROGRAM, "--help"], check=True, capture_output=True)
    used_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before_s
    assert used_s < 1.5  # of CPU time; 0.2 measured on a quiet machine, and imports of Prefect or torch take 1 to 4


def model_without_weights(folder: Path) -> str:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    return str(folder / "m")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nowhere.toml"], "nowhere.toml: no such configuration file (there is: configs/"),
        (["run", "/nowhere/a.toml"], "no such configuration file (there is none in /nowhere)"),
        (["plan", "--model", ""], "--model: an empty name (give qwen3-8b, or a folder with config.json)"),
        (["run", DEMO, "--set", "sft.epoch=1"], "sft.epoch: unknown key; did you mean epochs?"),
        (["run", DEMO, "--set", "source.paths=['/nowhere']"], "/nowhere"),
        (["run", DEMO, "--set", "source.paths=['{tmp}/empty']"], "{tmp}/empty"),
        (["run", DEMO, "--refresh", "sftt"], "--refresh: no stage 'sftt' (one of ingest, model"),
        (
            ["plan", "--config", DEMO, "--set", "model.name={tmp}/m", "--set", "store={tmp}/s"],
            "{tmp}/m/config.json: model_type: Field required",
        ),
        (
            ["plan", "--config", DEMO, "--set", "store={tmp}/s", "--gpu-gib", "0.1", "--tokens", "9000000"],
            "does not fit",
        ),
        (["inspect", "/nowhere.json", "--set", "store={tmp}/s"], "/nowhere.json: no such file"),
        (["artifacts", "list", "--store", "{tmp}/none"], "{tmp}/none: no artifact store"),
        (["artifacts", "show", "ff", "--store", "{tmp}/store"], "0 payloads whose digest begins with 'ff'"),
        (["sample", "--out", "{tmp}/strangers"], "not sample runs"),
        (["deploy"], "no Prefect server is configured"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    model_without_weights(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "thesis.txt").write_text("mine")
    Store(tmp_path / "store")
    filled = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    code, out, err = invoke(*filled, "--json")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert expected.replace("{tmp}", str(tmp_path)) in errors[0]
    assert json.loads(out)["error"] == errors[0].removeprefix("error: ")
    assert "Traceback" not in err


def test_every_wrong_key_is_told(tmp_path: Path) -> None:
    code, out, err = invoke("run", DEMO, "--set", "sft.epoch=1", "--set", "lora.r=0", "--json")
    assert code == 2
    assert err.count("error: ") == len(json.loads(out)["errors"]) == 2


def test_store_is_listed_shown_verified_and_cleaned(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.staging() as folder:
        (folder / "pairs.arrow").write_bytes(b"rows")
        ref = store.add(folder / "pairs.arrow", "pairs", n_rows=1)
    at = ["--store", str(store.root)]
    code, out, _ = invoke("artifacts", "list", *at, "--json")
    assert code == 0
    assert json.loads(out)["payloads"][0]["path"] == ref.path
    assert json.loads(invoke("artifacts", "show", ref.sha256[:6], *at, "--json")[1])["n_bytes"] == 4
    assert invoke("artifacts", "verify", *at)[0] == 0
    Path(ref.path).write_bytes(b"ROWS")
    code, _, err = invoke("artifacts", "verify", *at)
    assert (code, err) == (1, f"error: {ref.path}: altered\n")
    assert json.loads(invoke("artifacts", "gc", *at, "--dry-run", "--json")[1])["freed_bytes"] == 4
    assert Path(ref.path).exists()
    assert json.loads(invoke("artifacts", "gc", *at, "--json")[1])["removed"][0]["path"] == ref.path
    assert not Path(ref.path).exists()


def test_first_run_starts_soon_and_the_second_is_cached(samples: Path, tmp_path: Path) -> None:
    """The first on a fresh store, with a private API that boots beside it.

    What it takes up to its first stage is told in seconds of each process's own CPU time, which other tests do not
    lengthen much: measured are 2.2 for the command and 7.6 for the API (3.3 on a store that exists).
    """
    words = ("ingest", DEMO, *settings(tmp_path / "store", samples), "--json")
    with started(*words) as process:
        wait_for(lambda: list((tmp_path / "store" / "runs").glob("*.json")))
        command = psutil.Process(process.pid)
        (api,) = command.children()
        assert sum(command.cpu_times()[:2]) < 6.0
        assert sum(api.cpu_times()[:2]) < 15.0
        assert_ingested(*ended(process), "ran")
    with started(*words) as process:
        assert_ingested(*ended(process), "cached")
    wait_for(lambda: not processes_of(tmp_path, "tasks.local_server"))


def assert_ingested(out: str, err: str, outcome: str) -> None:
    report = json.loads(out)
    assert [(stage["stage"], stage["outcome"]) for stage in report["stages"]] == [("ingest", outcome)]
    assert report["ingested"]["report"]["n_trajectories"] == 8
    assert "trajectories.arrow" in err


def test_killed_command_leaves_no_api_process(samples: Path, tmp_path: Path) -> None:
    with started("ingest", DEMO, *settings(tmp_path / "store", samples)):
        wait_for(lambda: processes_of(tmp_path, "tasks.local_server"))
    wait_for(lambda: not processes_of(tmp_path, "tasks.local_server"))


def test_plan_needs_a_model_config_alone() -> None:
    options = ("--tokens", "81920", "--gpu-gib", "11", "--host-gib", "110", "--json")
    code, out, _ = invoke("plan", "--model", "qwen3-8b", *options)
    report = json.loads(out)
    assert code == 0
    assert report["peak_device_bytes"] <= report["device_limit_bytes"]
    assert report["longest_tokens"] >= 81_920
