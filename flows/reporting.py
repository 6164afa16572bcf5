"""What stages report on their way, brought to Prefect: log lines of the task run and a progress artifact."""

import time
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from schemas.requests import StageName
from schemas.runs import StageRun

PROGRESS_EVERY_S = 5.0
"""A progress artifact is a row in the server's database: few of them, and none for a stage that is soon done."""


class PrefectReporter:
    """Observes a run for the Prefect UI."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._artifacts: dict[StageName, UUID] = {}

    def started(self, stage: StageName) -> None:
        self._last_s = time.monotonic()

    def progressed(self, stage: StageName, done: int, total: int) -> None:
        if time.monotonic() - self._last_s < PROGRESS_EVERY_S or total <= 0:
            return
        self._last_s = time.monotonic()
        self._show(stage, 100.0 * done / total)

    def logged(self, stage: StageName, line: str) -> None:
        get_run_logger().info("%s", line)

    def finished(self, run: StageRun) -> None:
        if run.stage in self._artifacts and run.outcome == "ran":
            self._show(run.stage, 100.0)

    def _show(self, stage: StageName, percent: float) -> None:
        if stage in self._artifacts:
            update_progress_artifact(self._artifacts[stage], percent)
        else:
            created = create_progress_artifact(percent, key=f"{stage}-progress", description=f"{stage}: share done")
            if isinstance(created, UUID):
                self._artifacts[stage] = created
