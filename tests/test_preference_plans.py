"""Branch plans against each other and against plain autograd, with real gloo processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_runs import (
    BETA,
    GAMMA,
    adapter_of,
    largest_difference,
    run_ranks,
    start_ranks,
    train_here,
    with_plan,
)
from training_inputs import start_model

from engine.checkpoints import latest_checkpoint
from engine.data import Branch, BranchTable, read_pairs
from engine.loading import trainable_parameters
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig

pytest_plugins = ("preference_fixtures",)
pytestmark = pytest.mark.usefixtures("exact")


@pytest.fixture(scope="module")
def parallel(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parallel") / "run"
    return run_ranks(with_plan(spec, "parallel", balanced=False), 2, folder)


@pytest.fixture(scope="module")
def four_ranks(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Plan auto, windows of 4 pairs dealt to 4 ranks: splits, whole pairs and shared prefixes."""
    return run_ranks(with_plan(spec, "auto", n_processes=4), 4, tmp_path_factory.mktemp("four") / "run")


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
    branches = BranchTable(spec.branches)
    pairs = read_pairs(spec.pairs, "train", branches)[:4]
    model = start_model(spec)
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


def test_ranks_that_would_deal_pairs_differently_stop_before_step_1(spec: TrainSpec, tmp_path: Path) -> None:
    """Rank 1 takes no pair in one pass. Were each to go its way, pairs would be worked on twice, or never."""
    outputs, codes = start_ranks(with_plan(spec, "shared_prefix"), 2, tmp_path / "run", narrow_tokens=1)
    assert 0 not in codes
    assert "ranks 0 and 1 differ before step 1: who works on which branch (1 in all)" in outputs[0]


def test_rank_that_drifts_apart_stops_the_run_and_the_tensor_is_named(spec: TrainSpec, tmp_path: Path) -> None:
    """Rank 1 changes one number of its adapter by 1e-12 in the first step."""
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight"
    outputs, codes = start_ranks(with_plan(spec, "parallel", save_steps=1), 2, tmp_path / "run", disturbed=name)
    assert 0 not in codes
    assert f"ranks 0 and 1 differ in the adapter after step 1: {name} (1 in all)" in outputs[0]
    assert latest_checkpoint(tmp_path / "run" / "out") is None


def test_no_reference_score_is_kept_before_the_ranks_were_compared(spec: TrainSpec, tmp_path: Path) -> None:
    """Rank 1 has another base model. A later start would take its scores, whole lines with right digests, for good."""
    simpo = SimpoConfig(loss="dpo", plan="sequential", n_processes=2, accumulation=2)
    run = spec.model_copy(update={"simpo": simpo, "reference_folder": str(tmp_path / "scores")})
    outputs, codes = start_ranks(run, 2, tmp_path / "run", other_base=True)
    assert 0 not in codes
    assert "ranks 0 and 1 differ before step 1: the base model (1 in all)" in outputs[0]
    assert not (tmp_path / "scores").exists()


def test_checkpoints_of_equal_names_are_compared_by_what_they_hold(spec: TrainSpec, tmp_path: Path) -> None:
    """Nodes with folders of their own: training would go on from two adapters and stop at the next save."""
    run = with_plan(spec, "sequential", epochs=2, save_steps=2, n_processes=2)
    train_here(run, tmp_path / "run" / "out")
    other = with_plan(run, "sequential", seed=4)
    train_here(other, tmp_path / "other")
    mark = tmp_path / "other" / "checkpoint-4.complete"
    mark.write_text(f"{mark.read_text().split()[0]} {run.digest()}")
    outputs, codes = start_ranks(run, 2, tmp_path / "run", own_folder=tmp_path / "other")
    assert 0 not in codes
    assert "rank 0 would go on from checkpoint-4, rank 1 from another checkpoint-4" in outputs[0]


def test_scores_of_the_start_are_those_that_rank_0_has_kept(spec: TrainSpec, tmp_path: Path) -> None:
    """A node with a folder of its own got the checkpoint alone: it would score while the other trains."""
    run = with_plan(spec, "sequential", epochs=2, save_steps=2, n_processes=2)
    adapter, report = train_here(run, tmp_path / "run" / "out")
    for name in ("checkpoint-4", "checkpoint-4.complete"):
        path = tmp_path / "run" / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(tmp_path / "run" / "out", tmp_path / "own", ignore=shutil.ignore_patterns("start_logprobs.json"))
    ranks = run_ranks(run, 2, tmp_path / "run", own_folder=tmp_path / "own")
    resumed = TrainReport.model_validate_json(ranks[0]["report"])
    assert resumed.resumed_from_step == 2
    assert resumed.first_margin == report.first_margin
    assert largest_difference(adapter_of(ranks[1]["parameters"]), adapter) < 1e-9


def test_nobody_counts_as_idle_while_rank_0_saves(spec: TrainSpec, tmp_path: Path) -> None:
    """A second for a save after each step, which rank 1 would wait for in the first swap of the next.

    Idle share measured on two busy cores: 0.10, and 0.60 where it does.
    """
    run = with_plan(spec, "parallel", epochs=2, save_steps=1)
    ranks = run_ranks(run, 2, tmp_path / "run", save_s=1.0)
    report = TrainReport.model_validate_json(ranks[0]["report"])
    assert report.wall_s > 3 * 1.0
    assert report.idle_share is not None
    assert report.idle_share < 0.4
