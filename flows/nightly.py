"""The pipeline unattended: at most one at a time, short when nothing is new, and tidy afterwards."""

import time
from contextlib import suppress
from datetime import UTC, datetime

from prefect import State, flow
from prefect.states import Completed

from artifacts.cards import run_card
from artifacts.gc import collect
from artifacts.locks import locked
from artifacts.runs import read_runs, run_id
from artifacts.serializer import ArtifactSerializer
from artifacts.store import Store
from flows.full import traceforge
from flows.pipeline import show
from flows.stages import Execution
from schemas.config import RunConfig
from schemas.errors import UserError
from schemas.runs import RunReport, RunStatus
from tasks.identity import run_inputs


@flow(name="traceforge", persist_result=True, result_serializer=ArtifactSerializer())
def nightly(
    config: RunConfig,
    execution: Execution = "inline",
    pool_timeout_s: float | None = None,
    keep_runs: int = 30,
) -> RunReport | State[RunReport]:
    """Logged agent runs to a better adapter, every night.

    Args:
        config: the run, one section per stage
        execution: inline (every stage in this process) or pools (stages that train go to the GPU pool)
        pool_timeout_s: how long a stage on the GPU pool may take, waiting included; unlimited when empty
        keep_runs: newest runs whose artifacts are kept; what `current` names is always kept
    """
    start_s, store = time.monotonic(), Store(config.store)

    def ended(status: RunStatus, message: str, inputs_sha256: str) -> State[RunReport]:
        now = datetime.now(UTC)
        report = RunReport(
            run_id=run_id(config.name, now),
            name=config.name,
            store=str(store.root),
            status=status,
            message=message,
            started_at=now.isoformat(timespec="seconds"),
            wall_s=time.monotonic() - start_s,
            inputs_sha256=inputs_sha256,
        )
        show(run_card(report))
        return Completed(message=message, data=report)

    inputs = run_inputs(config)
    with locked(store.root / "nightly.lock") as free:
        if not free:
            return ended("skipped", "skipped: another nightly run is still going on", inputs.sha256)
        done = [run for run in read_runs(store.root) if run.promoted and run.inputs_sha256 == inputs.sha256]
        if done:
            return ended("nothing_new", f"nothing new since run {done[-1].run_id}", inputs.sha256)
        report = traceforge.fn(config, execution=execution, pool_timeout_s=pool_timeout_s)
        with suppress(UserError):  # somebody else's run uses the store: tidied tomorrow
            collect(store.root, keep_runs=keep_runs)
    return report
