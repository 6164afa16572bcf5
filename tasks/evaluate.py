"""Stage evaluate: base and adapters on the held-out tasks."""

from collections.abc import Callable, Mapping
from typing import Final

from artifacts.store import Store
from schemas.config import EvaluateConfig, ModelConfig
from schemas.refs import EvaluatedAdapter, Ref
from schemas.reports import EvalReport, Evaluated, Paired
from schemas.spec import TrainSpec
from tasks.launch import discard, run_spec

STAGE_VERSION: Final = 2


def evaluate(
    branches: Ref,
    pairs: Paired,
    model: Ref,
    adapters: Mapping[EvaluatedAdapter, Ref],
    config: EvaluateConfig,
    model_config: ModelConfig,
    store: Store,
    *,
    log: Callable[[str], None] | None = None,
) -> Evaluated:
    """Scores the base model and each adapter (`sft`, `simpo`, `incumbent`) on the held-out tasks.

    Raises:
        UserError: an adapter of another model.
        StageError: the process failed; the text is its own error.
    """
    tables = (branches,) if pairs.derived_branches is None else (branches, pairs.derived_branches)
    spec = TrainSpec(
        stage="evaluate",
        branches=tables,
        pairs=pairs.pairs,
        model=model,
        base=model_config,
        adapters=dict[str, Ref](adapters.items()),
        evaluate=config,
    )
    report, out = run_spec(spec, store, version=STAGE_VERSION, log=log)
    discard(out)
    return Evaluated(report=EvalReport.model_validate_json(report))
