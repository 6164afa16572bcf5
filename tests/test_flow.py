"""The DAG under a real Prefect API: what runs again and what does not, what happens when a stage fails."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from fake_stages import FakeStages, install, write_source
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from artifacts.gc import collect, inventory
from artifacts.locks import in_use, locked
from artifacts.runs import read_runs, run_id
from flows.full import traceforge
from flows.nightly import nightly
from schemas.config import RunConfig
from schemas.errors import UserError
from schemas.requests import StageName
from schemas.runs import RunReport

ALL = ("ingest", "model", "render", "pairs", "sft", "simpo", "evaluate", "promote")
CACHED = ALL[:-1]  # a promotion is a decision about the store as it is now, never a cached one


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    settings: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings(settings), prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    return install(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "test", "store": str(tmp_path / "store"), "source": {"paths": [write_source(tmp_path / "runs")]}}
    )


def changed(config: RunConfig, section: str, **fields: Any) -> RunConfig:
    data = config.model_dump()
    data[section] |= fields
    return RunConfig.model_validate(data)


def run(config: RunConfig, **parameters: Any) -> RunReport:
    report = traceforge(config, **parameters)
    assert isinstance(report, RunReport)
    return report


def outcomes(report: RunReport) -> dict[str, str]:
    return {line.stage: line.outcome for line in report.stages}


def ran(report: RunReport) -> list[str]:
    return [line.stage for line in report.stages if line.outcome == "ran" and line.stage != "promote"]


def test_second_run_takes_every_stage_from_the_cache(config: RunConfig, fakes: FakeStages) -> None:
    first = run(config)
    assert outcomes(first) == dict.fromkeys(ALL, "ran")
    assert first.status == "completed"
    second = run(config)
    assert outcomes(second) == {**dict.fromkeys(CACHED, "cached"), "promote": "ran"}
    assert fakes.calls == {**dict.fromkeys(CACHED, 1), "promote": 2}
    assert second.all_refs() == first.all_refs()
    assert second.inputs_sha256 == first.inputs_sha256


def test_one_changed_field_runs_just_the_stages_it_feeds(config: RunConfig, fakes: FakeStages) -> None:
    run(config)
    after_sft = ["sft", "simpo", "evaluate"]
    for section, fields, again in [
        ("simpo", {"beta": 3.0}, ["simpo", "evaluate"]),
        ("evaluate", {"seed": 1}, ["evaluate"]),
        ("pairs", {"seed": 1}, ["pairs", "simpo", "evaluate"]),
        ("sft", {"epochs": 2.0}, after_sft),
        ("lora", {"r": 4}, after_sft),
        ("model", {"dtype": "bfloat16"}, after_sft),
        ("model", {"seed": 1}, ["model", "render", "pairs", *after_sft]),
        ("render", {"max_tokens": 99}, ["render", "pairs", *after_sft]),
        ("promote", {"min_gain": 0.5}, []),
        ("source", {"dedupe": "off"}, ["ingest"]),  # the same bytes come out, so nothing after it runs
    ]:
        assert ran(run(changed(config, section, **fields))) == again, (section, fields)


def test_rendering_forks_from_the_threads_of_a_flow(samples: Path, tmp_path: Path) -> None:
    reports = [
        run(
            RunConfig.model_validate(
                {
                    "name": "forks",
                    "store": str(tmp_path / f"store-{num_proc}"),
                    "source": {"paths": [str(samples)]},
                    "render": {"num_proc": num_proc},
                }
            ),
            until="render",
        )
        for num_proc in (1, 2)
    ]
    alone, spread = (report.rendered for report in reports)
    assert alone is not None
    assert spread is not None
    assert spread.report == alone.report
    assert spread.report.n_branches == len(list(samples.glob("*/*.traj.json")))
    assert spread.branches.sha256 == alone.branches.sha256


def test_damaged_payload_runs_its_stage_again_and_no_other(config: RunConfig, fakes: FakeStages) -> None:
    first = run(config)
    assert first.rendered is not None
    payload = Path(first.rendered.branches.path)
    payload.unlink()
    assert ran(run(config)) == ["render"]
    payload.write_bytes(payload.read_bytes().replace(b'"', b"'", 1))  # as long as before
    assert ran(run(config)) == ["render"]
    assert ran(run(config)) == []


@pytest.mark.parametrize("take", [shutil.move, shutil.copytree], ids=["moved", "copied"])
def test_a_store_elsewhere_reads_its_own_files(
    config: RunConfig, fakes: FakeStages, tmp_path: Path, take: Callable[[str, str], object]
) -> None:
    first = run(config)
    elsewhere = str(tmp_path / "elsewhere")
    take(config.store, elsewhere)
    there = config.model_copy(update={"store": elsewhere})
    second = run(there)
    assert ran(second) == []
    assert [Path(ref.path).relative_to(elsewhere) for ref in second.all_refs()] == [
        Path(ref.path).relative_to(config.store) for ref in first.all_refs()
    ]
    assert [ref.path for run in read_runs(Path(elsewhere)) for ref in run.all_refs() if config.store in ref.path] == []
    assert second.rendered is not None
    Path(second.rendered.branches.path).write_bytes(b"damaged")
    assert ran(run(there)) == ["render"]


GARBAGE = (b"", b"\x00\xff" * 50, b"{}", b'{"kind": "Ingested"')


def test_damaged_records_are_made_again(config: RunConfig, fakes: FakeStages) -> None:
    """Of each kind of damage: one record of a run at least, and one or two of results."""
    run(config)
    store = Path(config.store)
    (record,) = (store / "runs").iterdir()
    for number in range(1, len(GARBAGE)):
        record.with_stem(f"{record.stem}-{number}").touch()
    for folder in ("results", "runs"):
        for record, garbage in zip(sorted((store / folder).iterdir()), cycle(GARBAGE), strict=False):
            record.write_bytes(garbage)
    assert ran(run(config)) == list(CACHED)
    assert [report.status for report in read_runs(store)] == ["completed"]
    assert len(inventory(store).payloads) == len(CACHED) - 1  # an evaluation is its report alone


def test_records_of_a_newer_version_are_neither_trusted_nor_lost(config: RunConfig, fakes: FakeStages) -> None:
    first = run(config)
    for folder, at in (("results", "data"), ("runs", "ingested")):
        for path in (Path(config.store) / folder).iterdir():
            record = json.loads(path.read_text())
            inner = json.loads(record["result"]) if "result" in record else record
            inner[at]["from_the_future"] = True
            if "result" in record:
                record["result"] = json.dumps(inner)
            path.write_text(json.dumps(record))
    assert ran(run(config)) == list(CACHED)
    newer = Path(config.store) / "runs" / f"{first.run_id}.json"
    collect(Path(config.store), keep_runs=2)
    assert newer.is_file()
    assert all(Path(ref.path).exists() for ref in first.all_refs())


def test_refresh_runs_the_named_stage_only(config: RunConfig, fakes: FakeStages) -> None:
    run(config)
    assert ran(run(config, refresh=("sft",))) == ["sft"]


@pytest.mark.parametrize(
    ("until", "stages"),
    [
        ("ingest", ["ingest"]),
        ("pairs", ["ingest", "model", "render", "pairs"]),
        ("sft", ["ingest", "model", "render", "sft"]),
    ],
)
def test_until_ends_after_a_stage(config: RunConfig, fakes: FakeStages, until: StageName, stages: list[str]) -> None:
    report = run(config, until=until)
    assert [line.stage for line in report.stages] == stages
    assert report.status == "completed"
    assert report.promoted is None


def test_user_error_reaches_the_caller_at_once(config: RunConfig, fakes: FakeStages) -> None:
    fakes.failures["pairs"] = [UserError("no pair found", where="pairs", fix="more runs")]
    with pytest.raises(UserError, match=r"pairs: no pair found \(more runs\)"):
        run(config)
    assert fakes.calls["pairs"] == 1  # a retry would not help
    assert fakes.calls["sft"] == 0
    record = read_runs(Path(config.store))[-1]
    assert record.status == "failed"
    assert outcomes(record)["pairs"] == "failed"
    assert "no pair found" in record.message


def test_passing_failure_is_retried(config: RunConfig, fakes: FakeStages) -> None:
    fakes.failures["render"] = [OSError("stale file handle")]
    assert run(config, until="render").status == "completed"
    assert fakes.calls["render"] == 2


def test_every_stage_has_a_card_also_when_cached(config: RunConfig, fakes: FakeStages) -> None:
    run(config)
    state = traceforge(config, return_state=True)
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    with get_client(sync_client=True) as client:
        cards = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        )
    pages = {card.key: str(card.data) for card in cards if card.type == "markdown"}
    assert set(pages) == {*ALL, "run"}
    assert "![training curves](data:image/svg+xml;base64," in pages["sft"]
    assert max(map(len, pages.values())) < 200_000


def test_records_are_json_and_hold_no_pickle(config: RunConfig, fakes: FakeStages) -> None:
    run(config)
    records = list((Path(config.store) / "results").iterdir())
    assert {record.name.split("-")[0] for record in records} == set(CACHED)
    for record in records:
        assert record.read_bytes().startswith(b"{")
        assert b"traceforge-artifact" in record.read_bytes()


def test_gc_keeps_what_a_kept_run_or_an_alias_refers_to(config: RunConfig, fakes: FakeStages) -> None:
    store = Path(config.store)
    old = run(config)
    new = run(changed(config, "sft", epochs=2.0))
    assert old.sft is not None
    assert new.sft is not None
    (store / "aliases").mkdir(exist_ok=True)
    (store / "aliases" / "current.json").write_text(json.dumps({"adapter": old.sft.adapter.model_dump()}))
    before = {payload.path for payload in inventory(store).payloads}
    with in_use(store), pytest.raises(UserError, match="a run is using the store"):
        collect(store, keep_runs=1)
    assert collect(store, keep_runs=1, dry_run=True).freed_bytes > 0
    report = collect(store, keep_runs=1)
    after = {payload.path for payload in inventory(store).payloads}
    assert old.simpo is not None
    assert before - after == {old.simpo.adapter.path} == {payload.path for payload in report.removed}
    assert {ref.path for ref in new.all_refs()} | {old.sft.adapter.path} <= after
    assert ran(run(changed(config, "sft", epochs=2.0))) == []
    assert ran(run(config)) == ["simpo"]  # of the old run, only what was removed runs again


def night(config: RunConfig, **parameters: Any) -> RunReport:
    report = nightly(config, **parameters)
    assert isinstance(report, RunReport)
    return report


def test_night_without_news_is_short_and_says_so(config: RunConfig, fakes: FakeStages) -> None:
    first = night(config)
    assert first.status == "completed"
    before = fakes.calls.copy()
    state = nightly(config, return_state=True)
    assert state.is_completed()
    assert state.message == f"nothing new since run {first.run_id}"
    assert fakes.calls == before
    (Path(config.source.paths[0]) / "new.traj.json").write_text("{}")
    assert night(config).status == "completed"
    assert fakes.calls["ingest"] == before["ingest"] + 1


def test_late_night_skips(config: RunConfig, fakes: FakeStages) -> None:
    with locked(Path(config.store) / "nightly.lock") as free:
        assert free
        report = night(config)
    assert report.status == "skipped"
    assert not fakes.calls
    assert night(config).status == "completed"


def test_bad_night_is_tried_again_and_goes_on_where_it_stopped(config: RunConfig, fakes: FakeStages) -> None:
    fakes.failures["simpo"] = [RuntimeError("diverged"), RuntimeError("diverged")]
    with pytest.raises(RuntimeError, match="diverged"):
        nightly(config)
    assert fakes.calls["promote"] == 0
    assert night(config).status == "completed"
    assert fakes.calls["sft"] == 1


def test_nights_keep_the_newest_runs_only(config: RunConfig, fakes: FakeStages) -> None:
    night(changed(config, "sft", epochs=2.0), keep_runs=1)
    report = night(config, keep_runs=1)
    adapters = [payload for payload in inventory(Path(config.store)).payloads if payload.kind == "adapter"]
    assert {payload.path for payload in adapters} == {ref.path for ref in report.all_refs() if ref.kind == "adapter"}
    assert len(read_runs(Path(config.store))) == 1


def test_run_ids_sort_by_start_within_a_second_and_behind_older_ones() -> None:
    start = datetime(2026, 12, 1, 3, 0, 0, tzinfo=UTC)
    ids = [run_id("demo", start + timedelta(milliseconds=5 * i)) for i in range(200)]
    assert ids == sorted(ids)
    assert ids[0] > "20261201T025959-demo-ffffff"  # as earlier versions wrote them, to the second
