"""Evaluation against numbers worked out from full logits and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training_inputs import make_adapter, make_model, make_tables

from engine import evaluate
from engine.data import BranchTable
from engine.evaluate import BranchScore, bootstrap_accuracy, by_length, nll_per_token
from engine.group import Group
from engine.loading import load_adapter, load_base
from engine.scores import token_logprobs
from schemas.config import EvaluateConfig, ModelConfig
from schemas.errors import StageError
from schemas.reports import EvalReport
from schemas.spec import TrainSpec

BASE = ModelConfig(name="tiny", dtype="float64")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    folder = tmp_path_factory.mktemp("evaluate")
    model = make_model(folder / "model")
    branches, paired = make_tables(folder, n_pairs=2, n_heldout=5)
    adapters = {name: make_adapter(folder / name, model, seed=seed) for name, seed in (("sft", 5), ("simpo", 6))}
    return TrainSpec(
        stage="evaluate", branches=(branches,), pairs=paired.pairs, model=model, base=BASE, adapters=adapters
    )


def run(spec: TrainSpec, config: EvaluateConfig) -> EvalReport:
    return evaluate.evaluate(spec, config, Group())


def log_probabilities(model: torch.nn.Module, spec: TrainSpec, name: str) -> list[float]:
    branch = BranchTable(spec.branches)[name]
    ids = torch.from_numpy(branch.token_ids_T.astype("int64"))
    logp = model(ids[None]).logits[0].log_softmax(-1)
    return [float(logp[position - 1, ids[position]]) for position in branch.positions_P.tolist()]


@torch.no_grad()
def test_scores_of_base_and_adapters_from_full_logits(spec: TrainSpec) -> None:
    """Batched and padded here, one branch at a time there (tolerance 1e-9)."""
    report = run(spec, EvaluateConfig(tokens_per_micro_batch=400))
    assert [score.name for score in report.models] == ["base", "sft", "simpo"]
    for name in ("base", "sft", "simpo"):
        model: torch.nn.Module = load_base(spec.model, BASE, torch.device("cpu"), 4096)
        if name != "base":
            model = load_adapter(model, spec.adapters[name], spec.model, trainable=False)  # type: ignore[arg-type]
        good = [log_probabilities(model, spec, f"good-{task}") for task in range(2, 7)]
        bad = [log_probabilities(model, spec, f"bad-{task}") for task in range(2, 7)]
        margins = [np.mean(c) - np.mean(r) for c, r in zip(good, bad, strict=True)]
        score = report.of(name)
        assert score is not None
        assert score.nll_per_action_token == pytest.approx(-np.mean([x for run in good for x in run]), rel=1e-9)
        assert score.mean_margin == pytest.approx(np.mean(margins), rel=1e-9)
        assert score.pair_accuracy == pytest.approx(np.mean([margin > 0 for margin in margins]))
        assert score.n_pairs == score.n_branches == 5
    values = {score.nll_per_action_token for score in report.models}
    assert len(values) == 3, "an adapter was not switched"
    table = BranchTable(spec.branches)
    heldout = [table[f"{side}-{task}"] for task in range(2, 7) for side in ("good", "bad")]
    assert report.n_tokens_seen == 3 * sum(branch.n_tokens for branch in heldout)
    assert report.n_tokens_scored == 3 * sum(len(branch.positions_P) for branch in heldout)


def test_batch_budget_changes_nothing(spec: TrainSpec) -> None:
    one, two = (run(spec, EvaluateConfig(tokens_per_micro_batch=budget)) for budget in (16, 100_000))
    for mine, other in zip(one.models, two.models, strict=True):
        assert mine.nll_per_action_token == pytest.approx(other.nll_per_action_token, rel=1e-9)
        assert mine.mean_margin == pytest.approx(other.mean_margin, rel=1e-9)


def test_length_buckets_cover_every_branch_once(spec: TrainSpec) -> None:
    table = BranchTable(spec.branches)
    lengths = sorted(table[f"good-{task}"].n_tokens for task in range(2, 7))
    edges = (lengths[0], lengths[2])
    score = run(spec, EvaluateConfig(length_buckets=edges)).of("base")
    assert score is not None
    found = [(bucket.max_tokens, bucket.n_branches) for bucket in score.buckets]
    assert found == [(edges[0], 1), (edges[1], 2), (None, 2)]
    assert sum(bucket.n_branches for bucket in score.buckets) == score.n_branches


def test_nothing_held_out_gives_no_values_and_says_so(spec: TrainSpec, tmp_path: Path) -> None:
    branches, paired = make_tables(tmp_path, n_pairs=2, n_heldout=0)
    report = run(spec.model_copy(update={"branches": (branches,), "pairs": paired.pairs}), EvaluateConfig())
    assert report.n_heldout_tasks == 0
    assert "nothing was scored" in report.settings["heldout"]
    for score in report.models:
        assert (
            score.nll_per_action_token is score.pair_accuracy is score.mean_margin is score.pair_accuracy_ci95 is None
        )


def test_nll_weighs_by_tokens_not_by_branches() -> None:
    scores = [BranchScore(10, 2.0, 1, -2.0), BranchScore(100, 9.0, 9, -1.0)]
    assert nll_per_token(scores) == pytest.approx(1.1)
    assert nll_per_token([]) is None


def test_bucket_edges_are_inclusive_above() -> None:
    scores = [BranchScore(10, 1.0, 1, -1.0), BranchScore(11, 1.0, 1, -1.0)]
    assert [(bucket.max_tokens, bucket.n_branches) for bucket in by_length(scores, (10,))] == [(10, 1), (None, 1)]


def test_bootstrap_resamples_tasks() -> None:
    """40 pairs of two tasks say no more than two tasks do; 40 tasks with the same share say far more."""
    two_tasks = {"a": [1.0] * 20, "b": [-1.0] * 20}
    assert bootstrap_accuracy(two_tasks, 1000, seed=0) == (0.0, 1.0)
    many_tasks = {str(task): [1.0 if task % 2 else -1.0] for task in range(40)}
    interval = bootstrap_accuracy(many_tasks, 1000, seed=0)
    assert interval is not None
    assert 0.3 < interval[0] < 0.5 < interval[1] < 0.7
    assert bootstrap_accuracy({}, 1000, seed=0) is None


def test_score_that_is_not_finite_ends_it(spec: TrainSpec) -> None:
    """It would count as a pair that was ordered wrongly."""
    with pytest.raises(StageError, match=r"branch (good|bad)-\d under model base is nan"):
        evaluate.evaluate(spec, EvaluateConfig(), Group(), scorer=lambda *a: token_logprobs(*a) * float("nan"))
