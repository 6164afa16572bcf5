"""A Prefect server and workers of a test's own on loopback, and the commands a person would type at them."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from conftest import REPOSITORY

from schemas.load import load_config

BIN = Path(sys.executable).parent
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """What the condition returns once it is true."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if found := condition():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {limit_s} s")


def write_config(folder: Path, samples: Path, more: str = "") -> Path:
    """A run of the tiny model on sample runs, with everything it writes below a folder."""
    path = folder / "run.toml"
    path.write_text(
        f'name = "site"\nstore = "{folder / "store"}"\n'
        f'[source]\npaths = ["{samples}"]\n'
        "[lora]\nr = 4\n[split]\nheldout_share = 0.3\nsalt = 'f'\n[evaluate]\nbootstrap_samples = 100\n" + more
    )
    return path


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing where it has just ended, which a zombie has too."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def trainings(folder: Path) -> list[int]:
    """Process ids of trainings whose spec lies below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "engine.train" in line and str(folder) in line:
            found.append(process.pid)
    return found


class Site:
    """The server's database and every log lie in `folder`. Nothing of it outlives `stop`."""

    config: Path
    """What is deployed; whoever writes it says so here."""

    def __init__(self, folder: Path, database: Path, password: str = "") -> None:
        """Begins with a copy of the database. With a password, server and clients have it as docs/OPERATE.md says."""
        self.folder = folder
        (folder / "prefect").mkdir()
        shutil.copy(database, folder / "prefect")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.headers = {"Content-Type": "application/json"}
        if password:
            self.environment |= {"PREFECT_SERVER_API_AUTH_STRING": password, "PREFECT_API_AUTH_STRING": password}
            self.headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def serve(self) -> subprocess.Popen[bytes]:
        """Starts the server, always on the same port and database, and waits until it answers."""
        server = self.start("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        wait_for(self._healthy, 180, "the server")
        return server

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [BIN / program, *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def worker(self, pool: str) -> subprocess.Popen[bytes]:
        return self.start(pool, "prefect", "worker", "start", "--pool", pool, "--no-create-pool-if-not-found")

    def command(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / program, *arguments],
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=400,
        )

    def deploy(self, config: Path, *arguments: str) -> dict[str, Any]:
        deployed = self.command("traceforge", "deploy", "--config", str(config), *arguments, "--json")
        assert deployed.returncode == 0, deployed.stderr
        return json.loads(deployed.stdout)

    def changed(self, *overrides: str) -> dict[str, Any]:
        """The configuration with some of its values changed, as a parameter of a run."""
        return json.loads(load_config(self.config, overrides).model_dump_json())

    def _request(self, request: urllib.request.Request) -> Any:
        """Like Prefect's own client, tries again where the server had to give way (SQLite has one writer at a time)."""
        for _ in range(10):
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    return json.loads(response.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(0.5)
        raise AssertionError(f"{request.full_url}: 503 ten times")

    def post(self, path: str, **body: Any) -> Any:
        return self._request(urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), self.headers))

    def get(self, path: str) -> Any:
        return self._request(urllib.request.Request(f"{self.url}/{path}", headers=self.headers))

    def call(self, method: str, path: str) -> Any:
        return self._request(urllib.request.Request(f"{self.url}/{path}", headers=self.headers, method=method))

    def run(self, deployment: str, **parameters: Any) -> str:
        """Submits a run of `flow/deployment`, as the UI does; its id."""
        found = self.get(f"deployments/name/{deployment}")
        return self.post(f"deployments/{found['id']}/create_flow_run", parameters=parameters)["id"]

    def flow_runs(self) -> list[dict[str, Any]]:
        """Oldest first, each with its flow's name as `flow_name`."""
        names = {flow["id"]: flow["name"] for flow in self.post("flows/filter")}
        runs = self.post("flow_runs/filter", sort="EXPECTED_START_TIME_ASC")
        return [run | {"flow_name": names[run["flow_id"]]} for run in runs]

    def ended(self, flow_run_id: str, limit_s: float = 300) -> dict[str, Any]:
        """The run in its final state."""

        def final() -> dict[str, Any] | None:
            run = self.get(f"flow_runs/{flow_run_id}")
            return run if run["state_type"] in FINAL else None

        return wait_for(final, limit_s, f"the end of run {flow_run_id}")

    def kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """kill -9 of processes and of the flow runs they started, all at the same moment, as when a host dies.

        Trainings are left to notice by themselves: they are sessions of their own, which on a real host would die too.
        """
        doomed = [psutil.Process(process.pid) for process in processes if process.poll() is None]
        doomed += [
            child
            for process in list(doomed)
            for child in process.children(recursive=True)
            if "engine.train" not in command_of(child)
        ]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(30)

    def stop(self) -> None:
        """All at once: no run is in progress any more, or its test has failed. A worker that has run flows does not
        always end within 30 s of a SIGTERM."""
        self.kill(self.processes)
        wait_for(lambda: not trainings(self.folder), 60, "the end of the training processes")
