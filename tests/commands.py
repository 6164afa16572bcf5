"""The command line under test, in this process and as a process of its own."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from conftest import REPOSITORY
from typer.testing import CliRunner

import traceforge

PROGRAM = Path(sys.executable).parent / "traceforge"
DEMO = str(REPOSITORY / "configs" / "demo.toml")


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    """In this process: for commands that end before Prefect is needed. Exit code, standard output and error."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(traceforge.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def write_log(path: Path, text: str, **fields: Any) -> Path:
    """A run of one turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"done: {text}"}]
    path.write_text(json.dumps({"messages": turns, **fields}))
    return path


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """What a full disk is like, for every user: a write beyond it is refused, and the error names no path."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as at a terminal: an interrupt reaches it, also where the tests themselves run in the background."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def settings(store: Path, source: Path, *more: str) -> list[str]:
    pairs = (f"store={store}", f'source.paths=["{source}"]', *more)
    return [word for pair in pairs for word in ("--set", pair)]


def ended(process: subprocess.Popen[str], exit_code: int = 0) -> tuple[str, str]:
    """What the command printed on stdout and stderr until it ended, with this exit code."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == exit_code, err
    return out, err


def wait_for(condition: Callable[[], object], limit_s: float = 300) -> None:
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


def with_database(store: Path, database: Path) -> Path:
    """The store, with a private API's database that needs no migrations any more."""
    (store / "prefect").mkdir(parents=True)
    shutil.copy(database, store / "prefect")
    return store
