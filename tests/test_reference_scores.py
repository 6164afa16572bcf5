"""Reference scores: those of the base model, computed once, resumed, and not trusted when they do not belong."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from training_inputs import simpo_spec, start_model

from engine.data import BranchTable, collate, read_pairs
from engine.group import Group
from engine.loading import load_base
from engine.reference_scores import (
    BRANCHES_PER_FLUSH,
    SPOT_CHECKS,
    _append,
    file_of,
    read_scores,
    reference_scores,
)
from engine.scores import token_logprobs
from schemas.errors import StageError
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return simpo_spec(tmp_path_factory.mktemp("reference"), SimpoConfig(loss="dpo"), n_pairs=5, n_heldout=0)


class Counting:
    """The plain scorer, counting its calls; NaN at one of them."""

    def __init__(self, nan_at_call: int) -> None:
        self.calls, self.nan_at_call = 0, nan_at_call

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        return token_logprobs(*arguments) * (math.nan if self.calls == self.nan_at_call else 1.0)


def scores(spec: TrainSpec, folder: Path, nan_at_call: int = 0) -> tuple[dict[str, float], int]:
    assert spec.pairs is not None
    model = start_model(spec)
    names = [
        name
        for pair in read_pairs(spec.pairs, "train", BranchTable(spec.branches))
        for name in (pair.chosen, pair.rejected)
    ]
    scorer = Counting(nan_at_call)
    return reference_scores(
        spec, model, BranchTable(spec.branches), names, Group(), folder, scorer, "plain"
    ), scorer.calls


@torch.no_grad()
def test_they_are_the_base_models(spec: TrainSpec, tmp_path: Path) -> None:
    found, _ = scores(spec, tmp_path)
    base, branches = load_base(spec.model, spec.base, torch.device("cpu"), 4096), BranchTable(spec.branches)
    assert len(found) == 10
    for name, mean in found.items():
        assert mean == pytest.approx(float(token_logprobs(base, *collate([branches[name]])[:4]).mean()), rel=1e-12)


def test_second_run_only_spot_checks(spec: TrainSpec, tmp_path: Path) -> None:
    first, computed = scores(spec, tmp_path)
    second, checked = scores(spec, tmp_path)
    assert (computed, checked) == (10, SPOT_CHECKS)
    assert first == second


def test_each_engine_and_attention_has_scores_of_its_own(spec: TrainSpec, tmp_path: Path) -> None:
    """They round differently, and sums over thousands of tokens would show that: nothing of one serves the other."""
    names = ("plain, sdpa", "long_context, cudnn", "long_context, flash")
    assert len({file_of(spec, tmp_path, kernels) for kernels in names}) == 3


def test_torn_and_altered_lines_are_computed_again(spec: TrainSpec, tmp_path: Path) -> None:
    first, _ = scores(spec, tmp_path)
    path = file_of(spec, tmp_path, "plain")
    lines = [line for line in path.read_text().splitlines() if line]
    altered = json.loads(lines[3])
    altered["mean"] -= 0.5
    lines[3] = json.dumps(altered)
    not_numbers = ['{"key": "k", "mean": 1' + "0" * 400 + ', "digest": ""}', "[" * 100_000, "[]", '{"mean": 1}']
    path.write_text("\n".join([*not_numbers, *lines])[:-20])
    assert len(read_scores(path)) == 8
    again, calls = scores(spec, tmp_path)
    assert again == first
    assert calls == SPOT_CHECKS + 2
    assert len(read_scores(path)) == 10


def test_score_that_is_not_finite_is_neither_kept_nor_taken(spec: TrainSpec, tmp_path: Path) -> None:
    """Computed anew in the second part, computed anew to be compared, and stored by whatever wrote the file."""
    with pytest.raises(StageError, match=r"branch (good|bad)-\d under the reference model is nan; it was not kept"):
        scores(spec, tmp_path, nan_at_call=BRANCHES_PER_FLUSH + 1)
    path = file_of(spec, tmp_path, "plain")
    assert len(read_scores(path)) == BRANCHES_PER_FLUSH
    first, _ = scores(spec, tmp_path)
    with pytest.raises(StageError, match="under the reference model is nan"):
        scores(spec, tmp_path, nan_at_call=1)
    assert len(read_scores(path)) == 10, "the model of the moment is not to be trusted, the file is"
    keys = list(read_scores(path))
    path.unlink()
    _append(path, dict.fromkeys(keys, math.nan))
    again, calls = scores(spec, tmp_path)
    assert (again, calls) == (first, 10)


def test_scores_of_another_model_are_not_trusted(spec: TrainSpec, tmp_path: Path) -> None:
    """Whole lines with right digests, but from elsewhere: the spot check finds them."""
    first, _ = scores(spec, tmp_path / "right")
    foreign = spec.model_copy(update={"base": spec.base.model_copy(update={"dtype": "float32"})})
    scores(foreign, tmp_path / "foreign")
    stolen = file_of(spec, tmp_path / "stolen", "plain")
    stolen.parent.mkdir()
    stolen.write_text(file_of(foreign, tmp_path / "foreign", "plain").read_text())
    again, calls = scores(spec, tmp_path / "stolen")
    assert again == first
    assert calls == SPOT_CHECKS + 10


def test_full_disk_under_the_scores_is_named(spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names no file where a write fails; the error had named the working folder, which is elsewhere."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left on device") as raised:
        scores(spec, tmp_path)
    assert raised.value.filename == str(file_of(spec, tmp_path, "plain"))
