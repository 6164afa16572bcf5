"""Branch plans against each other, against plain autograd and against TRL's CPOTrainer, with real gloo processes."""

from __future__ import annotations

import math
import multiprocessing
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preference_worker
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from training_inputs import float64_norm, make_tables, ref_of, simpo_spec
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from engine import preference
from engine.collectives import Group
from engine.data import Branch, BranchTable, collate, read_pairs
from engine.loading import (
    load_adapter,
    load_base,
    load_tokenizer,
    new_adapter,
    save_adapter,
    trainable_parameters,
)
from engine.schedule import training_windows
from engine.scores import token_logprobs
from engine.session import Stop, latest_checkpoint
from schemas.config import LoraConfig, OptimizerConfig, SimpoConfig
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec

REPOSITORY = Path(__file__).resolve().parent.parent
BETA, GAMMA = 2.0, 0.6
CONFIG = SimpoConfig(
    optimizer=OptimizerConfig(
        learning_rate=5e-3, lr_scheduler="linear", warmup_share=0.0, max_grad_norm=0.15, weight_decay=0.01
    ),
    beta=BETA,
    gamma=GAMMA,
    epochs=10,
    accumulation=4,
    seed=3,
)
"""8 pairs in windows of 4: 20 steps; the gradient norm is 0.2 to 1.7, so clipping at 0.15 acts at every step."""


def with_plan(spec: TrainSpec, plan: str, **options: Any) -> TrainSpec:
    assert spec.simpo is not None
    return spec.model_copy(update={"simpo": spec.simpo.model_copy(update={"plan": plan} | options)})


def run_ranks(spec: TrainSpec, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Trains on `world_size` real processes; returns what each rank holds afterwards."""
    outputs, codes = start_ranks(spec, world_size, folder)
    assert codes == [0] * world_size, "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def start_ranks(
    spec: TrainSpec, world_size: int, folder: Path, *, disturbed: str = "", timeout_s: float = 240
) -> tuple[list[str], list[int | None]]:
    """What each of the processes printed, and its exit status."""
    folder.mkdir()
    (folder / "spec.json").write_text(spec.model_dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # ranks are forked off a server that has imported torch once, which takes longer than their training
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preference_worker"])
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        for rank in range(world_size):
            launch = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(context.Process(target=preference_worker.rank, args=(launch, folder, disturbed)))
            ranks[-1].start()
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.1, deadline - time.monotonic()))
        rank.kill()
    outputs = [(folder / f"rank{rank}.log").read_text() for rank in range(world_size)]
    return outputs, [rank.exitcode for rank in ranks]


def largest_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """||got - want|| / ||want|| over all tensors together."""
    assert got.keys() == want.keys()
    difference = sum(float((got[name] - want[name]).norm() ** 2) for name in want)
    return math.sqrt(difference / sum(float(want[name].norm() ** 2) for name in want))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return simpo_spec(tmp_path_factory.mktemp("inputs"), CONFIG, shared_prefix=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_float64_norms() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3RMSNorm, "forward", float64_norm)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def parallel(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parallel") / "run"
    return run_ranks(with_plan(spec, "parallel", balanced=False), 2, folder)


@pytest.fixture(scope="module")
def four_ranks(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Plan auto, windows of 4 pairs dealt to 4 ranks: splits, whole pairs and shared prefixes."""
    return run_ranks(with_plan(spec, "auto", n_processes=4), 4, tmp_path_factory.mktemp("four") / "run")


@pytest.fixture(scope="module")
def sequential(
    spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], TrainReport]:
    return train_here(with_plan(spec, "sequential"), tmp_path_factory.mktemp("sequential"))


def train_here(spec: TrainSpec, out: Path, **options: Any) -> tuple[dict[str, torch.Tensor], TrainReport]:
    assert spec.simpo is not None
    report = preference.train(spec, spec.simpo, Group(), out, options.pop("stop", Stop()), **options)
    return load_file(out / "adapter" / "adapter_model.safetensors"), report


def adapter_of(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameter names as they are in a stored adapter."""
    return {name.replace(".default.", "."): tensor for name, tensor in parameters.items()}


def plain_scores(model: Any, branch: Branch) -> torch.Tensor:
    """Mean log-probability from the full logits, without any of the engine's scoring."""
    ids = torch.from_numpy(branch.token_ids_T.astype("int64"))[None]
    logp = model(ids).logits[0].log_softmax(-1)
    positions = torch.from_numpy(branch.positions_P)
    return logp[positions - 1, ids[0, positions]].mean()


def test_summed_gradient_of_the_ranks_is_the_gradient(
    spec: TrainSpec, parallel: list[dict[str, Any]], four_ranks: list[dict[str, Any]]
) -> None:
    """Against plain autograd through the loss of both branches at once (measured: 1.2e-16 relative)."""
    assert spec.pairs is not None
    branches, pairs = BranchTable(spec.branches), read_pairs(spec.pairs, "train")[:4]
    base = load_base(spec.model, spec.base, torch.device("cpu"), 4096)
    model = load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
    loss = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        margin = plain_scores(model, branches[pair.chosen]) - plain_scores(model, branches[pair.rejected])
        loss = loss - torch.nn.functional.logsigmoid(BETA * margin - GAMMA) / len(pairs)
    loss.backward()
    want = {name: p.grad for name, p in trainable_parameters(model).items() if p.grad is not None}
    for rank in parallel + four_ranks:
        assert largest_difference(rank["gradient"], want) < 1e-9


def test_ranks_hold_the_same_parameters_bit_for_bit(
    parallel: list[dict[str, Any]], four_ranks: list[dict[str, Any]]
) -> None:
    for first, *others in (parallel, four_ranks):
        for other in others:
            assert first["parameters"].keys() == other["parameters"].keys()
            assert all(
                torch.equal(first["parameters"][name], other["parameters"][name]) for name in first["parameters"]
            )


def test_parallel_equals_sequential(
    parallel: list[dict[str, Any]], sequential: tuple[dict[str, torch.Tensor], TrainReport]
) -> None:
    """20 steps with accumulation and clipping (measured: 8e-17)."""
    adapter, report = sequential
    assert largest_difference(adapter_of(parallel[0]["parameters"]), adapter) < 1e-9
    other = TrainReport.model_validate_json(parallel[0]["report"])
    assert other.n_steps == report.n_steps == 20
    assert [point.loss for point in other.curve] == pytest.approx([point.loss for point in report.curve], rel=1e-6)
    assert other.n_tokens_seen == report.n_tokens_seen
    assert other.world_size == 2
    assert other.backend == "gloo"
    assert other.idle_share is not None
    assert 0 < other.idle_share < 1
    assert report.idle_share is None


def test_auto_on_four_ranks_equals_sequential(
    four_ranks: list[dict[str, Any]], sequential: tuple[dict[str, torch.Tensor], TrainReport]
) -> None:
    """20 steps, balanced; all three ways of working on a pair are used (measured: 2e-16)."""
    adapter, report = sequential
    other = TrainReport.model_validate_json(four_ranks[0]["report"])
    for way in ("split over two ranks", "whole on one rank", "behind their shared prefix"):
        assert way in other.plan
    assert largest_difference(adapter_of(four_ranks[0]["parameters"]), adapter) < 1e-9
    assert [point.kl for point in other.curve] == pytest.approx([point.kl for point in report.curve], rel=1e-6)


@pytest.mark.parametrize("plan", ["auto", "shared_prefix"])
def test_shared_prefix_equals_sequential(
    spec: TrainSpec, sequential: tuple[dict[str, torch.Tensor], TrainReport], tmp_path: Path, plan: str
) -> None:
    """Both tails behind their prefix in one pass (measured: 2e-16); half of the pairs share no token."""
    adapter, report = train_here(with_plan(spec, plan, n_processes=1), tmp_path)
    assert largest_difference(adapter, sequential[0]) < 1e-9
    assert f"{80 if plan == 'shared_prefix' else 40} behind their shared prefix" in report.plan


def test_rank_that_drifts_apart_stops_the_run_and_the_tensor_is_named(spec: TrainSpec, tmp_path: Path) -> None:
    """Rank 1 changes one number of its adapter by 1e-12 in the first step."""
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight"
    outputs, codes = start_ranks(with_plan(spec, "parallel", save_steps=1), 2, tmp_path / "run", disturbed=name)
    assert 0 not in codes
    assert f"ranks 0 and 1 differ in the adapter after step 1: {name} (1 in all)" in outputs[0]
    assert latest_checkpoint(tmp_path / "run" / "out") is None


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


def test_twenty_steps_equal_trl_cpo_trainer(
    spec: TrainSpec, sequential: tuple[dict[str, torch.Tensor], TrainReport], tmp_path: Path
) -> None:
    """The same pairs in the same order through TRL, padded together there, apart here (measured: 1.1e-16)."""
    assert spec.pairs is not None
    branches, pairs = BranchTable(spec.branches), read_pairs(spec.pairs, "train")
    base = load_base(spec.model, spec.base, torch.device("cpu"), 4096)
    model = load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
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
    adapter, report = sequential
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
    branches, pairs = BranchTable(spec.branches), read_pairs(spec.pairs, "train")

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

    model = load_adapter(
        load_base(run.model, run.base, torch.device("cpu"), 4096), run.adapters["start"], run.model, trainable=True
    )
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


def test_margin_rises_and_clipping_acted(sequential: tuple[dict[str, torch.Tensor], TrainReport]) -> None:
    _, report = sequential
    assert report.first_margin is not None
    assert report.last_margin is not None
    assert report.last_margin > report.first_margin + 0.1
    assert report.last_loss < report.first_loss
    assert min(point.grad_norm for point in report.curve) > CONFIG.optimizer.max_grad_norm


def test_last_partial_window_is_normalised_by_its_own_pairs(tmp_path: Path) -> None:
    """3 pairs in windows of 2: the second window holds one pair, and its loss is that pair's, not half of it."""
    optimizer = OptimizerConfig(learning_rate=1e-30, warmup_share=0.0)
    config = CONFIG.model_copy(update={"epochs": 1, "accumulation": 2, "plan": "sequential", "optimizer": optimizer})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=3, n_heldout=0)
    assert spec.pairs is not None
    _, report = train_here(spec, tmp_path / "out")
    assert len(report.curve) == 2
    last = report.curve[-1]
    assert last.margin is not None
    assert last.loss == pytest.approx(math.log1p(math.exp(GAMMA - BETA * last.margin)), rel=1e-6)


def test_pair_weights_scale_their_loss(tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"epochs": 1, "plan": "sequential", "accumulation": 1, "optimizer": OptimizerConfig(learning_rate=1e-30)}
    )
    plain = simpo_spec(tmp_path / "plain", config, n_pairs=3, n_heldout=0)
    _, weighted_pairs = make_tables(tmp_path / "weighted", n_pairs=3, n_heldout=0, weights=(0.5,))
    weighted = plain.model_copy(update={"pairs": weighted_pairs.pairs})
    _, one = train_here(plain, tmp_path / "out-plain")
    _, half = train_here(weighted, tmp_path / "out-weighted")
    assert [point.loss for point in half.curve] == pytest.approx([0.5 * point.loss for point in one.curve], rel=1e-6)


def test_dropout_gives_both_passes_of_a_branch_the_same_mask(tmp_path: Path) -> None:
    """Scores without graph and with graph must agree under dropout, or the slope belongs to another model."""
    config = CONFIG.model_copy(update={"epochs": 1, "plan": "sequential"})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=2, n_heldout=0, dropout=0.5)
    seen: dict[str, list[float]] = {"scored": [], "scored again": [], "without dropout": []}

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        logp = token_logprobs(model, *arguments)
        kind = "scored" if model.training else "without dropout"
        if model.training and len(seen["scored"]) == 2 * len(seen["scored again"]) + 2:
            kind = "scored again"  # the shorter branch, after the longer one
        seen[kind].append(float(logp.detach().sum()))
        return logp

    train_here(spec, tmp_path / "out", scorer=scorer)
    assert seen["scored"][::2] == seen["scored again"]
    assert len(seen["scored again"]) == 2
    assert not {*seen["scored"]} & {*seen["without dropout"]}, "no dropout happened"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (5, r"pair pair-\d is not finite: chosen .*nan"),
        (6, r"the gradient of .* is not finite; training stopped at pairs pair-\d, pair-\d"),
    ],
    ids=["score", "gradient"],
)
def test_non_finite_pair_stops_before_any_save(spec: TrainSpec, tmp_path: Path, call: int, message: str) -> None:
    """Calls 5 and 6 of the scorer: the second pair's longer branch, and its shorter one with its graph."""
    calls = 0

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        logp = token_logprobs(model, *arguments)
        calls += model.training
        return logp * math.nan if calls == call and model.training else logp

    config = CONFIG.model_copy(update={"plan": "sequential", "save_steps": 1})
    with pytest.raises(StageError, match=message):
        train_here(spec.model_copy(update={"simpo": config}), tmp_path, scorer=scorer)
    assert not (tmp_path / "adapter").exists()
    assert latest_checkpoint(tmp_path) is None


def test_stop_then_resume_equals_an_uninterrupted_run(
    spec: TrainSpec, sequential: tuple[dict[str, torch.Tensor], TrainReport], tmp_path: Path
) -> None:
    """Stopped in the middle of step 7, in the middle of an epoch; resumed bit for bit, loss curve included."""
    stop, calls = Stop(), 0

    def scorer(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += model.training
        stop.wanted = stop.wanted or calls > 6 * 12 + 2
        return token_logprobs(model, *arguments)

    run = with_plan(spec, "sequential")
    with pytest.raises(StageError, match="stopped on request after step 7"):
        train_here(run, tmp_path, scorer=scorer, stop=stop)
    adapter, report = train_here(run, tmp_path)
    want, uninterrupted = sequential
    assert report.resumed_from_step == 7
    assert all(torch.equal(adapter[name], want[name]) for name in want)
    assert [point.loss for point in report.curve] == [point.loss for point in uninterrupted.curve]
    assert report.n_tokens_seen == uninterrupted.n_tokens_seen
    assert report.first_margin == uninterrupted.first_margin


def test_torn_checkpoint_is_passed_over(spec: TrainSpec, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"plan": "sequential", "epochs": 1, "accumulation": 2, "save_steps": 2})
    train_here(spec.model_copy(update={"simpo": config}), tmp_path)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-4"
    with (newest / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    older = latest_checkpoint(tmp_path)
    assert older is not None
    assert older.name == "checkpoint-2"
    (tmp_path / "checkpoint-2.complete").unlink()
    assert latest_checkpoint(tmp_path) is None


def test_adapter_of_another_model_is_a_user_error(spec: TrainSpec, tmp_path: Path) -> None:
    other = spec.model.model_copy(update={"sha256": "f" * 64})
    with pytest.raises(UserError, match="trained on model"):
        train_here(with_plan(spec.model_copy(update={"model": other}), "sequential"), tmp_path)


def test_no_pair_is_a_user_error(tmp_path: Path) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=0, n_heldout=2)
    with pytest.raises(UserError, match="no pair is in the train split"):
        train_here(with_plan(spec, "sequential"), tmp_path / "out")
