"""What `traceforge inspect` says: a run, a branch or a pair, cut into its spans."""

from typing import Literal

from pydantic import Field

from schemas.base import Frozen


class Segment(Frozen):
    """One span with its text."""

    kind: Literal["prompt", "observation", "reasoning", "thought", "action", "turn_end"]
    message: int = Field(description="index into the run's messages; -1 before the first")
    weight: float = Field(description="0: not scored")
    n_tokens: int
    text: str


class BranchView(Frozen):
    """One branch, whole."""

    branch_id: str
    task_id: str
    outcome: str
    score: float | None
    split: str
    n_tokens: int
    n_scored: int
    n_turns_scored: int
    tokens_by_kind: dict[str, int]
    scored_by_kind: dict[str, int]
    refused: str | None = Field(default=None, description="why the render stage would drop it; None: it would not")
    segments: tuple[Segment, ...]


class PairView(Frozen):
    """The two sides of a pair; their segments begin where the shared prefix ends."""

    pair_id: str
    rule: str
    n_shared_prefix: int
    shared_prefix: tuple[Segment, ...]
    chosen: BranchView
    rejected: BranchView


class InspectReport(Frozen):
    path: str
    row: int
    n_rows: int = Field(description="runs, branches or pairs in the file")
    template: str
    branch: BranchView | None = None
    pair: PairView | None = None
