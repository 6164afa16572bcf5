"""Redaction within ingestion: rows and exports tell no names, while the catalog still joins by them."""

import json
from pathlib import Path

from artifacts.store import Store
from artifacts.tables import iter_rows, open_table
from schemas.config import SourceConfig
from tasks.export import export
from tasks.ingest import ingest


def _chat(text: str, **fields: str) -> str:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"done: {text}"}]
    return json.dumps({"messages": turns, **fields})


def test_a_home_directory_stands_in_no_row_and_reports_are_joined_all_the_same(tmp_path: Path) -> None:
    trial = tmp_path / "home" / "janedoe" / "trial-1"
    (trial / "verifier").mkdir(parents=True)
    (trial / "a.json").write_text(_chat("one", task_id="ask jane@corp.io"))
    (trial / "verifier" / "reward.txt").write_text("0.0\n")
    (trial.parent / "b.json").write_text(_chat("two", task_id="ask bob@corp.io"))
    result = ingest(SourceConfig(paths=(str(tmp_path / "home"),)), Store(tmp_path / "store"))
    rows = {Path(row["source_path"]).name: row for row in iter_rows(open_table(result.trajectories))}
    assert rows["a.json"]["outcome"]["status"] == "failed"
    assert rows["a.json"]["source_path"].endswith("/home/user-1/trial-1/a.json")
    assert rows["a.json"]["task_id"] != rows["b.json"]["task_id"]
    export(Path(result.trajectories.path), tmp_path / "out.jsonl", "openai")
    written = json.dumps(list(rows.values()), default=str) + (tmp_path / "out.jsonl").read_text()
    assert not [name for name in ("janedoe", "jane@", "bob@") if name in written]


def test_unredacted_rows_keep_their_paths(tmp_path: Path) -> None:
    log = tmp_path / "home" / "janedoe" / "a.json"
    log.parent.mkdir(parents=True)
    log.write_text(_chat("one"))
    result = ingest(SourceConfig(paths=(str(log),), redact=False), Store(tmp_path / "store"))
    (row,) = iter_rows(open_table(result.trajectories))
    assert row["source_path"] == str(log)


def test_reasons_quote_no_secret_and_are_short(tmp_path: Path) -> None:
    secret = "AKIA" + "QYLPMN5HFIQR7XYA"
    (tmp_path / "logs").mkdir()
    for number, role in enumerate((secret, "x" * 30 + secret, "long " * 200)):
        log = {"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]}
        (tmp_path / "logs" / f"{number}.json").write_text(json.dumps(log))
    (tmp_path / "logs" / "good.json").write_text(_chat("one"))
    result = ingest(SourceConfig(paths=(str(tmp_path / "logs"),)), Store(tmp_path / "store"))
    assert result.report.n_quarantined == 3
    assert max(len(dropped.reason) for dropped in result.report.quarantined) <= 301
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert not [path for path in written if secret[:12].encode() in path.read_bytes()]
