"""One run in progress: stages in the order they are asked for, their cards, and the run's record."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from artifacts.cards import Card, card, run_card
from artifacts.locks import in_use
from artifacts.runs import run_id, write_run
from artifacts.serializer import results_of
from artifacts.store import Store
from artifacts.summaries import summary
from flows.reporting import PrefectReporter
from flows.stages import Execution, StageCancelledError, stage_task
from schemas.config import RunConfig
from schemas.requests import StageName
from schemas.runs import RunReport, RunStatus, StageRun
from tasks.progress import finished, observed_by, started
from tasks.stages import RequestT, ResultT, Stage


class Reached(Exception):  # noqa: N818
    """The last stage that was asked for is done: an end, not an error."""


class Pipeline:
    """A context in which stages run. Leaving it closes the run's record; `Reached` and a cancel end it quietly."""

    def __init__(
        self,
        config: RunConfig,
        inputs_sha256: str,
        execution: Execution = "inline",
        until: StageName = "promote",
        refresh: Sequence[StageName] = (),
        timeout_s: float | None = None,
    ) -> None:
        self.store = Store(config.store)
        self._until, self._refresh = until, frozenset(refresh)
        self._execution: Execution = execution
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()
        now = datetime.now(UTC)
        self.report = RunReport(
            run_id=run_id(config.name, now),
            name=config.name,
            store=str(self.store.root),
            status="running",
            started_at=now.isoformat(timespec="seconds"),
            wall_s=0.0,
            inputs_sha256=inputs_sha256,
        )
        self._scopes = (in_use(self.store.root), results_of(self.store.root), observed_by(PrefectReporter()))

    def _update(self, **fields: Any) -> None:
        self.report = self.report.model_copy(update={**fields, "wall_s": time.monotonic() - self._start_s})
        write_run(self.report)

    def __enter__(self) -> "Pipeline":
        for scope in self._scopes:
            scope.__enter__()
        self._update()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if kind is None or kind is Reached:
            self._update(status="completed")
        elif kind in (TerminationSignal, KeyboardInterrupt):
            self._update(status="cancelled", message="stopped: cancelled, or its worker was stopped")
        else:
            status: RunStatus = "cancelled" if kind is StageCancelledError else "failed"
            self._update(status=status, message=str(error) or kind.__name__)
        for scope in reversed(self._scopes):
            scope.__exit__(None, None, None)
        show(run_card(self.report))
        return kind in (Reached, StageCancelledError)

    def result(self) -> RunReport | State[RunReport]:
        """What the flow returns: the run's record, or a state that says that it was cancelled."""
        return Cancelled(message=self.report.message) if self.report.status == "cancelled" else self.report

    def __call__(self, stage: Stage[RequestT, ResultT], **inputs: Any) -> ResultT:
        """Runs a stage on its inputs, the fields of its request, or takes its cached result.

        Raises:
            Reached: this was the last stage asked for.
            Exception: what the stage raised.
        """
        request = stage.request(store=str(self.store.root), **inputs)
        started(stage.name)
        start_s = time.monotonic()
        as_task = stage_task(
            stage,
            self.store.root,
            execution=self._execution,
            timeout_s=self._timeout_s,
            refresh=stage.name in self._refresh,
        )
        state: State[ResultT] = as_task(request, return_state=True)
        failed = not state.is_completed()
        result = None if failed else state.result()
        line = StageRun(
            stage=stage.name,
            outcome="failed" if failed else "cached" if state.name == "Cached" else "ran",
            wall_s=time.monotonic() - start_s,
            refs=result.refs() if result else (),
            summary=summary(result) if result else "",
        )
        self._update(stages=(*self.report.stages, line), **({stage.field: result} if result else {}))
        finished(line)
        if result is None:
            state.result()  # raises what the stage raised
            raise RuntimeError(f"{stage.name} ended as {state.name}")
        show(card(result))
        if stage.name == self._until:
            raise Reached
        return result


def show(page: Card) -> None:
    """Puts a card into the Prefect UI. Outside the stages' tasks, so that a cached stage has its card too."""
    create_markdown_artifact(page.markdown, key=page.key, description=page.title)
