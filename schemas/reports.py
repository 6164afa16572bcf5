"""What each stage says about itself: small, typed, JSON. A stage result is a report and references to what was made."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from schemas.base import Frozen
from schemas.refs import EvaluatedModel, Ref, in_store


class Dropped(Frozen):
    """Something left out, and why. Nothing is ever left out without one of these."""

    what: str
    reason: str


LISTED = 200
"""How many of a kind an ingest report lists; all are counted, and all are in its file."""


class IngestReport(Frozen):
    n_files: int
    n_files_reused: int = Field(default=0, description="files not read again, since they have not changed")
    n_side_files: int = Field(default=0, description="reports, reward files and the like: joined, no runs of their own")
    n_trajectories: int
    n_turns: int
    n_calls: int = 0
    n_observations: int = 0
    n_unpaired_results: int = Field(default=0, description="results whose call is not in the log; kept as context")
    by_format: dict[str, int]
    by_outcome: dict[str, int]
    by_exit_status: dict[str, int] = {}
    length_chars: dict[str, int] = Field(
        default={}, description="number of runs by conversation length; a key is the bucket's upper edge in characters"
    )
    redactions: dict[str, int] = {}
    redact: bool = True
    n_replaced_characters: int = Field(
        default=0, description="characters that are no valid Unicode, replaced with U+FFFD"
    )
    quarantined: tuple[Dropped, ...] = Field(default=(), description="files that gave no run; the first LISTED of them")
    damaged: tuple[Dropped, ...] = Field(
        default=(), description="lines left out of files that were read otherwise; the first LISTED of them"
    )
    duplicates: tuple[Dropped, ...] = Field(default=(), description="runs left out; the first LISTED of them")
    n_quarantined: int = 0
    n_damaged: int = 0
    n_duplicates: int = 0
    left_out_by_reason: dict[str, int] = Field(default={}, description="of files, lines and runs; the most frequent")
    left_out: str = Field(default="", description="JSON Lines file in the store with all that was left out, and why")

    @field_validator("left_out")
    @classmethod
    def _left_out_in_store(cls, path: str, info: ValidationInfo) -> str:
        return in_store(path, ("ingested", *Path(path).parts[-3:]), info)


LeakText = Literal["task", "scored"]


class Leak(Frozen):
    """A training run that has a text in common with a held-out one."""

    kind: Literal["equal", "similar"]
    text: LeakText = Field(description="task: the issue or first user message; scored: what is trained on")
    train: str
    heldout: str
    similarity: float = Field(ge=0, le=1, description="1 for equal texts, else the estimated Jaccard index")


class RenderReport(Frozen):
    n_branches: int
    n_tokens: int
    n_scored: int
    tokens_by_kind: dict[str, int]
    by_split: dict[str, int]
    length_tokens: dict[str, int] = Field(description="min, p50, p90, max of branch lengths, before any is dropped")
    kept_at_limit: dict[str, int] = Field(description="how many runs each length limit would keep")
    template: str
    trained_positions: int | None = Field(default=None, description="of the model, where its config.json names them")
    n_beyond_positions: int = Field(default=0, description="branches kept that are longer than that")
    dropped: tuple[Dropped, ...] = ()
    n_leaks: dict[str, int] = Field(
        default={}, description="training runs that leak into the held-out side, by kind and text"
    )
    leaks: tuple[Leak, ...] = Field(default=(), description="the first 100 of them")


class PairReport(Frozen):
    n_pairs: int
    by_rule: dict[str, int]
    by_split: dict[str, int]
    n_tasks_with_pairs: int
    rejected_by_reason: dict[str, int] = Field(
        default={}, description="candidate pairs refused, by the guard that refused them"
    )
    shared_prefix_tokens: dict[str, int] = Field(default={}, description="min, p50, p90, max")
    shared_prefix_histogram: dict[str, int] = Field(
        default={}, description="pairs by the length of their shared prefix: decides the branch plan"
    )
    length_gap_tokens: dict[str, float] = Field(default={}, description="chosen minus rejected: mean and mean absolute")
    dropped: tuple[Dropped, ...] = ()


class TrainPoint(Frozen):
    """One logged optimiser step."""

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    margin: float | None = None
    accuracy: float | None = None
    chosen_logp: float | None = Field(default=None, description="mean nats per scored token")
    rejected_logp: float | None = None
    n_pairs: int | None = Field(default=None, description="pairs of this step")
    kl: float | None = Field(default=None, description="estimated KL to the start policy, nats per scored token")
    idle_share: float | None = Field(default=None, description="share of the ranks' time spent waiting for others")
    exchange_share: float | None = Field(default=None, description="share of the step's time spent summing gradients")
    tflops_per_s: float | None = Field(
        default=None, description="per process, by the cost model; without what is computed again or masked"
    )
    allocated_bytes: int | None = Field(
        default=None, description="peak of rank 0's allocator in this step; None off the GPU"
    )
    reserved_bytes: int | None = None


class GpuUse(Frozen):
    """What NVML saw of one rank's GPU: all processes on it, and what CUDA and its libraries take beside PyTorch."""

    rank: int
    name: str
    n_samples: int
    total_bytes: int
    peak_used_bytes: int
    mean_busy_percent: float | None = None
    peak_power_w: float | None = None


class TrainReport(Frozen):
    stage: Literal["sft", "simpo"]
    n_examples: int = Field(description="rows of SFT, pairs of SimPO")
    n_steps: int
    n_tokens_seen: int = Field(description="tokens that attention saw, without padding, over the whole run")
    n_tokens_scored: int
    padding_share: float = Field(ge=0, le=1)
    first_loss: float = Field(
        description="mean of the first logged quarter of the steps, in nats per scored token for SFT"
    )
    last_loss: float
    first_margin: float | None = Field(
        default=None, description="mean margin on the training pairs before step 1, nats per token"
    )
    last_margin: float | None = Field(default=None, description="the same after the last step")
    wall_s: float
    world_size: int
    backend: str = Field(description="collectives: none, gloo or nccl")
    plan: str
    peak_memory_bytes: int = Field(description="allocated on rank 0's GPU; resident in host memory off the GPU")
    peak_reserved_bytes: int | None = Field(default=None, description="held by rank 0's allocator; None off the GPU")
    gpus: tuple[GpuUse, ...] = Field(default=(), description="by NVML, one a rank; empty: see settings.gpu_monitor")
    idle_share: float | None = Field(default=None, description="mean over the steps; None for one process")
    stopped_early: str | None = Field(default=None, description="the rule that ended training before its last step")
    resumed_from_step: int = 0
    settings: dict[str, str] = Field(default={}, description="what was really in effect: attention, dtype, versions")
    curve: tuple[TrainPoint, ...] = ()


class BucketScore(Frozen):
    max_tokens: int | None = Field(description="upper edge of the bucket; None: above the last edge")
    n_branches: int
    nll_per_action_token: float | None


class ModelScore(Frozen):
    """One model on the held-out tasks."""

    name: EvaluatedModel
    n_branches: int
    n_pairs: int
    nll_per_action_token: float | None = Field(description="nats, over resolved held-out branches; None without any")
    pair_accuracy: float | None
    pair_accuracy_ci95: tuple[float, float] | None = None
    mean_margin: float | None
    buckets: tuple[BucketScore, ...] = ()


class EvalReport(Frozen):
    models: tuple[ModelScore, ...]
    n_heldout_tasks: int
    n_tokens_seen: int = Field(default=0, description="tokens that attention saw, without padding, over all models")
    n_tokens_scored: int = 0
    wall_s: float
    gpus: tuple[GpuUse, ...] = ()
    settings: dict[str, str] = {}

    def of(self, name: str) -> ModelScore | None:
        return next((score for score in self.models if score.name == name), None)


class PromoteReport(Frozen):
    promoted: bool
    reasons: tuple[str, ...]
    candidate_sha256: str
    incumbent_sha256: str | None


class StageResult(Frozen):
    """Base of what a stage returns. `registry` lets a stored record be read back as its own type."""

    registry: ClassVar[dict[str, type["StageResult"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        StageResult.registry[cls.__name__] = cls

    def refs(self) -> tuple[Ref, ...]:
        return tuple(value for _, value in self if isinstance(value, Ref))


class Ingested(StageResult):
    trajectories: Ref
    report: IngestReport


class ModelReady(StageResult):
    model: Ref
    name: str
    n_parameters: int


class Rendered(StageResult):
    branches: Ref
    report: RenderReport


class Paired(StageResult):
    pairs: Ref
    derived_branches: Ref | None = Field(
        default=None, description="branches made for step and repair pairs; same schema as branches"
    )
    report: PairReport


class Trained(StageResult):
    adapter: Ref
    report: TrainReport
    gpu_samples: Ref | None = Field(default=None, description="what NVML saw, a CSV a rank; None off the GPU")


class Evaluated(StageResult):
    report: EvalReport


class Promoted(StageResult):
    report: PromoteReport
