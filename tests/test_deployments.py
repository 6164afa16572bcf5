"""What deployments/ says, and the whole of it under a real Prefect server with real workers on loopback."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import REPOSITORY
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import Flow

from flows.deploy import POOL_LIMITS, flow_name, prefect_file
from flows.full import traceforge
from schemas.config import RunConfig
from schemas.load import load_config
from tasks.sample.generate import generate_samples

DEPLOYMENTS = REPOSITORY / "deployments"
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def declared() -> list[dict[str, Any]]:
    return prefect_file(load_config(REPOSITORY / "configs" / "qwen3-8b-2x24g.toml"))["deployments"]


def test_deployments_are_the_ones_that_were_promised() -> None:
    names = {f"{flow_name(item)}/{item['name']}": item["work_pool"]["name"] for item in declared()}
    assert names == {
        "traceforge/full": "traceforge-cpu",
        "traceforge/nightly": "traceforge-cpu",
        "traceforge/data-only": "traceforge-cpu",
        "sft/two-gpu": "traceforge-two-gpu",
        "simpo/two-gpu": "traceforge-two-gpu",
        "evaluate/two-gpu": "traceforge-two-gpu",
    }
    assert POOL_LIMITS == {"traceforge-cpu": None, "traceforge-two-gpu": 1}


def test_entrypoints_are_modules_and_parameters_fit_them() -> None:
    for item in declared():
        module, _, name = item["entrypoint"].rpartition(".")
        entry = getattr(importlib.import_module(module), name)
        assert isinstance(entry, Flow)
        assert entry.name == flow_name(item)
        assert set(item.get("parameters", {})) <= set(entry.parameters.properties)
        if "config" in entry.parameters.properties:
            assert RunConfig.model_validate(item["parameters"]["config"]).name == "qwen3-8b"


def test_form_of_the_ui_has_meanings_and_bounds() -> None:
    schema = traceforge.parameters.model_dump()
    assert schema["definitions"]["SftConfig"]["properties"]["epochs"]["exclusiveMinimum"] == 0
    assert "never cut" in schema["definitions"]["RenderConfig"]["properties"]["max_tokens"]["description"]
    assert schema["properties"]["execution"]["enum"] == ["inline", "pools"]


def test_nightly_schedule_is_off_until_asked_for() -> None:
    (nightly,) = (item for item in declared() if item["name"] == "nightly")
    (schedule,) = nightly["schedules"]
    assert schedule["active"] is False
    assert schedule["timezone"]


@pytest.mark.parametrize("name", ["zombies", "bad-night"])
def test_automations_are_what_prefect_understands(name: str) -> None:
    content = yaml.safe_load((DEPLOYMENTS / "automations" / f"{name}.yaml").read_text())
    for action in content["actions"]:
        if "block_document_id" in action:
            action["block_document_id"] = "00000000-0000-0000-0000-000000000000"
    assert AutomationCore.model_validate(content).enabled


def test_silence_is_longer_than_three_heartbeats_and_only_on_our_pools() -> None:
    content = yaml.safe_load((DEPLOYMENTS / "automations" / "zombies.yaml").read_text())
    assert set(content["trigger"]["match_related"]["prefect.resource.name"]) == set(POOL_LIMITS)
    for item in declared():
        heartbeat_s = int(item["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert content["trigger"]["within"] > 3 * heartbeat_s


def test_server_unit_binds_loopback_and_workers_create_no_pool() -> None:
    server = (DEPLOYMENTS / "systemd" / "traceforge-server.service").read_text()
    worker = (DEPLOYMENTS / "systemd" / "traceforge-worker@.service").read_text()
    assert "--host 127.0.0.1" in server
    assert "--no-create-pool-if-not-found" in worker


class Site:
    """A Prefect server and workers of this test's own, and the commands a person would type."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        wait_for(self._healthy, 180, "the server")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
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
        return self.start(f"{pool}-{len(self.processes)}", "prefect", "worker", "start", "--pool", pool)

    def command(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / program, *arguments],
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=400,
        )

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or b"null")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=30) as response:
            return json.loads(response.read())

    def flow_runs(self) -> list[dict[str, Any]]:
        """Oldest first, each with its deployment's flow as `flow_name`."""
        names = {flow["id"]: flow["name"] for flow in self.post("flows/filter")}
        runs = self.post("flow_runs/filter", sort="EXPECTED_START_TIME_ASC")
        return [run | {"flow_name": names[run["flow_id"]]} for run in runs]

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if found := condition():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {limit_s} s")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.stop()


def write_config(folder: Path) -> Path:
    generate_samples(folder / "samples", n_tasks=6, seed=0, runs_per_task=2, target_tokens=2_000)
    path = folder / "run.toml"
    path.write_text(
        f'name = "site"\nstore = "{folder / "store"}"\n'
        f'[source]\npaths = ["{folder / "samples"}"]\n'
        "[lora]\nr = 4\n[split]\nheldout_share = 0.3\n[evaluate]\nbootstrap_samples = 100\n"
    )
    return path


def trainings(folder: Path) -> list[int]:
    """Process ids of trainings whose spec lies below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "engine.train" in line and str(folder) in line:
            found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_server_workers_and_a_night(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path)

    # Deploying twice leaves what deploying once did.
    for _ in range(2):
        deployed = site.command("traceforge", "deploy", "--config", str(config), "--json")
        assert deployed.returncode == 0, deployed.stderr
        assert "traceforge/full" in json.loads(deployed.stdout)["deployments"]
    assert {pool["name"]: pool["concurrency_limit"] for pool in site.post("work_pools/filter")} == POOL_LIMITS
    assert len(site.post("deployments/filter")) == 6
    assert len(site.post("automations/filter")) == 1

    # A run on both pools.
    for pool in POOL_LIMITS:
        site.worker(pool)
    first = site.command("prefect", "deployment", "run", "traceforge/full", "--watch")
    assert first.returncode == 0, first.stdout + first.stderr
    runs = site.flow_runs()
    assert {run["flow_name"]: (run["state_name"], run["work_pool_name"]) for run in runs} == {
        "traceforge": ("Completed", "traceforge-cpu"),
        "sft": ("Completed", "traceforge-two-gpu"),
        "simpo": ("Completed", "traceforge-two-gpu"),
        "evaluate": ("Completed", "traceforge-two-gpu"),
    }
    cards = {card["key"] for card in site.post("artifacts/filter")}
    assert {"ingest", "model", "render", "pairs", "sft", "simpo", "evaluate", "promote", "run"} <= cards

    # The same again takes everything from the cache; so does the same inline.
    second = site.command("prefect", "deployment", "run", "traceforge/full", "--watch")
    assert second.returncode == 0, second.stdout + second.stderr
    assert len(site.flow_runs()) == len(runs) + 1
    inline = site.command("traceforge", "run", str(config), "--json")
    assert inline.returncode == 0, inline.stderr
    assert [stage["outcome"] for stage in json.loads(inline.stdout)["stages"]] == ["cached"] * 7 + ["ran"]

    # Nothing new: the night is short, and says so.
    night = site.command("prefect", "deployment", "run", "traceforge/nightly", "--watch")
    assert night.returncode == 0, night.stdout + night.stderr
    assert "nothing new since run" in site.flow_runs()[-1]["state"]["message"]

    # A value out of bounds is refused before anything runs.
    refused = site.command("prefect", "deployment", "run", "traceforge/full", "--param", "execution=sideways")
    assert refused.returncode == 1
    assert len(site.flow_runs()) == len(runs) + 3

    # Cancelled in the middle of training: nothing is left, and the pool is free for the next.
    changed = json.loads(load_config(config, ["sft.epochs=500"]).model_dump_json())
    started = site.command(
        "prefect", "deployment", "run", "traceforge/full", "--params", json.dumps({"config": changed})
    )
    assert started.returncode == 0, started.stderr
    wait_for(lambda: trainings(tmp_path), 120, "a training process")
    parent = next(run for run in reversed(site.flow_runs()) if run["flow_name"] == "traceforge")
    site.post(f"flow_runs/{parent['id']}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    wait_for(lambda: not trainings(tmp_path), 120, "the end of the training process")
    wait_for(
        lambda: all(run["state_type"] in ("COMPLETED", "CANCELLED") for run in site.flow_runs()),
        120,
        "final states of all runs",
    )
    assert [run["flow_name"] for run in site.flow_runs() if run["state_type"] == "CANCELLED"] == ["traceforge", "sft"]

    # A worker dies while its run trains: the run goes on, the next worker takes the next one.
    longer = json.loads(load_config(config, ["sft.epochs=3"]).model_dump_json())
    watched = site.start(
        "watched",
        "prefect",
        "deployment",
        "run",
        "traceforge/full",
        "--watch",
        "--params",
        json.dumps({"config": longer}),
    )
    wait_for(lambda: trainings(tmp_path), 120, "a training process")
    gpu_worker = site.processes[2]
    os.kill(gpu_worker.pid, signal.SIGKILL)
    site.worker("traceforge-two-gpu")
    assert watched.wait(300) == 0, (tmp_path / "watched.log").read_text()
    assert trainings(tmp_path) == []
