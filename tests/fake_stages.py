"""Stages that cost nothing: each writes a payload that depends on just what its request's identity says."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from artifacts.store import Store
from schemas.refs import Kind, Ref
from schemas.reports import (
    EvalReport,
    Evaluated,
    Ingested,
    IngestReport,
    ModelReady,
    ModelScore,
    Paired,
    PairReport,
    Promoted,
    PromoteReport,
    Rendered,
    RenderReport,
    Trained,
    TrainPoint,
    TrainReport,
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
)
from tasks import stages
from tasks.progress import logged, progressed


class FakeStages:
    """The stages' functions, and how often each was really called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failures: dict[str, list[Exception]] = {}
        """stage -> what its next calls raise"""

    def _enter(self, stage: str) -> None:
        self.calls[stage] += 1
        if self.failures.get(stage):
            raise self.failures[stage].pop(0)

    def _payload(self, request: Request, kind: Kind, content: Any = None) -> Ref:
        store = Store(request.store)
        with store.staging() as folder:
            path = folder / f"{kind}.json"
            path.write_text(json.dumps(request.identity() if content is None else content, sort_keys=True))
            return store.add(path, kind, n_rows=3)

    def ingest(self, request: IngestRequest) -> Ingested:
        self._enter("ingest")
        progressed("ingest", 1, 1)
        report = IngestReport(n_files=3, n_trajectories=3, n_turns=9, by_format={"x": 3}, by_outcome={"resolved": 3})
        # Like the real stage: what is read decides, not how it is asked for.
        return Ingested(trajectories=self._payload(request, "trajectories", request.source_sha256), report=report)

    def model(self, request: ModelRequest) -> ModelReady:
        self._enter("model")
        return ModelReady(model=self._payload(request, "model"), name=request.model.name, n_parameters=1)

    def render(self, request: RenderRequest) -> Rendered:
        self._enter("render")
        report = RenderReport(
            n_branches=3,
            n_tokens=30,
            n_scored=10,
            tokens_by_kind={"action": 10},
            by_split={"train": 3},
            length_tokens={"max": 10},
            kept_at_limit={"2048": 3},
            template="fake",
        )
        return Rendered(branches=self._payload(request, "branches"), report=report)

    def pairs(self, request: PairsRequest) -> Paired:
        self._enter("pairs")
        report = PairReport(n_pairs=1, by_rule={"outcome": 1}, by_split={"train": 1}, n_tasks_with_pairs=1)
        return Paired(pairs=self._payload(request, "pairs"), report=report)

    def _trained(self, stage: Any, request: Request) -> Trained:
        self._enter(stage)
        logged(stage, "step 1: loss 2.0")
        points = tuple(
            TrainPoint(step=n, epoch=n / 4, loss=2.0 - n / 4, grad_norm=1.0, learning_rate=1e-3, tokens_per_s=10.0)
            for n in range(1, 5)
        )
        report = TrainReport(
            stage=stage,
            n_examples=3,
            n_steps=4,
            n_tokens_seen=30,
            n_tokens_scored=10,
            padding_share=0.0,
            first_loss=2.0,
            last_loss=1.0,
            first_margin=0.0 if stage == "simpo" else None,
            last_margin=0.5 if stage == "simpo" else None,
            wall_s=0.1,
            world_size=1,
            backend="none",
            plan="sequential",
            peak_memory_bytes=1,
            settings={"dtype": "float32"},
            curve=points,
        )
        return Trained(adapter=self._payload(request, "adapter"), report=report)

    def sft(self, request: SftRequest) -> Trained:
        return self._trained("sft", request)

    def simpo(self, request: SimpoRequest) -> Trained:
        return self._trained("simpo", request)

    def evaluate(self, request: EvaluateRequest) -> Evaluated:
        self._enter("evaluate")
        score = ModelScore(
            name="base", n_branches=1, n_pairs=1, nll_per_action_token=1.0, pair_accuracy=1.0, mean_margin=0.1
        )
        return Evaluated(report=EvalReport(models=(score,), n_heldout_tasks=1, wall_s=0.1))

    def promote(self, request: PromoteRequest) -> Promoted:
        self._enter("promote")
        report = PromoteReport(
            promoted=True, reasons=("no incumbent",), candidate_sha256=request.candidate.sha256, incumbent_sha256=None
        )
        return Promoted(report=report)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    """Puts the fakes in the place of every stage's function; names, keys, retries and flags stay the real ones."""
    fakes = FakeStages()
    for name in ("ingest", "model", "render", "pairs", "sft", "simpo", "evaluate", "promote"):
        real = getattr(stages, name.upper())
        monkeypatch.setattr(stages, name.upper(), dataclasses.replace(real, run=getattr(fakes, name)))
    return fakes


def write_source(folder: Path) -> str:
    """A folder that can be digested as a source; the fakes never read it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.traj.json").write_text("{}")
    return str(folder)
