"""The stages that train, each a flow of its own, so that a pool with one slot can serialise them on the GPUs."""

from prefect import flow

from artifacts.serializer import ArtifactSerializer
from flows.reporting import PrefectReporter
from schemas.reports import Evaluated, Trained
from schemas.requests import EvaluateRequest, SftRequest, SimpoRequest
from tasks import stages
from tasks.progress import observed_by


@flow(name="sft", persist_result=True, result_serializer=ArtifactSerializer())
def sft(request: SftRequest) -> Trained:
    """Supervised fine-tuning of one run."""
    with observed_by(PrefectReporter()):
        return stages.SFT.run(request)


@flow(name="simpo", persist_result=True, result_serializer=ArtifactSerializer())
def simpo(request: SimpoRequest) -> Trained:
    """Preference training of one run."""
    with observed_by(PrefectReporter()):
        return stages.SIMPO.run(request)


@flow(name="evaluate", persist_result=True, result_serializer=ArtifactSerializer())
def evaluate(request: EvaluateRequest) -> Evaluated:
    """Evaluation of one run on held-out tasks."""
    with observed_by(PrefectReporter()):
        return stages.EVALUATE.run(request)
