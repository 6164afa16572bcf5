"""Preference training against TRL's trainers: the same pairs in the same order give the same adapter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from preference_runs import (
    BETA,
    CONFIG,
    GAMMA,
    adapter_of,
    largest_difference,
    train_here,
    with_plan,
)
from training_inputs import ref_of, start_model
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from engine.data import BranchTable, collate, read_pairs
from engine.loading import load_base, load_tokenizer, new_adapter, save_adapter, trainable_parameters
from engine.schedule import training_windows
from schemas.config import LoraConfig
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig

pytest_plugins = ("preference_fixtures",)
pytestmark = pytest.mark.usefixtures("exact")

TEXT = {"prompt": "w3", "chosen": "w4", "rejected": "w5"}
"""What TRL's trainers tokenise before our collators put the branches in its place."""


def training_order(n_pairs: int) -> list[int]:
    """The pairs of all epochs in our own order."""
    return [index for window in training_windows(CONFIG, n_pairs) for index in window]


def trl_settings(folder: Path) -> dict[str, Any]:
    """CONFIG's optimiser in TRL's words."""
    optimizer = CONFIG.optimizer
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": CONFIG.accumulation,
        "num_train_epochs": 1,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.lr_scheduler,
        "warmup_steps": optimizer.warmup_share,
        "max_grad_norm": optimizer.max_grad_norm,
        "weight_decay": optimizer.weight_decay,
        "optim": optimizer.optimizer,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
    }


def trl_collator(branches: BranchTable, pairs: list[Any]) -> Any:
    """Our branches in the form of TRL's collator: labels are -100 outside the scored spans."""

    def collate_pairs(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        fields = {}
        for side in ("chosen", "rejected"):
            batch = collate([branches[getattr(pairs[row["pair"]], side)] for row in rows])
            labels = torch.full_like(batch.input_ids_BT, -100)
            labels[batch.rows_P, batch.positions_P] = batch.input_ids_BT[batch.rows_P, batch.positions_P]
            fields[f"{side}_input_ids"], fields[f"{side}_attention_mask"] = batch[:2]
            fields[f"{side}_labels"] = labels
        return fields

    return collate_pairs


def test_twenty_steps_equal_trl_cpo_trainer(spec: TrainSpec, tmp_path: Path) -> None:
    """The same pairs in the same order through TRL, padded together there, apart here (measured: 1.1e-16)."""
    assert spec.pairs is not None
    branches = BranchTable(spec.branches)
    pairs = read_pairs(spec.pairs, "train", branches)
    model = start_model(spec)
    trainer = CPOTrainer(
        model=model,
        args=CPOConfig(
            **trl_settings(tmp_path),
            loss_type="simpo",
            beta=BETA,
            simpo_gamma=GAMMA,
            cpo_alpha=0.0,
            disable_dropout=False,
            max_length=64,
        ),
        data_collator=trl_collator(branches, pairs),
        train_dataset=Dataset.from_list([TEXT | {"pair": index} for index in training_order(len(pairs))]),
        processing_class=load_tokenizer(spec.model),
    )
    trainer.train()
    want = adapter_of({name: p.detach() for name, p in trainable_parameters(model).items()})
    adapter, report = train_here(with_plan(spec, "sequential"), tmp_path / "ours")
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [point.loss for point in report.curve] == pytest.approx(theirs, rel=1e-6)
    assert largest_difference(adapter, want) < 1e-9


def fresh_start(spec: TrainSpec, folder: Path) -> TrainSpec:
    """The same spec from a LoRA that changes nothing yet, so that policy and reference are equal."""
    adapter = new_adapter(load_base(spec.model, spec.base, torch.device("cpu"), 4096), LoraConfig(r=4, alpha=8.0), 11)
    save_adapter(adapter, folder, base_name="tiny", model_sha256=spec.model.sha256, stage="sft")
    return spec.model_copy(update={"adapters": {"start": ref_of(folder, "adapter")}})


def dpo_config() -> SimpoConfig:
    return SimpoConfig(
        **CONFIG.model_dump(exclude={"gamma", "loss", "plan", "beta"}), loss="dpo", plan="sequential", beta=0.3
    )


def test_twenty_steps_equal_trl_dpo_trainer(spec: TrainSpec, tmp_path: Path) -> None:
    """DPO with the base model as reference; the start equals it, so the first loss is log 2."""
    assert spec.pairs is not None
    run = fresh_start(spec.model_copy(update={"simpo": dpo_config()}), tmp_path / "start")
    adapter, report = train_here(run, tmp_path / "ours")
    branches = BranchTable(spec.branches)
    pairs = read_pairs(spec.pairs, "train", branches)

    def collate_pairs(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sides = [branches[getattr(pairs[row["pair"]], side)] for side in ("chosen", "rejected") for row in rows]
        batch = collate(sides)
        completion_mask = torch.zeros_like(batch.input_ids_BT)
        completion_mask[batch.rows_P, batch.positions_P] = 1
        return {
            "input_ids": batch.input_ids_BT,
            "attention_mask": batch.attention_mask_BT,
            "completion_mask": completion_mask,
        }

    model = start_model(run)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**trl_settings(tmp_path), loss_type=["sigmoid"], beta=0.3, max_length=None),
        data_collator=collate_pairs,  # type: ignore[arg-type]
        train_dataset=Dataset.from_list([TEXT | {"pair": index} for index in training_order(len(pairs))]),
        processing_class=load_tokenizer(spec.model),
    )
    trainer.train()
    want = {name: p.detach() for name, p in trainable_parameters(model).items() if ".default." in name}
    assert report.curve[0].loss == pytest.approx(math.log(2), rel=1e-6)
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [point.loss for point in report.curve] == pytest.approx(theirs, rel=1e-5)
    assert largest_difference(adapter, adapter_of(want)) < 1e-9
