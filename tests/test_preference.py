"""Preference training in one process: normalisation, weights, dropout, resuming, and what stops it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preference_runs import BETA, CONFIG, GAMMA, train_here, with_plan
from training_inputs import make_tables, simpo_spec

from engine import preference
from engine.checkpoints import latest_checkpoint
from engine.losses import PairLoss
from engine.scores import token_logprobs
from engine.session import Stop
from engine.start_scores import load_logprobs, save_logprobs
from schemas.errors import StageError, UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig

pytest_plugins = ("preference_fixtures",)
pytestmark = pytest.mark.usefixtures("exact")


def test_margin_rises_and_clipping_acted(sequential: tuple[dict[str, torch.Tensor], TrainReport]) -> None:
    _, report = sequential
    assert report.first_margin is not None
    assert report.last_margin is not None
    assert report.last_margin > report.first_margin + 0.1
    assert report.last_loss < report.first_loss
    assert min(point.grad_norm for point in report.curve) > CONFIG.optimizer.max_grad_norm


def test_last_partial_window_is_normalised_by_its_own_pairs(tmp_path: Path) -> None:
    """3 pairs in windows of 2: the second window holds one pair, and its loss is that pair's, not half of it."""
    optimizer = OptimizerConfig(learning_rate=1e-12, warmup_share=0.0)
    config = CONFIG.model_copy(update={"epochs": 1, "accumulation": 2, "plan": "sequential", "optimizer": optimizer})
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=3, n_heldout=0)
    assert spec.pairs is not None
    _, report = train_here(spec, tmp_path / "out")
    assert len(report.curve) == 2
    last = report.curve[-1]
    assert last.margin is not None
    assert last.loss == pytest.approx(math.log1p(math.exp(GAMMA - BETA * last.margin)), rel=1e-6)


def test_epoch_is_the_share_of_pairs_seen(tmp_path: Path) -> None:
    """Windows of 2, 1 and 2 of 3 pairs."""
    config = CONFIG.model_copy(update={"epochs": 1.5, "accumulation": 2, "plan": "sequential"})
    _, report = train_here(simpo_spec(tmp_path / "inputs", config, n_pairs=3, n_heldout=0), tmp_path / "out")
    assert [point.epoch for point in report.curve] == pytest.approx([2 / 3, 1, 5 / 3])


def test_pair_weights_scale_their_loss(tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"epochs": 1, "plan": "sequential", "accumulation": 1, "optimizer": OptimizerConfig(learning_rate=1e-12)}
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


def test_plan_of_two_on_one_rank_is_bad_input(spec: TrainSpec, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"simpo.plan: plan parallel needs an even number of ranks, and 1 were started"):
        train_here(with_plan(spec, "parallel"), tmp_path)


def test_start_whose_score_is_not_finite_is_named(spec: TrainSpec, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"branch (good|bad)-\d under the policy is nan"):
        train_here(with_plan(spec, "sequential"), tmp_path, scorer=lambda *a: token_logprobs(*a) * math.nan)
    assert not (tmp_path / "start_logprobs.json").exists()


def test_pair_whose_slope_is_not_finite_is_named(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(chosen_1: torch.Tensor, rejected_1: torch.Tensor) -> PairLoss:
        return PairLoss(chosen_1 - rejected_1, chosen_1 * math.nan, -rejected_1)

    monkeypatch.setattr(preference, "loss_of", lambda config: loss)
    with pytest.raises(StageError, match=r"pair pair-\d is not finite: .*, slopes nan and "):
        train_here(with_plan(spec, "sequential"), tmp_path)


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
    mark = tmp_path / "checkpoint-2.complete"
    digest = mark.read_bytes()
    mark.write_bytes(b"\xff\xfe")
    assert latest_checkpoint(tmp_path) is None, "its mark is damaged"
    mark.unlink()
    assert latest_checkpoint(tmp_path) is None
    mark.write_bytes(digest)
    (tmp_path / "checkpoint-4.complete").unlink()
    (tmp_path / "checkpoint-4.complete").mkdir()
    assert latest_checkpoint(tmp_path) == older
    changed = config.model_copy(update={"beta": config.beta / 2})
    with pytest.raises(UserError, match=r"checkpoint-2: the checkpoint belongs to another spec than spec.json beside"):
        train_here(spec.model_copy(update={"simpo": changed}), tmp_path)


def test_damaged_checkpoints_do_not_push_out_new_ones(
    spec: TrainSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their numbers are higher than those of what is saved after them. Copies of other names are somebody's own."""
    config = CONFIG.model_copy(update={"plan": "sequential", "epochs": 1, "accumulation": 2, "save_steps": 2})
    train_here(spec.model_copy(update={"simpo": config}), tmp_path)
    for name in ("checkpoint-2.bak1", "checkpoint-x7"):
        shutil.copytree(tmp_path / "checkpoint-2", tmp_path / name)
    (tmp_path / "checkpoint-4.complete").write_text("x")
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(StageError, match="stopped on request after step 1; a checkpoint was saved"):
        train_here(spec.model_copy(update={"simpo": config}), tmp_path, stop=Stop(wanted=True))
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-1"
    said = capsys.readouterr().out
    assert "checkpoint-2 is not whole and was removed\ncheckpoint-4 is not whole and was removed\n" in said
    assert "training starts over\n" in said
    assert train_here(spec.model_copy(update={"simpo": config}), tmp_path)[1].resumed_from_step == 1
    assert "training goes on from checkpoint-1\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("checkpoint-*") if path.is_dir()} == {
        "checkpoint-2", "checkpoint-4", "checkpoint-2.bak1", "checkpoint-x7",
    }  # fmt: skip


def test_adapter_that_is_no_number_any_more_is_never_a_checkpoint(spec: TrainSpec, tmp_path: Path) -> None:
    """The gradient was finite, and the step was not: what is marked whole would fail every later start."""
    optimizer = CONFIG.optimizer.model_copy(update={"weight_decay": 1e308, "learning_rate": 1e3})
    config = CONFIG.model_copy(update={"plan": "sequential", "save_steps": 1, "optimizer": optimizer})
    with pytest.raises(StageError, match=r"lora_A.* is not finite after step 1; what was saved before is whole"):
        train_here(spec.model_copy(update={"simpo": config}), tmp_path)
    assert latest_checkpoint(tmp_path) is None


def test_damaged_scores_of_the_start_are_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "start_logprobs.json"
    save_logprobs(path, {"good-1": np.array([0.1, -2.0])})
    kept = load_logprobs(path, {"good-1": 2})
    assert kept is not None
    assert kept["good-1"].tolist() == [0.1, -2.0]
    for others in ({"good-1": 3}, {"good-2": 2}, {"good-1": 2, "good-2": 2}, {}):
        assert load_logprobs(path, others) is None
    whole = path.read_text()
    for damaged in ("", whole[:-3], whole.replace("0.1", "0.2"), whole.partition("\n")[2], "[" * 100_000, "\0" * 99):
        path.write_text(damaged)
        assert load_logprobs(path, {"good-1": 2}) is None
    path.write_bytes(b"\xff")
    assert load_logprobs(path, {"good-1": 2}) is None
    assert load_logprobs(tmp_path / "none.json", {"good-1": 2}) is None


def test_adapter_of_another_model_is_a_user_error(spec: TrainSpec, tmp_path: Path) -> None:
    other = spec.model.model_copy(update={"sha256": "f" * 64})
    with pytest.raises(UserError, match="trained on model"):
        train_here(with_plan(spec.model_copy(update={"model": other}), "sequential"), tmp_path)


def test_no_pair_is_a_user_error(tmp_path: Path) -> None:
    spec = simpo_spec(tmp_path / "inputs", CONFIG, n_pairs=0, n_heldout=2)
    with pytest.raises(UserError, match="no pair is in the train split"):
        train_here(with_plan(spec, "sequential"), tmp_path / "out")
