"""What tests of ingestion share: a conversation, and one ingestion of a folder as its result reads."""

import json
from pathlib import Path
from typing import Any

from artifacts.store import Store
from artifacts.tables import iter_rows, open_table
from schemas.config import SourceConfig
from schemas.reports import Ingested
from tasks.ingest import ingest


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}], **fields}


def line(text: str, **fields: Any) -> bytes:
    return json.dumps(chat(text, **fields)).encode()


def run(logs: Path) -> Ingested:
    return ingest(SourceConfig(paths=(str(logs),)), Store(logs.parent / "store"))


def rows(result: Ingested) -> list[dict[str, Any]]:
    return list(iter_rows(open_table(result.trajectories)))


def first_words(result: Ingested) -> list[str]:
    return [row["messages"][0]["content"] for row in rows(result)]


def reasons(result: Ingested) -> dict[str, str]:
    return {Path(dropped.what).name: dropped.reason for dropped in result.report.quarantined}


def damage(result: Ingested) -> list[str]:
    return [dropped.reason for dropped in result.report.damaged]
