"""The sections of a run configuration that say how to train."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.base import Section

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class OptimizerConfig(Section):
    learning_rate: float = Field(default=1e-4, ge=1e-12, le=1)
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_share: float = Field(default=0.05, ge=0, lt=1)
    max_grad_norm: float = Field(
        default=1.0, ge=1e-6, le=1e9, description="global norm; in the SimPO stage that of the summed gradient"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    optimizer: Literal["adamw_torch", "adamw_bnb_8bit"] = "adamw_torch"


class EarlyStopConfig(Section):
    """When to end training before its last step. Without a value, never."""

    patience_steps: int | None = Field(
        default=None, ge=1, description="end when the mean loss of this many steps is not below that of as many before"
    )
    min_gain: float = Field(default=0.0, ge=0, le=1e3, description="by how much it must be below, in the loss's unit")
    max_kl: float | None = Field(
        default=None,
        gt=0,
        le=1e3,
        description="preference stage: end above this KL to the start (nats a token), measured at every step",
    )


class TrainingConfig(Section):
    """What both training stages have."""

    epochs: float = Field(default=1.0, gt=0, le=100_000)
    early_stop: EarlyStopConfig = EarlyStopConfig()
    trackers: tuple[Tracker, ...] = Field(
        default=("tensorboard",), description="where steps are logged too; each needs its package"
    )
    save_steps: int = Field(default=50, ge=1)
    seed: int = Field(default=0, ge=0)


class SftConfig(TrainingConfig):
    """Supervised fine-tuning on resolved runs."""

    optimizer: OptimizerConfig = OptimizerConfig()
    tokens_per_micro_batch: int = Field(
        default=8192, ge=16, description="padded tokens of one micro-batch; a longer row goes alone"
    )
    accumulation: int = Field(default=1, ge=1)
    only_resolved: bool = Field(
        default=True,
        description="train on resolved runs only; unknown outcomes are never treated as resolved",
    )

    @model_validator(mode="after")
    def _no_kl(self) -> "SftConfig":
        if self.early_stop.max_kl is not None:
            raise ValueError("early_stop.max_kl is measured in the preference stage only")
        return self


class SimpoConfig(TrainingConfig):
    """Preference optimisation on pairs, one branch a rank."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    loss: Literal["simpo", "orpo", "dpo", "ipo", "hinge", "apo_zero", "apo_down"] = Field(
        default="simpo", description="dpo, ipo, hinge and apo compare with the base model, scored once"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="dpo only: the share of labels taken to be wrong (conservative DPO)"
    )
    beta: float = Field(
        default=2.0,
        ge=1e-6,
        le=1e3,
        description="where it is not given 2 for simpo, as its authors took, and 0.1 for the others, as TRL takes",
    )
    gamma: float | None = Field(
        default=None, ge=0, le=1e3, description="target margin, as in L = -log sigmoid(beta (a_c - a_r) - gamma)"
    )
    gamma_beta_ratio: float | None = Field(default=None, ge=0, le=1e3, description="gamma / beta, in gamma's place")
    cpo_alpha: float = Field(
        default=0.0, ge=0, le=1e3, description="weight of an added SFT term on the chosen branch; 0: plain SimPO"
    )
    plan: Literal["auto", "parallel", "sequential", "shared_prefix"] = Field(
        default="auto",
        description="parallel: the branches of a pair on two processes; sequential: both on one; shared_prefix: both "
        "behind their common prefix in one pass; auto: for each pair what is predicted to end first",
    )
    n_processes: int | None = Field(
        default=None, ge=1, le=64, description="one a GPU; none given: 2 for auto and parallel, 1 for the others"
    )
    balanced: bool = Field(default=True, description="deal branches to processes by predicted cost; false: in order")
    accumulation: int = Field(default=1, ge=1, description="pairs per optimiser step")
    accumulation_start: int | None = Field(
        default=None, ge=1, description="pairs per step at the start, falling linearly to `accumulation`"
    )
    accumulation_decay_share: float = Field(
        default=0.5, ge=1e-6, le=1, description="share of all pairs after which `accumulation` is reached"
    )
    margin_pairs: int = Field(
        default=256,
        ge=1,
        description="at most so many pairs are scored for the margins before and after training and the KL between; "
        "early_stop.max_kl has one of every step scored before it",
    )

    @model_validator(mode="before")
    @classmethod
    def _beta_of_the_loss(cls, given: Any) -> Any:
        """SimPO's is meant for means: on sums over thousands of tokens it saturates the loss."""
        if isinstance(given, dict) and "beta" not in given and given.get("loss", "simpo") != "simpo":
            return given | {"beta": 0.1}
        return given

    @model_validator(mode="after")
    def _falling_accumulation(self) -> "SimpoConfig":
        if self.accumulation_start is not None and self.accumulation_start < self.accumulation:
            raise ValueError("accumulation_start must not be below accumulation: steps begin with more pairs")
        return self

    @model_validator(mode="after")
    def _enough_processes(self) -> "SimpoConfig":
        if self.plan == "parallel" and self.processes % 2:
            raise ValueError(f"plan parallel needs two processes a pair, n_processes is {self.processes}")
        return self

    @property
    def processes(self) -> int:
        if self.n_processes is not None:
            return self.n_processes
        return 2 if self.plan in ("auto", "parallel") else 1

    @model_validator(mode="after")
    def _one_gamma(self) -> "SimpoConfig":
        if self.gamma is not None and self.gamma_beta_ratio is not None:
            raise ValueError("give gamma or gamma_beta_ratio, not both")
        return self

    @model_validator(mode="after")
    def _options_of_the_loss(self) -> "SimpoConfig":
        only = {"gamma": "simpo", "gamma_beta_ratio": "simpo", "cpo_alpha": "simpo", "label_smoothing": "dpo"}
        for option, loss in only.items():
            if getattr(self, option) and self.loss != loss:
                raise ValueError(f"{option} belongs to loss = {loss!r} and would be ignored by {self.loss!r}")
        return self

    @property
    def resolved_gamma(self) -> float:
        """gamma of the formula; 0.5 * beta when neither spelling is given (the middle of the SimPO authors' grid)."""
        if self.gamma is not None:
            return self.gamma
        return self.beta * (0.5 if self.gamma_beta_ratio is None else self.gamma_beta_ratio)
