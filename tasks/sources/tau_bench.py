"""tau-bench rows: `task_id`, `trial`, `reward`, `traj` of OpenAI messages.

The user is another model: its words are input, never trained on, and differ in each trial. The row does not name the
domain, but the policy in its system message does, so task 21 of two domains stays two tasks.
"""

import re
from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_list, build, dicts, reward_outcome, string
from tasks.sources.chat import read_messages
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Run

NAME = "tau-bench"

_POLICY = re.compile(r"^#\s*(\w+)\s+(?:agent\s+)?policy", re.IGNORECASE | re.MULTILINE)


def detect(document: Document) -> bool:
    first = document.first
    return {"task_id", "reward", "traj"} <= first.keys() and isinstance(first["traj"], list)


def _read_row(document: Document, row: dict[str, Any]) -> Run:
    messages = [
        replace(message, failed=message.content.startswith("Error")) if message.role == "tool" else message
        for message in read_messages(as_list(row.get("traj"), "traj"), user="simulated_user")
    ]
    policy = _POLICY.search(messages[0].content) if messages else None
    domain = policy.group(1).lower() if policy else "unknown"
    task, trial = string(row.get("task_id")), string(row.get("trial"))
    return build(
        document,
        NAME,
        messages,
        task_id=None if task is None else f"tau-bench/{domain}/{task}",
        outcome=reward_outcome(row.get("reward")),
        run_id=None if trial is None else f"trial-{trial}",
    )


def read(document: Document) -> list[Run]:
    rows = [_read_row(document, row) for row in dicts(document.records)]
    if not rows:
        raise SourceError("tau-bench: no row in the file")
    return rows


ADAPTER = Adapter(NAME, detect, read, by_record=True)
