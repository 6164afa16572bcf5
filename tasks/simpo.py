"""Stage simpo: pairs and the SFT adapter to a preference-tuned adapter, by a branch plan over one or more processes."""

from collections.abc import Callable
from typing import Final

from artifacts.store import Store
from schemas.config import ModelConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Paired, Trained
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig
from tasks.launch import run_spec, store_training

STAGE_VERSION: Final = 3


def simpo(
    pairs: Paired,
    branches: Ref,
    model: Ref,
    adapter: Ref,
    config: SimpoConfig,
    model_config: ModelConfig,
    store: Store,
    *,
    log: Callable[[str], None] | None = None,
) -> Trained:
    """Trains on the pairs of the train split, from `adapter` on, by the plan of the config.

    Raises:
        UserError: no pair to train on, or an adapter of another model.
        StageError: training failed or a rank died; the text is the failing rank's own error.
    """
    if not pairs.report.by_split.get("train", 0):
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(pairs.report.rejected_by_reason.items()))
        raise UserError(
            "there is no pair to train on",
            where="simpo",
            fix=f"candidate pairs refused: {reasons}" if reasons else "no task has both a resolved and a failed run",
        )
    tables = (branches,) if pairs.derived_branches is None else (branches, pairs.derived_branches)
    spec = TrainSpec(
        stage="simpo",
        branches=tables,
        pairs=pairs.pairs,
        model=model,
        base=model_config,
        adapters={"start": adapter},
        simpo=config,
        reference_folder=str(store.root / "reference_scores"),
        log_folder=str(store.root / "tensorboard"),
    )
    report, out = run_spec(spec, store, version=STAGE_VERSION, n_processes=config.processes, log=log)
    return store_training(report, out, store)
