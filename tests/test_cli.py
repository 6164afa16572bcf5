"""The command line: help, one JSON object, one line for each error, exit codes, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from typer.testing import CliRunner

import traceforge
from artifacts.store import Store
from tasks.sample.generate import generate_samples

PROGRAM = Path(sys.executable).parent / "traceforge"
DEMO = str(REPOSITORY / "configs" / "demo.toml")
COMMANDS = [command.callback.__name__ for command in traceforge.app.registered_commands if command.callback]
ARTIFACTS = ["list", "show", "verify", "gc"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    generate_samples(folder, n_tasks=3, seed=0, runs_per_task=2, target_tokens=2_000)
    return folder


def invoke(*arguments: str) -> tuple[int, str, str]:
    """In this process: for commands that end before Prefect is needed."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(traceforge.app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
    )


def settings(store: Path, source: Path, *more: str) -> list[str]:
    pairs = (f"store={store}", f'source.paths=["{source}"]', *more)
    return [word for pair in pairs for word in ("--set", pair)]


def wait_for(condition: Callable[[], object], limit_s: float = 120) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.1)


def processes_of(store: Path, word: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or ())
        home = (process.info["environ"] or {}).get("PREFECT_HOME", "")
        if word in line and (str(store) in line or str(store) in home):
            found.append(process.pid)
    return found


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
    start_s = time.monotonic()
    subprocess.run([PROGRAM, "--help"], check=True, capture_output=True)
    assert time.monotonic() - start_s < 3.0  # 0.2 s on a quiet machine; imports of Prefect or torch would cost more


def model_without_weights(folder: Path) -> str:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    return str(folder / "m")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nowhere.toml"], "nowhere.toml: no such configuration file"),
        (["run", DEMO, "--set", "sft.epoch=1"], "sft.epoch: unknown key; did you mean epochs?"),
        (["run", DEMO, "--set", "source.paths=['/nowhere']"], "/nowhere"),
        (["run", DEMO, "--set", "source.paths=['{tmp}/empty']"], "{tmp}/empty"),
        (["run", DEMO, "--refresh", "sftt"], "--refresh: no stage 'sftt' (one of ingest, model"),
        (
            ["plan", "--config", DEMO, "--set", "model.name={tmp}/m", "--set", "store={tmp}/s"],
            "a model folder without weights",
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


def test_second_run_is_cached_and_json_is_one_object(samples: Path, tmp_path: Path) -> None:
    for outcome in ("ran", "cached"):
        process = start("ingest", DEMO, *settings(tmp_path / "store", samples), "--json")
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        report = json.loads(out)
        assert [(stage["stage"], stage["outcome"]) for stage in report["stages"]] == [("ingest", outcome)]
        assert report["ingested"]["report"]["n_trajectories"] == 6
        assert "trajectories.arrow" in err
    wait_for(lambda: not processes_of(tmp_path, "tasks.local_server"), 20)


def test_killed_command_leaves_no_api_process(samples: Path, tmp_path: Path) -> None:
    process = start("ingest", DEMO, *settings(tmp_path / "store", samples))
    wait_for(lambda: processes_of(tmp_path, "tasks.local_server"))
    process.kill()
    process.communicate()
    wait_for(lambda: not processes_of(tmp_path, "tasks.local_server"), 30)


@pytest.mark.slow
def test_interrupt_in_training_ends_with_130_and_leaves_no_process(samples: Path, tmp_path: Path) -> None:
    more = ("sft.epochs=1000", "model.name=tiny-qwen3")
    process = start("sft", DEMO, *settings(tmp_path / "store", samples, *more), "--json")
    wait_for(lambda: processes_of(tmp_path, "engine.train"))
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(out)["error"].startswith("interrupted")
    assert "Traceback" not in err
    wait_for(
        lambda: not processes_of(tmp_path, "engine.train") and not processes_of(tmp_path, "tasks.local_server"), 30
    )


def test_plan_needs_a_model_config_alone() -> None:
    options = ("--tokens", "81920", "--gpu-gib", "11", "--host-gib", "110", "--json")
    code, out, _ = invoke("plan", "--model", "qwen3-8b", *options)
    report = json.loads(out)
    assert code == 0
    assert report["peak_device_bytes"] <= report["device_limit_bytes"]
    assert report["longest_tokens"] >= 81_920
