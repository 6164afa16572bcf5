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


def run_on_pool(stage: Stage[RequestT, ResultT], request: RequestT, timeout_s: float | None) -> ResultT:
    """Runs a stage through its deployment and waits for its result.

    Raises:
        StageError: it did not end in time (it is then cancelled; waiting in the queue counts), or it failed.
        UserError: it failed by the user's input.
    """
    run: Any = run_deployment(
        f"{stage.name}/{GPU_DEPLOYMENT}",
        parameters={"request": request.model_dump(mode="json")},
        timeout=timeout_s,
        poll_interval=POLL_S,
    )
    if not run.state.is_final():  # a timeout of run_deployment neither raises nor cancels
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Cancelling(message=f"not done after {timeout_s} s"))
        raise StageError(f"{stage.name}: {run.state.name.lower()} after {timeout_s} s, now cancelled (run {run.id})")
    result = run.state.result()
    if not isinstance(result, stage.returns):
        raise StageError(f"{stage.name} returned {type(result).__name__}, not {stage.returns.__name__}")
    return result


def _worth_retrying(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """A mistake in the user's input does not go away by itself."""
    return not isinstance(state.result(raise_on_failure=False), UserError)


def stage_task(
    stage: Stage[RequestT, ResultT],
    store: Path,
    *,
    execution: Execution = "inline",
    timeout_s: float | None = None,
    refresh: bool = False,
) -> Task[[RequestT], ResultT]:
    """The Prefect task of a stage. Its one parameter is the request, whose identity is the cache key."""

    def run(request: RequestT) -> ResultT:
        if execution == "pools" and stage.trains:
            return run_on_pool(stage, request, timeout_s)
        return stage.run(request)

    return Task(
        fn=run,
        name=stage.name,
        task_run_name=stage.name,
        tags=["gpu" if stage.trains else "cpu"],
        retries=stage.retries,
        retry_delay_seconds=2,
        retry_condition_fn=_worth_retrying,
        cache_policy=stage_policy(stage.name, stage.version(), store) if stage.cached else NO_CACHE,
        persist_result=stage.cached,
        refresh_cache=refresh,
        result_storage=store / "results",
        result_serializer=ArtifactSerializer(),
    )
