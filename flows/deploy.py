"""`traceforge deploy`: pools, deployments and automations on a Prefect server, the same after every call."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker
from pydantic import Field

from schemas.base import Frozen
from schemas.config import RunConfig
from schemas.errors import UserError
from tasks.local_server import configured_api_url, require_answer

FOLDER = Path("deployments")
POOL_LIMITS: dict[str, int | None] = {"traceforge-cpu": None, "traceforge-two-gpu": 1}
"""The limit is the lock on the GPUs: one training at a time, whatever the number of workers."""

ENDING, NOTIFYING = ("zombies", "stuck"), ("bad-night", "no-night")
"""Files of deployments/automations: what ends runs that nobody works on, and what tells people."""

PIPELINES = ("flows.full.traceforge", "flows.nightly.nightly")


class DeployReport(Frozen):
    api_url: str
    pools: dict[str, int | None] = Field(description="concurrency limit by work pool")
    deployments: tuple[str, ...]
    automations: tuple[str, ...]

    def text(self) -> str:
        return "\n".join(
            (
                f"on {self.api_url}",
                *(f"pool        {name}" + (f" (limit {limit})" if limit else "") for name, limit in self.pools.items()),
                *(f"deployment  {name}" for name in self.deployments),
                *(f"automation  {name}" for name in self.automations),
                "",
                "Next, each in its own terminal (or by deployments/systemd):",
                *(f"  prefect worker start --pool {name} --no-create-pool-if-not-found" for name in self.pools),
                "then:",
                "  prefect deployment run traceforge/full --watch",
            )
        )


def _ensure_pool(client: SyncPrefectClient, name: str, limit: int | None) -> None:
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
        )
    else:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))


def prefect_file(config: RunConfig) -> dict[str, Any]:
    """deployments/prefect.yaml with the run configuration as the parameter of the pipeline's deployments.

    Raises:
        UserError: there is no such file: the command was not started in the repository.
    """
    path = FOLDER / "prefect.yaml"
    if not path.is_file():
        raise UserError("not found", where=path, fix="run this in the root of the repository")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content.pop("definitions")
    for deployment in content["deployments"]:
        if deployment["entrypoint"] in PIPELINES:
            deployment["parameters"]["config"] = config.model_dump(mode="json")
    return content


def _keep_schedules(client: SyncPrefectClient, content: dict[str, Any]) -> None:
    """Leaves a schedule that the server has as on or off as people have put it; `active` is for its first time."""
    for deployment in content["deployments"]:
        if not deployment.get("schedules"):
            continue
        try:
            there = client.read_deployment_by_name(f"{flow_name(deployment)}/{deployment['name']}")
        except ObjectNotFound:
            continue
        known = {schedule.slug for schedule in there.schedules}
        for schedule in deployment["schedules"]:
            if schedule["slug"] in known:
                schedule.pop("active", None)


def _deploy(content: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="prefect-", delete=False) as file:
        yaml.safe_dump(content, file)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name],
            env={**os.environ, "TRACEFORGE_ROOT": str(Path.cwd())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    finally:
        Path(file.name).unlink()
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        raise UserError(f"prefect deploy failed: {' '.join(lines[-3:])}", where="deployments/prefect.yaml")


def _ensure_automation(client: SyncPrefectClient, content: dict[str, Any]) -> None:
    automation = AutomationCore.model_validate(content)
    for old in client.read_automations_by_name(automation.name):
        client.delete_automation(old.id)
    client.create_automation(automation)


def _automations(client: SyncPrefectClient, notify: str | None) -> list[dict[str, Any]]:
    """The automations to register; those that notify only once there is a block to send it through."""

    def read(name: str) -> dict[str, Any]:
        return yaml.safe_load((FOLDER / "automations" / f"{name}.yaml").read_text(encoding="utf-8"))

    found = [read(name) for name in ENDING]
    if notify is None:
        return found
    slug, _, name = notify.partition("/")
    try:
        block = client.read_block_document_by_name(name, slug, include_secrets=False)
    except ObjectNotFound as error:
        raise UserError(
            f"no notification block {notify!r}", where="--notify", fix="TYPE/NAME of a block of the Prefect server"
        ) from error
    for automation in map(read, NOTIFYING):
        automation["actions"][0]["block_document_id"] = str(block.id)
        found.append(automation)
    return found


def deploy(config: RunConfig, *, notify: str | None = None) -> DeployReport:
    """Brings the configured Prefect server to what deployments/ says. Calling it again changes nothing.

    Args:
        config: what the pipeline's deployments run by default
        notify: `TYPE/NAME` of a notification block, e.g. `slack-webhook/team`, for bad nights

    Raises:
        UserError: no server is configured, it does not answer, it refuses a deployment, or there is no such block.
    """
    url = configured_api_url()
    if url is None:
        raise UserError(
            "no Prefect server is configured",
            where="PREFECT_API_URL",
            fix="prefect server start --background; prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    require_answer(url)
    with get_client(sync_client=True) as client:
        automations = _automations(client, notify)
        for name, limit in POOL_LIMITS.items():
            _ensure_pool(client, name, limit)
        content = prefect_file(config)
        _keep_schedules(client, content)
        _deploy(content)
        for automation in automations:
            _ensure_automation(client, automation)
    return DeployReport(
        api_url=url,
        pools=POOL_LIMITS,
        deployments=tuple(f"{flow_name(item)}/{item['name']}" for item in content["deployments"]),
        automations=tuple(automation["name"] for automation in automations),
    )


def flow_name(deployment: dict[str, Any]) -> str:
    """The name under which Prefect knows a deployment's flow."""
    entrypoint = deployment["entrypoint"]
    return "traceforge" if entrypoint in PIPELINES else entrypoint.rpartition(".")[2]
