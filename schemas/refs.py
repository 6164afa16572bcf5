"""References to stored payloads. A stage hands on references and small reports, never tables or tensors."""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from schemas.base import Frozen

Kind = Literal["trajectories", "branches", "pairs", "model", "adapter", "reference_scores", "evaluation", "gpu_samples"]

Digest = Literal["content", "listing"]

EvaluatedAdapter = Literal["sft", "simpo", "incumbent"]
"""The adapters that an evaluation compares with the base model, by their name in its report."""

EvaluatedModel = Literal["base", EvaluatedAdapter]

ORIGIN_FILE: Final = "traceforge.json"
"""In an adapter folder: which base model (by digest) and which stage it comes from."""

STORE: Final = "store"
"""Key of the validation context: the folder of the store whose record is being read."""


def in_store(path: str, place: tuple[str, ...], info: ValidationInfo) -> str:
    """A path that a store's record names, where the store is now: it may have been moved or copied since.

    Args:
        place: how the path ends if it lies in the store. Any other is of something outside, and stays as it is.
    """
    root = (info.context or {}).get(STORE)
    return str(Path(root, *place)) if root and Path(path).parts[-len(place) :] == place else path


class Ref(Frozen):
    """One payload, by what it holds. `sha256` of a folder is that of its sorted listing of names and digests."""

    kind: Kind
    path: str = Field(description="absolute path of the file or folder")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    n_bytes: int = Field(ge=0)
    n_rows: int | None = Field(default=None, ge=0, description="rows of a table; None for folders")
    schema_version: int = 1
    digest: Digest = Field(
        default="content", description="listing: large files of an outside folder by size and modification time"
    )

    @model_validator(mode="after")
    def _in_store(self, info: ValidationInfo) -> Self:
        if self.digest == "listing":  # a folder outside, even if it is one of another store
            return self
        path = in_store(self.path, (self.kind, self.sha256[:16], Path(self.path).name), info)
        return self if path == self.path else self.model_copy(update={"path": path})
