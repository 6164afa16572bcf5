"""Every shared file against a committed table of values that were found by reading the files."""

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.trajectory import Trajectory
from tasks.sources import ADAPTERS, SourceError, find_adapter, read_document
from tasks.sources.side_files import SideIndex, read_side_file

TABLE = tomllib.loads(Path(__file__).with_name("expected_ingest.toml").read_text("utf-8"))
RUN_FILES = sorted(set(TABLE) - {"no_run", "side_files"})


def read_all(shared: Path) -> dict[str, list[Trajectory]]:
    runs, facts = {}, []
    for path in sorted(shared.rglob("*")):
        if path.is_file():
            name = path.relative_to(shared).as_posix()
            document = read_document(path.read_bytes(), name)
            found = read_side_file(document)
            if found is not None:
                facts += found
            elif name not in TABLE["no_run"]:
                runs[name] = find_adapter(document).read_document(document)
    index = SideIndex(facts)
    return {name: [with_outcome(index, run) for run in found] for name, found in runs.items()}


def with_outcome(index: SideIndex, run: Trajectory) -> Trajectory:
    outcome, exit_status = index.join(run.task_id, run.source_path, run.outcome, run.exit_status)
    return run.model_copy(update={"outcome": outcome, "exit_status": exit_status})


@pytest.fixture(scope="module")
def runs(shared_dir: Path) -> dict[str, list[Trajectory]]:
    return read_all(shared_dir)


def test_the_table_names_every_shared_file(shared_dir: Path) -> None:
    found = {path.relative_to(shared_dir).as_posix() for path in shared_dir.rglob("*") if path.is_file()}
    assert found == set(RUN_FILES) | set(TABLE["no_run"]) | set(TABLE["side_files"])


@pytest.mark.parametrize("name", RUN_FILES)
def test_runs_are_as_read_by_hand(runs: dict[str, list[Trajectory]], name: str) -> None:
    expected = TABLE[name]["runs"]
    assert len(runs[name]) == len(expected)
    for run, row in zip(runs[name], expected, strict=True):
        turns = [message for message in run.messages if message.role == "assistant"]
        found = {
            "turns": len(turns),
            "calls": sum(len(turn.tool_calls) + len(turn.action_spans) for turn in turns),
            "observations": sum(message.author == "environment" for message in run.messages),
            "scored": run.n_turns,
            "outcome": run.outcome.status,
        }
        assert found == {key: row[key] for key in found}
        task = row["task"]
        assert run.task_id.startswith(task) if task.endswith("-") else run.task_id == task


@pytest.mark.parametrize("name", sorted(TABLE["side_files"]))
def test_side_files_are_recognised(shared_dir: Path, name: str) -> None:
    facts = read_side_file(read_document((shared_dir / name).read_bytes(), name))
    assert facts is not None
    assert len(facts) == TABLE["side_files"][name]


def test_what_holds_no_run_says_why(shared_dir: Path) -> None:
    for name, reason in TABLE["no_run"].items():
        document = read_document((shared_dir / name).read_bytes(), name)
        with pytest.raises(SourceError, match=reason):
            find_adapter(document)


def test_one_specific_adapter_knows_each_file(shared_dir: Path) -> None:
    """Detection is by content and not by luck of the order: besides the general chat shape, one adapter matches."""
    for name in RUN_FILES:
        document = read_document((shared_dir / name).read_bytes(), "renamed.bin")
        matching = [adapter.name for adapter in ADAPTERS if adapter.detect(document) and adapter.name != "openai-chat"]
        assert len(matching) == 1, (name, matching)


# Results that answer no call in their file, each for a reason that lies in the file.
UNPAIRED_RESULTS = {
    "inspect/log_tool_call_error.json": 11,  # the sample holds tool messages only
    "openhands/sdk_events.jsonl": 1,  # the ActionEvent of the second observation is not in the cut file
}


def test_unpaired_results_and_repeated_turns(runs: dict[str, list[Trajectory]]) -> None:
    unpaired: Counter[str] = Counter()
    for name, found in runs.items():
        for run in found:
            calls = {call.call_id for message in run.messages for call in message.tool_calls}
            unpaired[name] += sum(
                message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in calls
                for message in run.messages
            )
            # ids alone repeat in a real file (a model gave two calls one id), whole calls must not
            made = [
                call for message in run.messages if message.trainable for call in message.tool_calls if call.call_id
            ]
            assert len(made) == len(set(made)), name
    assert {name: n for name, n in unpaired.items() if n} == UNPAIRED_RESULTS


def test_groups_with_both_outcomes(runs: dict[str, list[Trajectory]]) -> None:
    by_task: dict[str, set[str]] = {}
    for found in runs.values():
        for run in found:
            by_task.setdefault(run.task_id, set()).add(run.outcome.status)
    both = {task for task, outcomes in by_task.items() if {"resolved", "failed"} <= outcomes}
    named = {task for task in both if not task.startswith("prompt-")}
    tau = {f"tau-bench/airline/{number}" for number in (21, 37, 43, 44)}
    assert named == tau | {"pylint-dev__astroid-1196", "pylint-dev__astroid-1866", "sqlfluff__sqlfluff-1733"}
    assert len(both - named) == 1  # verifiers, first prompt


def test_one_task_across_formats(runs: dict[str, list[Trajectory]]) -> None:
    """The same task in four SWE-agent parsers, and the same run as a data-set row and as ADP."""
    marshmallow = [name for name in RUN_FILES if "marshmallow-1867" in name]
    assert len(marshmallow) == 4
    assert len({runs[name][0].task_id for name in marshmallow}) == 1
    raw = runs["swe-smith-sft/adp_raw_arrow-py__arrow.1d70d009.lm_rewrite__nuzjfyur.json"][0]
    standard = runs["adp/swe-smith_std_0.json"][0]
    assert (raw.task_id, raw.repo) == (standard.task_id, standard.repo) == (raw.task_id, "arrow-py/arrow")


# Files whose assistant text is partly not the model's own words, so that it is not looked for.
RERENDERED = {
    "moatless/mwaskom__seaborn-3010.trajectory.json",  # later prompts show earlier turns in other words
}


def assistant_texts(value: Any) -> Iterator[str]:
    """Every text that any assistant message anywhere in a raw JSON value holds, copies included."""
    if isinstance(value, list):
        for item in value:
            yield from assistant_texts(item)
    elif isinstance(value, dict):
        if value.get("role") in ("assistant", "ai") or value.get("source") == "agent" or value.get("type") == "gemini":
            for key in ("content", "text", "message"):
                parts = value.get(key)
                for part in parts if isinstance(parts, list) else [parts]:
                    text = part.get("text") if isinstance(part, dict) else part
                    if isinstance(text, str) and not text.startswith("attachment://"):
                        yield text
        for item in value.values():
            yield from assistant_texts(item)


@pytest.mark.parametrize("name", [name for name in RUN_FILES if not name.endswith((".md", ".yaml"))])
def test_no_text_of_the_model_is_dropped(runs: dict[str, list[Trajectory]], shared_dir: Path, name: str) -> None:
    if name in RERENDERED or (name.startswith("openhands/") and "llm_log" not in name):
        return  # OpenHands events hold user-interface sentences under `message`; turns are counted above
    kept = "\0".join(message.content for run in runs[name] for message in run.messages if message.role == "assistant")
    document = read_document((shared_dir / name).read_bytes(), name)
    missing = {text for text in assistant_texts(document.value) if text.strip() and text not in kept}
    assert not missing
