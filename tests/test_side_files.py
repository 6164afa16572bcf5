"""Files that say how runs ended: which are such, and of which runs they speak."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from ingest_inputs import chat, line, reasons, rows, run

MINI = {"trajectory_format": "mini-swe-agent-1.1", "info": {}, **chat("own")}


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def outcomes(logs: Path) -> dict[str, str]:
    """The first words of each run, and how it ended."""
    return {row["messages"][0]["content"]: row["outcome"]["status"] for row in rows(run(logs))}


# what is a side file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {**MINI, "resolved": True, "tests_status": {}},
        {**MINI, "resolved": True, "patch_exists": True},
        chat("own", resolved_ids=[], resolved=True),
        chat("own", verifier_result={"rewards": {"reward": 1.0}}, resolved=1),
    ],
)
def test_a_run_with_the_fields_of_a_report_is_a_run(value: dict[str, Any], logs: Path) -> None:
    write(logs / "o__r-1" / "run.json", orjson.dumps(value))
    assert outcomes(logs) == {"good": "unknown", "own": "resolved"}


@pytest.mark.parametrize("beside", [{"resolved": True}, {"model_patch": "d"}])
def test_runs_by_name_are_listed_as_left_out(beside: dict[str, Any], logs: Path) -> None:
    write(logs / "map.json", orjson.dumps({"own__r-1": chat("own", **beside)}))
    result = run(logs)
    assert reasons(result) == {
        "map.json": "an object of runs, each under its name: write them as a list, or one a line"
    }
    assert result.report.n_side_files == 0


# of which runs it speaks ------------------------------------------------------------------------------------------


def test_a_reward_speaks_of_the_run_beside_it(logs: Path) -> None:
    write(logs / "t1" / "run.json", line("one"))
    write(logs / "t1" / "reward.txt", b"1\n")
    write(logs / "t2" / "agent" / "sessions" / "run.json", line("two"))
    write(logs / "t2" / "verifier" / "reward.json", b'{"reward": 0}')
    assert outcomes(logs) == {"good": "unknown", "one": "resolved", "two": "failed"}


def test_a_reward_at_the_root_says_nothing_of_the_trials_below(logs: Path) -> None:
    write(logs / "x" / "run.json", line("one"))
    write(logs / "y" / "deep" / "run.json", line("two"))
    write(logs / "reward.txt", b"1\n")
    assert outcomes(logs) == {"good": "resolved", "one": "unknown", "two": "unknown"}


@pytest.mark.parametrize("text", ["another", "good"])
def test_a_reward_beside_two_runs_is_of_neither(text: str, logs: Path) -> None:
    write(logs / "also.json", line(text, model="m"))
    write(logs / "reward.txt", b"1\n")
    assert set(outcomes(logs).values()) == {"unknown"}
