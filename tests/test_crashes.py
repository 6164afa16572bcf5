"""Dead workers, servers and hosts under real processes: every run comes to an end, and the next one goes on."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect_site import FINAL, Site, trainings, wait_for, write_config

from artifacts.runs import read_runs
from engine.checkpoints import latest_checkpoint
from flows.deploy import POOL_LIMITS
from schemas.runs import RunReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PASSWORD = "admin:a-password"
SILENCE_S = 100
"""deployments/automations/zombies.yaml"""
LIMIT_S = SILENCE_S + 30 + 20
"""What docs/OPERATE.md promises, counted from the death: the silence, counted from the last heartbeat to arrive, and
the 30 s after which the server looks."""
SLACK_S = 60
"""What a machine that runs other tests may take longer."""


class Webhook:
    """Stands where the people would be: keeps what is posted to it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        messages = self.messages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def about(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        return [message for message in self.messages if run["name"] in message["body"]]


class Host(Site):
    """A machine that can be switched off, with everything that runs on it, and on again."""

    webhook: Webhook

    def switch_on(self) -> None:
        self.processes.clear()
        self.serve()
        for pool in POOL_LIMITS:
            self.worker(pool)

    def switch_off(self) -> None:
        """All at once and without a word."""
        self.kill(self.processes)

    def checkpoint(self) -> Path | None:
        work = self.folder / "store" / "work"
        return next(filter(None, map(latest_checkpoint, work.glob("sft-*"))), None)

    def last_sft(self) -> RunReport:
        return [run for run in read_runs(self.folder / "store") if run.sft is not None][-1]


@pytest.fixture(scope="module")
def host(samples: Path, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("host"), prefect_database, PASSWORD)
    host.config = write_config(host.folder, samples, "[sft]\nsave_steps = 3\nepochs = 6\n")
    host.webhook = Webhook()
    try:
        host.switch_on()
        with temporary_settings({PREFECT_API_URL: host.url, PREFECT_API_AUTH_STRING: PASSWORD}):
            form = {"text": "{{subject}}", "body": "{{body}}"}
            CustomWebhookNotificationBlock(
                name="team", url=host.webhook.url, json_data=form, headers=None, cookies=None
            ).save("team")
        deployed = host.deploy(host.config, "--notify", "custom-webhook/team")
        assert {"traceforge-crash-silent-runs", "traceforge-bad-night"} <= set(deployed["automations"])
        yield host
    finally:
        host.webhook.server.shutdown()
        host.stop()


def test_run_of_a_dead_gpu_host_is_ended_and_goes_on_elsewhere(host: Host) -> None:
    """The worker and its run die together; their pool has one slot, which the dead run holds until it is ended."""
    run = host.run("traceforge/full", config=host.changed("sft.seed=2"), until="sft")
    wait_for(host.checkpoint, 300, "a checkpoint")
    silent = host.run("traceforge/nightly")  # a night whose process died before its first heartbeat
    host.post(f"flow_runs/{silent}/set_state", state={"type": "RUNNING", "name": "Running"})
    died_s = time.monotonic()
    host.kill(host.processes[2:3])
    wait_for(lambda: not trainings(host.folder), 180, "the end of the training process")
    assert host.checkpoint() is not None
    lost = next(run for run in reversed(host.flow_runs()) if run["flow_name"] == "sft")
    assert lost["state_type"] == "RUNNING"
    host.processes[2:3] = [host.worker("traceforge-two-gpu")]
    del host.processes[3:]
    crashed = host.ended(lost["id"], LIMIT_S + SLACK_S - (time.monotonic() - died_s))
    assert (crashed["state_type"], crashed["state"]["message"]) == ("CRASHED", f"no heartbeat for {SILENCE_S} s")
    night = host.ended(silent, 180)
    (message,) = wait_for(lambda: host.webhook.about(night), 180, "the notification")
    assert message["text"] == "traceforge: a bad night (Crashed)"
    assert host.ended(run)["state_type"] == "COMPLETED"
    sft = host.last_sft().sft
    assert sft is not None
    assert sft.report.resumed_from_step >= 3


def test_after_a_reboot_the_next_run_goes_on_from_the_last_checkpoint(host: Host) -> None:
    config = host.changed("sft.seed=3")
    night = host.run("traceforge/nightly", config=config)
    wait_for(host.checkpoint, 300, "a checkpoint")
    host.switch_off()
    wait_for(lambda: not trainings(host.folder), 180, "the end of the training process")
    died_s = time.monotonic()
    host.switch_on()
    again = host.run("traceforge/full", config=config, until="sft")  # waits for the slot of the dead run
    crashed = host.ended(night, LIMIT_S + 60 + SLACK_S - (time.monotonic() - died_s))
    assert (crashed["state_type"], crashed["state"]["message"]) == ("CRASHED", f"no heartbeat for {SILENCE_S} s")
    assert host.ended(again)["state_type"] == "COMPLETED"
    sft = host.last_sft().sft
    assert sft is not None
    assert sft.report.resumed_from_step >= 3
    assert [run for run in host.flow_runs() if run["state_type"] not in FINAL] == []
    assert trainings(host.folder) == []
    assert host.checkpoint() is None  # the working folder went with its purpose


def test_bad_night_is_told_and_a_failed_day_is_not(host: Host) -> None:
    config = host.changed('source.paths=["/nowhere"]')
    day = host.ended(host.run("traceforge/data-only", config=config))
    night = host.ended(host.run("traceforge/nightly", config=config))
    assert day["state_type"] == night["state_type"] == "FAILED"
    (message,) = wait_for(lambda: host.webhook.about(night), 180, "the notification")
    assert message["text"] == "traceforge: a bad night (Failed)"
    assert "/nowhere: no such file or folder" in message["body"]
    assert f"runs/flow-run/{night['id']}" in message["body"]
    assert host.webhook.about(day) == []


def test_run_that_nobody_takes_is_told_and_one_that_never_starts_is_ended(host: Host) -> None:
    """The automations `no-night` and `stuck`, with seconds for their hour and half hour."""
    shortened = []
    for automation in host.post("automations/filter"):
        if automation["name"] in ("traceforge-no-night", "traceforge-crash-stuck-runs"):
            host.call("DELETE", f"automations/{automation['id']}")
            automation["trigger"]["within"] = 10  # the least that Prefect takes
            shortened.append({key: automation[key] for key in ("name", "trigger", "actions")})
    assert len(shortened) == 2
    made = [host.post("automations/", **automation)["id"] for automation in shortened]
    deployment = host.get("deployments/name/traceforge/nightly")["id"]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    waiting = {"type": "SCHEDULED", "state_details": {"scheduled_time": tomorrow}}  # so that no worker takes it
    nights = {
        name: host.post(f"deployments/{deployment}/create_flow_run", parameters={}, state=waiting)
        for name in ("late", "stuck")
    }
    host.post(f"flow_runs/{nights['late']['id']}/set_state", state=waiting | {"name": "Late"}, force=True)
    host.post(f"flow_runs/{nights['stuck']['id']}/set_state", state={"type": "PENDING"}, force=True)
    ended = host.ended(nights["stuck"]["id"], 60)
    assert (ended["state_type"], ended["state"]["message"]) == (
        "CRASHED",
        "taken by a worker 30 min ago and never started",
    )
    link = f"runs/flow-run/{nights['late']['id']}"
    (message,) = wait_for(lambda: [m for m in host.webhook.messages if link in m["body"]], 60, "the notification")
    assert message["text"] == "traceforge: the night has not begun"
    host.call("DELETE", f"flow_runs/{nights['late']['id']}")
    for automation in made:  # nothing below needs them
        host.call("DELETE", f"automations/{automation}")


def test_training_goes_on_while_the_server_is_away(host: Host) -> None:
    run = host.run("traceforge/full", config=host.changed("sft.epochs=8"), until="sft")
    (training,) = wait_for(lambda: trainings(host.folder), 300, "a training process")
    host.processes[0].send_signal(signal.SIGKILL)
    host.processes[0].wait(10)
    time.sleep(3)
    assert trainings(host.folder) == [training]
    workers = host.processes[1:]
    host.processes.clear()
    host.serve()
    host.processes.extend(workers)
    assert host.ended(run)["state_type"] == "COMPLETED"
    sft = host.last_sft().sft
    assert sft is not None
    assert sft.report.resumed_from_step == 0
    assert all(run["state_type"] in FINAL for run in host.flow_runs())
