"""What deployments/ says: names, entry points, forms, schedules, automations, units and templates."""

import importlib
import json
import re
import tomllib
from typing import Any

import prefect.settings
import pytest
import yaml
from conftest import REPOSITORY
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import Flow

from flows.deploy import ENDING, NOTIFYING, POOL_LIMITS, flow_name, prefect_file
from flows.full import traceforge
from schemas.config import RunConfig
from schemas.load import load_config
from tasks.launch import STOP_GRACE_S

DEPLOYMENTS = REPOSITORY / "deployments"


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


@pytest.mark.parametrize("name", [*ENDING, *NOTIFYING])
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


def unit(name: str) -> list[str]:
    return (DEPLOYMENTS / "systemd" / name).read_text().splitlines()


def test_server_unit_binds_loopback_and_writes_below_its_home_only() -> None:
    server = unit("traceforge-server.service")
    assert any("--host 127.0.0.1" in line for line in server)
    assert {"ProtectSystem=strict", "ReadWritePaths=/var/lib/traceforge", "UMask=0077"} <= set(server)
    environment = (DEPLOYMENTS / "systemd" / "prefect.env").read_text()
    for folder in ("PREFECT_HOME", "PREFECT_UI_STATIC_DIRECTORY"):
        assert re.search(rf"^{folder}=/var/lib/traceforge/\w+$", environment, re.MULTILINE)


def test_worker_unit_waits_for_the_server_and_lets_ranks_save() -> None:
    """Tried under systemd 252: with KillMode=mixed the ranks were killed as soon as the worker had gone."""
    worker = unit("traceforge-worker@.service")
    assert any(line.startswith("ExecStartPre=") and "server status --wait" in line for line in worker)
    assert any("--no-create-pool-if-not-found" in line for line in worker)
    assert {"KillMode=control-group", "OOMPolicy=continue", "Restart=always", "UMask=0077"} <= set(worker)
    (limit,) = (line.partition("=")[2] for line in worker if line.startswith("TimeoutStopSec="))
    assert float(limit) > STOP_GRACE_S


def test_settings_of_the_services_are_known_to_prefect() -> None:
    names = re.findall(r"^#?(PREFECT_\w+)=", (DEPLOYMENTS / "systemd" / "prefect.env").read_text(), re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        assert getattr(prefect.settings, name).name == name


def test_image_holds_all_packages_and_is_installed_with_the_constraints() -> None:
    lines = (DEPLOYMENTS / "docker" / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert {*packages, "traceforge.py", "pyproject.toml", "constraints.txt"} <= copied
    assert all((REPOSITORY / name).exists() for name in copied)
    (install,) = (line for line in lines if "pip install" in line)
    assert " -c constraints.txt " in install


@pytest.mark.parametrize("pool", ["docker", "kubernetes"])
def test_job_templates_use_the_variables_that_they_declare(pool: str) -> None:
    text = (DEPLOYMENTS / pool / "job-template.json").read_text()
    template = json.loads(text)
    used = set(re.findall(r"{{ (\w+) }}", text))
    assert used == set(template["variables"]["properties"])
    assert template["variables"]["properties"]["env"]["default"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


def test_kubernetes_job_has_what_its_worker_insists_on() -> None:
    """As prefect-kubernetes 0.8 checks it when a run starts; it was tried with that package."""
    template = json.loads((DEPLOYMENTS / "kubernetes" / "job-template.json").read_text())
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert (pod["parallelism"], pod["completions"], pod["restartPolicy"]) == (1, 1, "Never")
    assert [container["name"] for container in pod["containers"]] == ["prefect-job"]
