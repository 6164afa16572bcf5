"""What a whole run says about itself: one line a stage, and what every stage returned."""

from typing import Literal

from pydantic import Field

from schemas.base import Frozen
from schemas.refs import Ref
from schemas.reports import Evaluated, Ingested, ModelReady, Paired, Promoted, Rendered, StageResult, Trained
from schemas.requests import StageName

RunStatus = Literal["running", "completed", "failed", "cancelled", "nothing_new", "skipped"]


class StageRun(Frozen):
    """One stage of one run."""

    stage: StageName
    outcome: Literal["ran", "cached", "failed"]
    wall_s: float = Field(ge=0)
    refs: tuple[Ref, ...] = ()
    summary: str = ""


class RunReport(StageResult):
    """One run of the pipeline. Stages that were not asked for, or not reached, are None."""

    run_id: str
    name: str
    store: str
    status: RunStatus
    message: str = ""
    started_at: str = Field(description="UTC, ISO 8601")
    wall_s: float = Field(ge=0)
    inputs_sha256: str = Field(description="digest of the source's content and of the configuration")
    stages: tuple[StageRun, ...] = ()
    ingested: Ingested | None = None
    model: ModelReady | None = None
    rendered: Rendered | None = None
    paired: Paired | None = None
    sft: Trained | None = None
    simpo: Trained | None = None
    evaluated: Evaluated | None = None
    promoted: Promoted | None = None

    def all_refs(self) -> tuple[Ref, ...]:
        return tuple(ref for stage in self.stages for ref in stage.refs)
