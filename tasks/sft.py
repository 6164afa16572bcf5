"""Stage sft: branches to an adapter, by supervised fine-tuning on scored spans."""

from collections.abc import Callable
from typing import Final

from artifacts.store import Store
from schemas.config import LoraConfig, ModelConfig
from schemas.refs import Ref
from schemas.reports import Trained
from schemas.spec import TrainSpec
from schemas.training import SftConfig
from tasks.launch import run_spec, store_training

STAGE_VERSION: Final = 3


def sft(
    branches: Ref,
    model: Ref,
    config: SftConfig,
    lora: LoraConfig,
    model_config: ModelConfig,
    store: Store,
    *,
    log: Callable[[str], None] | None = None,
) -> Trained:
    """Trains a fresh LoRA adapter in a process of its own; a killed run goes on from its last checkpoint.

    Args:
        log: called with every line of the training process.

    Raises:
        UserError: no training branch of a resolved run, or a model that cannot be loaded.
        StageError: training failed; the text is the training process's own error.
    """
    spec = TrainSpec(
        stage="sft",
        branches=(branches,),
        model=model,
        base=model_config,
        lora=lora,
        sft=config,
        log_folder=str(store.root / "tensorboard"),
    )
    report, out = run_spec(spec, store, version=STAGE_VERSION, log=log)
    return store_training(report, out, store)
