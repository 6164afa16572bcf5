"""What one training process is told: everything it reads, by content, and nothing else.

`python -m torch.distributed.run --standalone --nproc-per-node 2 -m engine.train spec.json` runs it by hand.
"""

import hashlib
from typing import Literal

from pydantic import Field

from schemas.base import Frozen
from schemas.config import EvaluateConfig, LoraConfig, ModelConfig, SftConfig, SimpoConfig
from schemas.refs import Ref


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
    reference_folder: str | None = Field(
        default=None, description="where reference scores are kept between runs; None: in the working folder"
    )
    log_folder: str | None = Field(default=None, description="where TensorBoard files go; None: nowhere")

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
