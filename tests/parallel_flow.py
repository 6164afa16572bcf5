"""Fifty task runs at a time, each with an artifact, in a process of its own: `python tests/parallel_flow.py`."""

import sys
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.task_runners import ThreadPoolTaskRunner

N_TASKS = 50


@task(persist_result=False)
def one(number: int) -> int:
    create_markdown_artifact(f"number {number}", key=f"number-{number}")
    return number


RUNNER: Any = ThreadPoolTaskRunner(max_workers=N_TASKS)  # its futures' type is open where the decorator wants one


@flow(name="parallel", task_runner=RUNNER, persist_result=False)
def parallel() -> int:
    return sum(one.map(range(N_TASKS)).result())


if __name__ == "__main__":
    sys.exit(0 if parallel() == sum(range(N_TASKS)) else 1)
