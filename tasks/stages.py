"""The stages: for each, its request, its version and the plain function behind it.

Nothing here knows Prefect; `flows/` makes tasks and deployments of this list. Stage modules are imported when a stage
is asked for, so that a run whose stages are all cached starts quickly.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from artifacts.store import Store
from schemas.reports import (
    Evaluated,
    Ingested,
    ModelReady,
    Paired,
    Promoted,
    Rendered,
    StageResult,
    Trained,
)
from schemas.requests import (
    EvaluateRequest,
    IngestRequest,
    ModelRequest,
    PairsRequest,
    PromoteRequest,
    RenderRequest,
    Request,
    SftRequest,
    SimpoRequest,
    StageName,
)
from tasks.progress import logged, progressed

RequestT = TypeVar("RequestT", bound=Request)
ResultT = TypeVar("ResultT", bound=StageResult)


def _ingest(request: IngestRequest) -> Ingested:
    from tasks.ingest import ingest

    return ingest(request.source, Store(request.store), progress=lambda done: progressed("ingest", done, 0))


def _model(request: ModelRequest) -> ModelReady:
    from tasks.model import prepare_model

    return prepare_model(request.model, Store(request.store))


def _render(request: RenderRequest) -> Rendered:
    from tasks.render import render

    return render(
        request.trajectories,
        request.model,
        request.render,
        request.split,
        Store(request.store),
        chat_template=request.chat_template,
        progress=partial(progressed, "render"),
    )


def _pairs(request: PairsRequest) -> Paired:
    from tasks.pairs import build_pairs

    return build_pairs(
        request.branches,
        request.trajectories,
        request.pairs,
        Store(request.store),
        progress=partial(progressed, "pairs"),
    )


def _sft(request: SftRequest) -> Trained:
    from tasks.sft import sft

    return sft(
        request.branches,
        request.model,
        request.sft,
        request.lora,
        request.base,
        Store(request.store),
        log=partial(logged, "sft"),
    )


def _simpo(request: SimpoRequest) -> Trained:
    from tasks.simpo import simpo

    return simpo(
        request.pairs,
        request.branches,
        request.model,
        request.adapter,
        request.simpo,
        request.base,
        Store(request.store),
        log=partial(logged, "simpo"),
    )


def _evaluate(request: EvaluateRequest) -> Evaluated:
    from tasks.evaluate import evaluate

    return evaluate(
        request.branches,
        request.pairs,
        request.model,
        request.adapters,
        request.evaluate,
        request.base,
        Store(request.store),
        log=partial(logged, "evaluate"),
    )


def _promote(request: PromoteRequest) -> Promoted:
    from tasks.promote import promote

    return promote(request.evaluated, request.candidate, request.promote, Store(request.store))


_STAGE_VERSION = re.compile(r"^STAGE_VERSION(?:: Final)? = (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Stage(Generic[RequestT, ResultT]):
    """One stage of the pipeline."""

    name: StageName
    field: str
    """Where the result stands in the run's report."""
    request: type[RequestT]
    returns: type[ResultT]
    run: Callable[[RequestT], ResultT]
    module: str
    trains: bool = False
    """Loads the model: with `execution="pools"` it runs on the GPU pool."""
    retries: int = 0
    """Where a second attempt is safe and can help: the stage only reads its inputs and adds to the store."""
    cached: bool = True

    def version(self) -> int:
        """STAGE_VERSION of the stage's module, raised by hand when its results change.

        Read from the source text: importing the module may load a library of several seconds for a cached stage. Not
        by `ast.parse`, which in CPython 3.11 fails now and then while another thread parses as well (seen with 3.11.7).
        """
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(self.module)
        found = _STAGE_VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
        if found is None:
            raise AttributeError(f"{spec.origin}: no STAGE_VERSION")
        return int(found[1])


INGEST = Stage("ingest", "ingested", IngestRequest, Ingested, _ingest, "tasks.ingest", retries=1)
MODEL = Stage("model", "model", ModelRequest, ModelReady, _model, "tasks.model", retries=1)
RENDER = Stage("render", "rendered", RenderRequest, Rendered, _render, "tasks.render", retries=1)
PAIRS = Stage("pairs", "paired", PairsRequest, Paired, _pairs, "tasks.pairs", retries=1)
SFT = Stage("sft", "sft", SftRequest, Trained, _sft, "tasks.sft", trains=True, retries=1)
SIMPO = Stage("simpo", "simpo", SimpoRequest, Trained, _simpo, "tasks.simpo", trains=True, retries=1)
EVALUATE = Stage(
    "evaluate", "evaluated", EvaluateRequest, Evaluated, _evaluate, "tasks.evaluate", trains=True, retries=1
)
PROMOTE = Stage("promote", "promoted", PromoteRequest, Promoted, _promote, "tasks.promote", cached=False)

ALL_STAGES: tuple[Stage[Any, Any], ...] = (INGEST, MODEL, RENDER, PAIRS, SFT, SIMPO, EVALUATE, PROMOTE)
