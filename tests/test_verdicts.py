"""How logs and files beside them say that a run succeeded or failed."""

import json
from typing import Any

import pytest

from tasks.sources import parse, read_document
from tasks.sources.base import reported
from tasks.sources.side_files import read_side_file

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
MINI = {"trajectory_format": "mini-swe-agent-1.1", "info": {}, "messages": TURNS}
OPENHANDS = {
    "instance_id": "o__r-1",
    "history": [
        {"id": 1, "source": "user", "action": "message", "args": {"content": "q"}},
        {"id": 2, "source": "agent", "action": "message", "args": {"content": "a"}},
    ],
}
SAID = [
    *((value, "resolved") for value in (True, 1, 1.0, "true", "TRUE", "True", "1")),
    *((value, "failed") for value in (False, 0, 0.0, "false", "FALSE", " False", "0")),
    *((value, "unknown") for value in (None, 2, -1, 0.5, "", "maybe", [], {})),
]


@pytest.mark.parametrize(("value", "status"), SAID)
def test_a_verdict_in_each_way_that_logs_write_it(value: Any, status: str) -> None:
    assert reported(value).status == status


@pytest.mark.parametrize(("value", "status"), [(1, "resolved"), ("FALSE", "failed"), (None, "unknown")])
def test_every_format_reads_a_verdict_alike(value: Any, status: str) -> None:
    rows = (
        {"messages": TURNS, "resolved": value, "score": None},
        {"messages": TURNS, "success": value},
        {**MINI, "verified": value},
        {**MINI, "resolved": value},
        {"instance_id": "o__r-1", "messages": TURNS, "test_result": {}, "resolved": value},
        {"instance_id": "o__r-1", "traj_id": "x", "messages": json.dumps(TURNS), "resolved": value},
        {"target": value, "trajectory": [{"role": "user", "text": "q"}, {"role": "ai", "text": "a", "mask": True}]},
        {"content": [{"class_": "message_action", "content": "a"}], "details": {"resolved": value}},
        {**OPENHANDS, "test_result": {"report": {"resolved": value}}},
        {**OPENHANDS, "success": value},
        {
            "problem": "p",
            "success": value,
            "log": [{"obs": "q"}, {"obs": "r", "action": {"name": "a", "arguments": {}}}],
        },
    )
    for row in rows:
        (run,) = parse(json.dumps(row).encode())
        assert run.outcome.status == status, row


def test_a_verdict_says_more_than_a_score() -> None:
    (run,) = parse(json.dumps({"messages": TURNS, "resolved": 1, "score": 0.99}).encode())
    assert (run.outcome.status, run.outcome.source) == ("resolved", "test_report")


@pytest.mark.parametrize("report", [{"resolved": 1, "tests_status": {}}, {"o__r-1": {"resolved": "true"}}])
def test_reports_read_a_verdict_alike(report: dict[str, Any]) -> None:
    facts = read_side_file(read_document(json.dumps(report).encode(), "logs/o__r-1/report.json")) or []
    assert [(fact.instance, fact.outcome) for fact in facts] == [("o__r-1", reported(True))]
