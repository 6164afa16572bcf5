"""The whole of it under a real Prefect server with real workers on loopback, as docs/OPERATE.md has it done."""

import json
import os
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPOSITORY
from prefect_site import FINAL, Site, trainings, wait_for, write_config
from ui_pages import RAW_MARKUP, card, chromium, logs, run_graph, submit_form

from artifacts.runs import read_runs
from flows.deploy import POOL_LIMITS
from schemas.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(samples: Path, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With both workers, and one run of `traceforge/full` behind it."""
    site = Site(tmp_path_factory.mktemp("site"), prefect_database)
    site.config = write_config(site.folder, samples)
    try:
        site.serve()
        site.deploy(site.config)
        for pool in POOL_LIMITS:
            site.worker(pool)
        first = site.command("prefect", "deployment", "run", "traceforge/full", "--watch")
        assert first.returncode == 0, first.stdout + first.stderr
        yield site
    finally:
        site.stop()


def test_first_run_used_both_pools_and_has_a_card_for_each_stage(site: Site) -> None:
    runs = {run["flow_name"]: (run["state_name"], run["work_pool_name"]) for run in site.flow_runs()[:4]}
    assert runs == {
        "traceforge": ("Completed", "traceforge-cpu"),
        "sft": ("Completed", "traceforge-two-gpu"),
        "simpo": ("Completed", "traceforge-two-gpu"),
        "evaluate": ("Completed", "traceforge-two-gpu"),
    }
    cards = {card["key"] for card in site.post("artifacts/filter")}
    assert {"ingest", "model", "render", "pairs", "sft", "simpo", "evaluate", "promote", "run"} <= cards


def test_run_is_seen_in_a_browser(site: Site, screenshots: Path) -> None:
    """The graph of the run, the logs of a task run rank by rank, each card as text and pictures, never as markup."""
    base = site.url.removesuffix("/api")
    runs = {run["flow_name"]: run["id"] for run in site.flow_runs()[:4]}
    (training,) = (task["id"] for task in site.post("task_runs/filter") if task["flow_run_id"] == runs["simpo"])
    cards = {card["key"]: card["id"] for card in site.post("artifacts/filter", sort="CREATED_DESC")}  # the first ones
    headings = {
        "ingest": "By outcome",
        "model": "parameters",
        "render": "Branch lengths, before any was dropped",
        "pairs": "By rule",
        "sft": "peak memory",
        "simpo": "margin, before → after",
        "evaluate": "in nats per scored token",
        "promote": "candidate",
        "run": "result",
    }
    n_pictures = {"ingest": 1, "render": 1, "sft": 1, "simpo": 1, "evaluate": 1}
    with chromium() as page:
        assert run_graph(page, base, runs["traceforge"], screenshots / "run-graph.png") > 50
        logs(page, base, "task-run", training, r"step \d+/\d+ loss", screenshots / "task-logs.png")
        for key, heading in headings.items():
            text, widths = card(page, base, cards[key], heading, screenshots / f"card-{key}.png")
            assert RAW_MARKUP.search(text) is None, (key, text)
            assert len(widths) >= n_pictures.get(key, 0), (key, widths)
            assert all(width > 100 for width in widths), (key, widths)


def test_deploying_again_leaves_what_deploying_once_did(site: Site) -> None:
    before = {item["id"] for item in site.post("deployments/filter")}
    (off,) = site.get("deployments/name/traceforge/nightly")["schedules"]
    assert off["active"] is False
    resumed = ("prefect", "deployment", "schedule", "resume", "traceforge/nightly", off["id"])
    assert site.command(*resumed).returncode == 0
    again = site.deploy(site.config)
    (still_on,) = site.get("deployments/name/traceforge/nightly")["schedules"]
    assert still_on["active"] is True
    assert site.command(*(word.replace("resume", "pause") for word in resumed)).returncode == 0
    assert {item["id"] for item in site.post("deployments/filter")} == before
    assert len(before) == len(again["deployments"]) == 6
    limits = {pool["name"]: pool["concurrency_limit"] for pool in site.post("work_pools/filter")}
    assert {name: limits[name] for name in POOL_LIMITS} == POOL_LIMITS
    assert sorted(item["name"] for item in site.post("automations/filter")) == sorted(again["automations"])


@pytest.mark.parametrize("pool", ["docker", "kubernetes"])
def test_server_takes_the_job_templates(site: Site, pool: str) -> None:
    template = json.loads((REPOSITORY / "deployments" / pool / "job-template.json").read_text())
    made = site.post("work_pools/", name=f"try-{pool}", type=pool, base_job_template=template)
    assert made["base_job_template"] == template
    del template["variables"]["properties"]["image"]
    with pytest.raises(urllib.error.HTTPError, match="422"):
        site.post("work_pools/", name=f"broken-{pool}", type=pool, base_job_template=template)


def test_second_run_is_cached_also_inline(site: Site) -> None:
    n_runs = len(site.flow_runs())
    assert site.ended(site.run("traceforge/full"))["state_type"] == "COMPLETED"
    assert len(site.flow_runs()) == n_runs + 1
    inline = site.command("traceforge", "run", str(site.config), "--json")
    assert inline.returncode == 0, inline.stderr
    assert [stage["outcome"] for stage in json.loads(inline.stdout)["stages"]] == ["cached"] * 7 + ["ran"]


def test_form_in_the_browser_runs_what_it_shows(site: Site, screenshots: Path) -> None:
    """What it sends is what was deployed, in the types that the configuration wants, but for the number typed."""
    deployed = site.get("deployments/name/traceforge/full")
    n_runs = len(site.flow_runs())
    with chromium() as page:
        base = site.url.removesuffix("/api")
        submit_form(page, base, deployed["id"], "Min Pairs (Optional)", "2", screenshots / "form.png")
    submitted = site.ended(site.flow_runs()[-1]["id"])
    config = RunConfig.model_validate(submitted["parameters"]["config"])
    assert config == RunConfig.model_validate(site.changed("promote.min_pairs=2"))
    assert submitted["state_type"] == "COMPLETED"
    assert len(site.flow_runs()) == n_runs + 1, "every stage that trains came from the cache"


def test_night_without_news_says_so(site: Site) -> None:
    night = site.ended(site.run("traceforge/nightly"))
    assert night["state_type"] == "COMPLETED"
    assert "nothing new since run" in night["state"]["message"]


def test_wrong_value_is_refused_before_anything_runs(site: Site) -> None:
    source = {"name": "site", "source": {"paths": ["x"]}}
    wrong: dict[str, dict[str, Any]] = {
        "choice": {"execution": "sideways"},
        "bound": {"config": source | {"sft": {"epochs": -1}}},
        "unknown key": {"config": source | {"sft": {"epoch": 1}}},
    }
    n_runs = len(site.flow_runs())
    for parameters in wrong.values():
        with pytest.raises(urllib.error.HTTPError, match="409"):
            site.run("traceforge/full", **parameters)
    for parameters in (wrong["bound"], {"nope": 1}):
        refused = site.command("prefect", "deployment", "run", "traceforge/full", "--params", json.dumps(parameters))
        assert refused.returncode == 1
    assert len(site.flow_runs()) == n_runs


def test_watched_run_that_fails_ends_with_1_and_the_reason(site: Site) -> None:
    watched = site.command(
        *("prefect", "deployment", "run", "traceforge/data-only", "--watch", "--params"),
        json.dumps({"config": site.changed('source.paths=["/nowhere"]')}),
    )
    assert watched.returncode == 1
    assert site.flow_runs()[-1]["state_type"] == "FAILED"
    assert "/nowhere" in site.flow_runs()[-1]["state"]["message"]


def test_equal_runs_at_the_same_time_compute_once(site: Site) -> None:
    config = site.changed("sft.seed=7")
    n_before = len(site.flow_runs())
    ids = [site.run("traceforge/full", config=config, until="sft") for _ in range(2)]
    states = [site.ended(run)["state"] for run in ids]
    assert [state["type"] for state in states] == ["COMPLETED"] * 2, [state["message"] for state in states]
    first, second = [run for run in read_runs(site.folder / "store") if run.sft is not None][-2:]
    assert first.sft == second.sft
    children = {run["id"] for run in site.flow_runs()[n_before:] if run["flow_name"] == "sft"}

    def outcomes() -> list[str]:
        return sorted(run["state_name"] for run in site.post("task_runs/filter") if run["flow_run_id"] in children)

    wait_for(lambda: outcomes() == ["Cached", "Completed"], 120, f"one computed, one found in the cache: {outcomes()}")


def test_result_of_a_stage_whose_pipeline_died_is_used(site: Site) -> None:
    config = site.changed("sft.seed=8")
    orphaned = site.run("traceforge/full", config=config, until="sft")
    wait_for(lambda: trainings(site.folder), 300, "a training process")
    for engine in psutil.Process(site.processes[1].pid).children():
        engine.kill()
    assert site.ended(orphaned)["state_type"] == "CRASHED"
    child = next(run for run in reversed(site.flow_runs()) if run["flow_name"] == "sft")
    assert site.ended(child["id"])["state_type"] == "COMPLETED"
    n_before = len(site.flow_runs())
    assert site.ended(site.run("traceforge/full", config=config, until="sft"))["state_type"] == "COMPLETED"
    assert len(site.flow_runs()) == n_before + 1
    assert [line.outcome for line in read_runs(site.folder / "store")[-1].stages] == ["cached"] * 4


def test_cancelled_training_leaves_no_process_and_a_free_pool(site: Site) -> None:
    run = site.run("traceforge/full", config=site.changed("sft.epochs=500"), until="sft")
    wait_for(lambda: trainings(site.folder), 300, "a training process")
    site.post(f"flow_runs/{run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    wait_for(lambda: not trainings(site.folder), 300, "the end of the training process")
    wait_for(lambda: all(run["state_type"] in FINAL for run in site.flow_runs()), 300, "final states of all runs")
    assert [run["flow_name"] for run in site.flow_runs() if run["state_type"] == "CANCELLED"] == ["traceforge", "sft"]
    record = read_runs(site.folder / "store")[-1]
    assert (record.status, record.message) == ("cancelled", "stopped: cancelled, or its worker was stopped")


def test_cancelled_stage_cancels_its_pipeline(site: Site) -> None:
    run = site.run("traceforge/full", config=site.changed("sft.epochs=501"), until="sft")
    wait_for(lambda: trainings(site.folder), 300, "a training process")
    child = next(run for run in reversed(site.flow_runs()) if run["flow_name"] == "sft")
    site.post(f"flow_runs/{child['id']}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    ended = site.ended(run)
    assert ended["state_type"] == "CANCELLED"
    assert "sft was cancelled" in ended["state"]["message"]
    assert read_runs(site.folder / "store")[-1].status == "cancelled"
    assert trainings(site.folder) == []


def test_killed_worker_does_not_end_its_run_and_the_next_takes_over(site: Site) -> None:
    run = site.run("traceforge/full", config=site.changed("sft.epochs=3"), until="sft")
    wait_for(lambda: trainings(site.folder), 300, "a training process")
    os.kill(site.processes[2].pid, signal.SIGKILL)
    site.worker("traceforge-two-gpu")
    assert site.ended(run)["state_type"] == "COMPLETED"
    assert trainings(site.folder) == []
