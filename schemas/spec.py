"""What one training process is told: everything it reads, by content, and nothing else.

`python -m torch.distributed.run --standalone --nproc-per-node 2 -m engine.train spec.json` runs it by hand.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from schemas.base import Frozen, first_problem
from schemas.config import EvaluateConfig, LoraConfig, ModelConfig
from schemas.errors import UserError
from schemas.refs import EvaluatedAdapter, Ref
from schemas.training import SftConfig, SimpoConfig

ADAPTERS: Final = {"sft": (), "simpo": ("start",), "evaluate": get_args(EvaluatedAdapter)}
"""The names that a spec's adapters go by, for each stage."""


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("not a path: it is empty, or holds a NUL character")
    return text


Folder = Annotated[str, AfterValidator(_path)]


class TrainSpec(Frozen):
    """One run of `engine.train`. The sections that a stage does not use are None."""

    stage: Literal["sft", "simpo", "evaluate"]
    branches: tuple[Ref, ...] = Field(min_length=1, description="branch tables; a branch_id is in one of them")
    pairs: Ref | None = None
    model: Ref
    base: ModelConfig = Field(description="how the model is loaded")
    lora: LoraConfig | None = None
    adapters: dict[str, Ref] = Field(
        default={}, description="simpo: `start`, where training begins; evaluate: every adapter that is scored"
    )
    sft: SftConfig | None = None
    simpo: SimpoConfig | None = None
    evaluate: EvaluateConfig | None = None
    reference_folder: Folder | None = Field(
        default=None, description="where reference scores are kept between runs; None: in the working folder"
    )
    log_folder: Folder | None = Field(default=None, description="where TensorBoard files go; None: nowhere")

    @model_validator(mode="after")
    def _has_inputs(self) -> Self:
        if self.stage == "simpo" and self.pairs is None:
            raise ValueError("stage simpo trains on pairs, and pairs is not given")
        if self.stage == "simpo" and "start" not in self.adapters:
            raise ValueError("stage simpo begins with an adapter, and adapters.start is not given")
        names = ADAPTERS[self.stage]
        if unknown := sorted(set(self.adapters) - set(names)):
            known = f"adapters {', '.join(names)}" if names else "no adapter"
            raise ValueError(f"adapters.{unknown[0]}: stage {self.stage} takes {known}")
        return self

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        """What would be read as something else would fail hours later, or be taken for what it is not."""
        given = [
            ("model", self.model, "model"),
            *(("pairs", ref, "pairs") for ref in (self.pairs,) if ref),
            *((f"branches.{place}", ref, "branches") for place, ref in enumerate(self.branches)),
            *((f"adapters.{name}", ref, "adapter") for name, ref in self.adapters.items()),
        ]
        for name, ref, kind in given:
            if ref.kind != kind:
                raise ValueError(f"{name}: kind {kind} is read there, and this is of kind {ref.kind}")
        return self

    def digest(self) -> str:
        """sha256 of the spec without where its inputs lie, so that moved inputs resume the same work."""
        places = {"path": True}
        text = self.model_dump_json(
            exclude={
                "branches": {"__all__": places},
                "pairs": places,
                "model": places,
                "adapters": {"__all__": places},
                "reference_folder": True,
                "log_folder": True,
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()


def read_spec(path: Path) -> TrainSpec:
    """The spec in a JSON file.

    Raises:
        UserError: it cannot be read, or is no spec; names the first key that is wrong.
    """
    try:
        return TrainSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, fix="give a TrainSpec as JSON") from error
    except ValidationError as error:
        raise UserError(f"not a spec of this version: {first_problem(error)}", where=path) from error
