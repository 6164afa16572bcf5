"""The stages that train, each a flow of its own, so that a pool with one slot can serialise them on the GPUs.

Each takes its result from the cache if another run has left it there in the meantime.
"""

from pathlib import Path

from prefect import flow

from artifacts.serializer import ArtifactSerializer, results_of
from flows.reporting import PrefectReporter
from flows.stages import stage_task
from schemas.reports import Evaluated, Trained
from schemas.requests import EvaluateRequest, SftRequest, SimpoRequest
from tasks import stages
from tasks.progress import observed_by
from tasks.stages import RequestT, ResultT, Stage


def _run(stage: Stage[RequestT, ResultT], request: RequestT, refresh: bool) -> ResultT:
    store = Path(request.store)
    with results_of(store), observed_by(PrefectReporter()):
        return stage_task(stage, store, refresh=refresh)(request)


@flow(name="sft", persist_result=True, result_serializer=ArtifactSerializer())
def sft(request: SftRequest, refresh: bool = False) -> Trained:
    """Supervised fine-tuning of one run."""
    return _run(stages.SFT, request, refresh)


@flow(name="simpo", persist_result=True, result_serializer=ArtifactSerializer())
def simpo(request: SimpoRequest, refresh: bool = False) -> Trained:
    """Preference training of one run."""
    return _run(stages.SIMPO, request, refresh)


@flow(name="evaluate", persist_result=True, result_serializer=ArtifactSerializer())
def evaluate(request: EvaluateRequest, refresh: bool = False) -> Evaluated:
    """Evaluation of one run on held-out tasks."""
    return _run(stages.EVALUATE, request, refresh)
