"""What each stage is asked to do: references to its inputs and its sections of the configuration.

A request crosses processes as JSON (it is the parameter of a stage that runs on a worker), and its identity is the
stage's cache key: digests instead of paths, and never the folder of the store.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from schemas.base import Frozen
from schemas.config import (
    EvaluateConfig,
    LoraConfig,
    ModelConfig,
    PairsConfig,
    PromoteConfig,
    RenderConfig,
    SourceConfig,
    SplitConfig,
)
from schemas.refs import EvaluatedAdapter, Ref
from schemas.reports import Evaluated, Paired, StageResult
from schemas.training import SftConfig, SimpoConfig

StageName = Literal["ingest", "model", "render", "pairs", "sft", "simpo", "evaluate", "promote"]

COMPUTE_FIELDS = frozenset({"dtype", "quantization", "backend"})
"""Of the model section, what a stage that computes depends on beside the model's own digest."""


def _identity(value: Any) -> Any:
    match value:
        case Ref():
            return [value.kind, value.sha256]
        case StageResult():
            return [_identity(ref) for ref in value.refs()] or value.model_dump(mode="json")
        case ModelConfig():
            return value.model_dump(mode="json", include=set(COMPUTE_FIELDS))
        case BaseModel():
            return value.model_dump(mode="json")
        case dict():
            return {key: _identity(item) for key, item in sorted(value.items())}
        case _:
            return value


class Request(Frozen):
    store: str = Field(description="folder of the artifact store")

    def identity(self) -> dict[str, Any]:
        """What the result depends on, as JSON values: equal identities give equal results."""
        return {name: _identity(value) for name, value in self if name != "store"}


class IngestRequest(Request):
    source: SourceConfig
    source_sha256: str = Field(description="digest of the files that `source` stands for, at the time of asking")

    def identity(self) -> dict[str, Any]:
        section = self.source.model_dump(mode="json", exclude={"paths"})
        return {"source": section, "source_sha256": self.source_sha256}


class ModelRequest(Request):
    model: ModelConfig
    source_sha256: str = Field(default="", description="digest of the files behind a model given as a folder")

    def identity(self) -> dict[str, Any]:
        return {"name": self.model.name, "seed": self.model.seed, "source_sha256": self.source_sha256}


class RenderRequest(Request):
    trajectories: Ref
    model: Ref
    render: RenderConfig
    split: SplitConfig
    chat_template: str = "auto"
    template_sha256: str = Field(default="", description="digest of a template given as a file")

    def identity(self) -> dict[str, Any]:
        template = {"chat_template": self.template_sha256 or self.chat_template, "template_sha256": ""}
        return super().identity() | template


class PairsRequest(Request):
    branches: Ref
    trajectories: Ref
    pairs: PairsConfig


class SftRequest(Request):
    branches: Ref
    model: Ref
    base: ModelConfig
    lora: LoraConfig
    sft: SftConfig


class SimpoRequest(Request):
    pairs: Paired
    branches: Ref
    model: Ref
    base: ModelConfig
    adapter: Ref = Field(description="the adapter to start from")
    simpo: SimpoConfig


class EvaluateRequest(Request):
    branches: Ref
    pairs: Paired
    model: Ref
    base: ModelConfig
    adapters: dict[EvaluatedAdapter, Ref]
    evaluate: EvaluateConfig


class PromoteRequest(Request):
    evaluated: Evaluated
    candidate: Ref
    promote: PromoteConfig
