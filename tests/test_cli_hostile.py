"""What a hostile or unlucky user meets: each time one clear line, a non-zero exit code, and nothing else lost."""

import http.server
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from commands import DEMO, ended, file_size_limit, invoke, processes_of, settings, started, wait_for, with_database

from artifacts.gc import inventory
from artifacts.store import Store
from schemas.config import ModelConfig
from schemas.errors import StageError
from tasks.local_server import LocalServer
from tasks.model import prepare_model


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect-home"))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def one_line(code: int, err: str, expected: str, exit_code: int = 2) -> None:
    assert code == exit_code, err
    assert "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert expected in line


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sft.epochs=-1", "greater than 0 and at most 100000, got -1"),
        ("sft.epochs=nan", "finite number, got nan"),
        ("sft.epochs=inf", "finite number, got inf"),
        ("sft.epochs=1e300", "less than or equal to"),
        ("lora.alpha=inf", "finite number"),
        ("simpo.gamma=nan", "simpo.gamma: "),
        ("render.kind_weights.action=inf", "finite number"),
        ("sft.seed=1180591620717411303424", "whole numbers go up to 2147483647"),
        ("sft.accumulation=99999999999", "whole numbers go up to 2147483647"),
        ("evaluate.bootstrap_samples=99999999", "less than or equal to 1000000"),
        ("evaluate.length_buckets=[-5]", "greater than 0"),
        ("simpo.n_processes=100000", "less than or equal to 64"),
        ("lora.r=1.5", "lora.r: "),
        ("sft.optimizer.learning_rate='fast'", "expected a number, got 'fast'"),
        ("sft=3", "expected a table, got 3"),
        ("sft.epochs.x=3", "sft.epochs"),
        ("store=''", "store: "),
        ('store="a\\u0000b"', "store: text holds a NUL character"),
        ('source.paths=["a\\u0000b"]', "source.paths: text holds a NUL character"),
        (f"name='{'a' * 300}'", "name: "),
        ("name='../up'", "name: "),
        ("=3", "write KEY=VALUE"),
        ("sft.epochs", "write KEY=VALUE"),
        ("sft.epochs=[", "not TOML"),
    ],
)
def test_absurd_value_is_refused(setting: str, expected: str) -> None:
    code, _, err = invoke("run", DEMO, "--set", setting)
    one_line(code, err, expected)


def test_config_that_is_no_text_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "broken.toml").write_text("name = ")
    for name, expected in [
        ("pipe", "not a file"),
        ("binary", "cannot be read"),
        ("folder", "not a file"),
        ("broken", "not a TOML file"),
    ]:
        code, _, err = invoke("run", str(tmp_path / f"{name}.toml"))
        one_line(code, err, expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export", "/dev/zero", "--out", "{tmp}/x"], "/dev/zero: a pipe, socket or device"),
        (["export", "{tmp}/nothing", "--out", "{tmp}/x"], "nothing: no such file"),
        (["export", "{tmp}/text", "--out", "{tmp}/x"], "not a"),
        (["inspect", "/dev/zero", "--set", "store={tmp}/s"], "/dev/zero: a pipe, socket or device"),
        (["ingest", "", "--out", "{tmp}/o"], "PATH..."),
        (["ingest", "{tmp}/nothing", "--out", "{tmp}/o"], "nothing: no such file or folder"),
        (["ingest", "{tmp}/text", "--out", "{tmp}/text"], "not a folder"),
        (["ingest", "{tmp}/logs", "--out", "/proc/here"], "cannot create the artifact store"),
        (["sample", "--out", "{tmp}/s", "--tasks", "-1"], "out of range"),
        (["artifacts", "gc", "--store", "{tmp}/text"], "no artifact store"),
        (["render", DEMO, "--set", "store={tmp}/text"], "cannot create the artifact store"),
    ],
)
def test_wrong_place_is_one_line(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "logs").mkdir()
    if "source.paths" not in " ".join(arguments) and arguments[0] == "render":
        arguments = [*arguments, "--set", "source.paths=['{tmp}/text']"]
    code, _, err = invoke(*(word.replace("{tmp}", str(tmp_path)) for word in arguments))
    one_line(code, err, expected)


def test_disk_that_takes_no_more_is_one_line_and_the_next_try_succeeds(samples: Path, tmp_path: Path) -> None:
    with file_size_limit(20_000):
        code, _, err = invoke("ingest", str(samples), "--out", str(tmp_path / "out"))
    one_line(code, err, "", exit_code=1)
    assert "File too large (raise the limit" in err or f"{tmp_path / 'out'}: disk I/O error" in err
    assert not (tmp_path / "out" / "trajectories.arrow").exists()
    code, _, err = invoke("ingest", str(samples), "--out", str(tmp_path / "out"))
    assert code == 0, err


def test_model_that_cannot_be_written_is_a_stage_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with file_size_limit(1_000_000), pytest.raises(StageError, match=r"the model cannot be written: .*File too large"):
        prepare_model(ModelConfig(), store)
    assert list((tmp_path / "staging").iterdir()) == []
    assert not (tmp_path / "model").exists()
    assert prepare_model(ModelConfig(), store).n_parameters > 0


def test_private_api_that_cannot_start_says_why(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "prefect").mkdir(parents=True)
    (tmp_path / "store" / "prefect" / "prefect.db").write_bytes(b"no database" * 1000)
    with started("ingest", DEMO, *settings(tmp_path / "store", samples)) as process:
        _, err = ended(process, 2)
    one_line(2, err, "server.log: the private Prefect API ended: ")
    assert "file is not a database" in err


def test_private_api_that_ends_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefect.db").write_bytes(b"no database" * 1000)  # it ends, as it does where nothing can be written
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    server = LocalServer(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        server.wait_until_healthy()
    assert caught.value.filename == str(tmp_path)


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.mark.parametrize("command", ["run", "deploy"])
def test_server_that_cannot_be_used_is_told_before_anything_starts(
    command: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = ["deploy"] if command == "deploy" else [command, DEMO, *settings(tmp_path / "store", samples)]
    for url, expected in [
        ("http://127.0.0.1:9/api", "does not answer"),
        (f"http://127.0.0.1:{server.server_port}/api", "set PREFECT_API_AUTH_STRING"),
        ("nonsense", "not a URL"),
    ]:
        monkeypatch.setenv("PREFECT_API_URL", url)
        code, _, err = invoke(*words)
        one_line(code, err, expected)
    monkeypatch.delenv("PREFECT_API_URL")
    (tmp_path / "prefect-home").mkdir(exist_ok=True)
    (tmp_path / "prefect-home" / "profiles.toml").write_text("[[[")
    code, _, err = invoke(*words)
    one_line(code, err, "profiles.toml: cannot be read")
    server.shutdown()


def test_damaged_alias_stops_the_clean_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.staging() as folder:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_bytes(b"in charge")
        store.add(folder / "adapter", "adapter")
    (tmp_path / "aliases").mkdir()
    for content in ("", "{}", '{"adapter": 3}', '{"adapter": {"sha256"'):
        (tmp_path / "aliases" / "current.json").write_text(content)
        code, _, err = invoke("artifacts", "gc", "--store", str(tmp_path))
        one_line(code, err, "current.json: the alias cannot be read, so nothing was removed")
    assert len(inventory(tmp_path).payloads) == 1


@pytest.mark.slow
def test_two_at_once_on_a_fresh_store_compute_once(samples: Path, tmp_path: Path) -> None:
    words = ("render", DEMO, *settings(tmp_path / "store", samples), "--json")
    with started(*words) as one, started(*words) as other:
        reports = [json.loads(ended(process)[0]) for process in (one, other)]
    outcomes = [[stage["outcome"] for stage in report["stages"]] for report in reports]
    assert all(sorted(pair) == ["cached", "ran"] for pair in zip(*outcomes, strict=True)), outcomes


@pytest.mark.slow
def test_interrupted_and_killed_runs_leave_no_process_and_go_on(
    samples: Path, prefect_database: Path, tmp_path: Path
) -> None:
    """Ctrl-C in the middle of training, the same command again with kill -9 in the middle, and again to the end."""
    store = with_database(tmp_path / "store", prefect_database)
    more = ("sft.epochs=5", "sft.save_steps=2", "lora.r=2")  # 15 steps
    words = ("sft", DEMO, *settings(store, samples, *more), "--json")

    def checkpoints() -> set[str]:
        return {path.name for path in (store / "work").rglob("*.complete")}

    def nothing_is_left() -> bool:
        return not processes_of(tmp_path, "engine.train") and not processes_of(tmp_path, "tasks.local_server")

    with started(*words) as process:
        wait_for(checkpoints)
        process.send_signal(signal.SIGINT)
        out, err = ended(process, 130)
    assert json.loads(out)["error"].startswith("interrupted")
    assert "Traceback" not in err
    wait_for(nothing_is_left)
    saved = checkpoints()
    assert saved
    with started(*words) as process:
        wait_for(lambda: checkpoints() - saved)
        process.send_signal(signal.SIGKILL)
    wait_for(nothing_is_left)
    with started(*words) as process:
        out, _ = ended(process)
    assert json.loads(out)["sft"]["report"]["resumed_from_step"] >= 4
    wait_for(nothing_is_left)
