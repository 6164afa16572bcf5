"""References to stored payloads. A stage hands on references and small reports, never tables or tensors."""

from typing import Final, Literal

from pydantic import Field

from schemas.base import Frozen

Kind = Literal["trajectories", "branches", "pairs", "model", "adapter", "reference_scores", "evaluation", "gpu_samples"]

Digest = Literal["content", "listing"]


ORIGIN_FILE: Final = "traceforge.json"
"""In an adapter folder: which base model (by digest) and which stage it comes from."""


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
