"""What the sample generator reports."""

from pydantic import Field

from schemas.base import Frozen


class SampleRunReport(Frozen):
    """One run folder: a policy over all tasks."""

    name: str = Field(description="folder below out_dir, such as careful-0")
    policy: str
    n_resolved: int = Field(ge=0)
    n_limits_exceeded: int = Field(ge=0)
    n_empty_patches: int = Field(ge=0)


class SampleReport(Frozen):
    """What `generate_samples` wrote. Token counts are estimates: characters of the conversation / 4."""

    out_dir: str
    seed: int
    n_tasks: int = Field(ge=1)
    n_runs: int = Field(ge=1)
    n_resolved: int = Field(ge=0)
    n_failed: int = Field(ge=0)
    n_tasks_with_both_outcomes: int = Field(ge=0)
    min_tokens: int = Field(ge=0)
    median_tokens: int = Field(ge=0)
    max_tokens: int = Field(ge=0)
    runs: tuple[SampleRunReport, ...]
    python_version: str
    pytest_version: str
    patches_by: str = Field(description="git, or difflib where git is absent")
    duration_s: float = Field(ge=0)
