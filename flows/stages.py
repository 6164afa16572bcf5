"""Running one stage: as a Prefect task in this process, or as a run of the stage's own deployment on a worker."""

from pathlib import Path
from typing import Any, Literal

from prefect import Task, get_client
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from artifacts.cache import stage_policy
from artifacts.serializer import ArtifactSerializer
from schemas.errors import StageError, UserError
from tasks.stages import RequestT, ResultT, Stage

Execution = Literal["inline", "pools"]

GPU_DEPLOYMENT = "two-gpu"
POLL_S = 2.0


class StageLostError(StageError):
    """The process or the host of a stage's run died. Another run of it goes on from its last checkpoint."""


class StageCancelledError(StageError):
    """Somebody cancelled a stage's run, and with it the run that waits for it."""


def run_on_pool(
    stage: Stage[RequestT, ResultT], request: RequestT, timeout_s: float | None, refresh: bool = False
) -> ResultT:
    """Runs a stage through its deployment and waits for its result.

    Raises:
        StageLostError, StageCancelledError: the stage's run crashed or was cancelled.
        StageError: it did not end in time (it is then cancelled; waiting in the queue counts), or it failed.
        UserError: it failed by the user's input.
    """
    run: Any = run_deployment(
        f"{stage.name}/{GPU_DEPLOYMENT}",
        parameters={"request": request.model_dump(mode="json"), "refresh": refresh},
        timeout=timeout_s,
        poll_interval=POLL_S,
    )
    if not run.state.is_final():  # a timeout of run_deployment neither raises nor cancels
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Cancelling(message=f"not done after {timeout_s} s"))
        raise StageError(f"{stage.name}: {run.state.name.lower()} after {timeout_s} s, now cancelled (run {run.id})")
    if run.state.is_crashed():
        raise StageLostError(f"{stage.name}: {run.state.message or 'crashed'} (run {run.name})")
    if run.state.is_cancelled():
        raise StageCancelledError(f"{stage.name} was cancelled (run {run.name})")
    result = run.state.result()
    if not isinstance(result, stage.returns):
        raise StageError(f"{stage.name} returned {type(result).__name__}, not {stage.returns.__name__}")
    return result


def _mistakes_stay(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """A mistake in the user's input does not go away by itself."""
    return not isinstance(state.result(raise_on_failure=False), UserError)


def _only_lost(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """What failed on the pool was tried again there."""
    return isinstance(state.result(raise_on_failure=False), StageLostError)


def stage_task(
    stage: Stage[RequestT, ResultT],
    store: Path,
    *,
    execution: Execution = "inline",
    timeout_s: float | None = None,
    refresh: bool = False,
) -> Task[[RequestT], ResultT]:
    """The Prefect task of a stage. Its one parameter is the request, whose identity is the cache key.

    The task that computes holds the lock on the key. One that waits for a run on the pool holds none: that run's own
    task does (`flows/gpu.py`), so a result is computed once even when the run that asked for it has died.
    """
    on_pool = execution == "pools" and stage.trains

    def run(request: RequestT) -> ResultT:
        return run_on_pool(stage, request, timeout_s, refresh) if on_pool else stage.run(request)

    policy = stage_policy(stage.name, stage.version(), None if on_pool else store) if stage.cached else NO_CACHE
    return Task(
        fn=run,
        name=stage.name,
        task_run_name=stage.name,
        tags=["gpu" if stage.trains else "cpu"],
        retries=stage.retries,
        retry_delay_seconds=2,
        retry_condition_fn=_only_lost if on_pool else _mistakes_stay,
        cache_policy=policy,
        persist_result=stage.cached,
        refresh_cache=refresh,
        result_storage=store / "results",
        result_serializer=ArtifactSerializer(),
    )
