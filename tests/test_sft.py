"""SFT: the loss against full logits and TRL, true normalisation of windows, resume, which rows are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from training_inputs import branch_row, make_model, make_tables, ref_of, useful_operations

from artifacts.tables import write_table
from engine import sft
from engine.data import BranchTable, collate, length_bucketed
from engine.group import Group
from engine.loading import load_base, new_adapter
from engine.scores import token_logprobs
from engine.session import Stop
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import Ref
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.tables import BRANCHES
from schemas.training import EarlyStopConfig, OptimizerConfig, SftConfig

CONFIG = SftConfig(
    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_share=0.0), epochs=3, tokens_per_micro_batch=400, seed=1
)
BASE = ModelConfig(name="tiny", dtype="float64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Ref:
    return make_model(tmp_path_factory.mktemp("sft") / "model")


def spec_of(model: Ref, branches: Ref, config: SftConfig) -> TrainSpec:
    lora = LoraConfig(r=4, alpha=8.0)
    return TrainSpec(stage="sft", branches=(branches,), model=model, base=BASE, lora=lora, sft=config)


def train(spec: TrainSpec, out: Path, **options: Any) -> tuple[dict[str, torch.Tensor], TrainReport]:
    assert spec.sft is not None
    report = sft.train(spec, spec.sft, Group(), out, options.pop("stop", Stop()), **options)
    return load_file(out / "adapter" / "adapter_model.safetensors"), report


def uneven_branches(folder: Path) -> Ref:
    """Four resolved runs whose scored tokens differ twentyfold, with three different weights."""
    rows = [
        branch_row(f"run-{index}", f"task-{index}", "resolved", turns, index, weight=weight)
        for index, (turns, weight) in enumerate([(1, 1.0), (20, 0.5), (3, 2.0), (8, 1.0)])
    ]
    write_table(folder / "branches.arrow", BRANCHES, rows)
    return ref_of(folder / "branches.arrow", "branches")


def test_one_batch_of_four_equals_four_micro_batches_of_one(model: Ref, tmp_path: Path) -> None:
    """A mean of means would weigh the 4-token run like the 80-token one."""
    branches = uneven_branches(tmp_path)
    together = CONFIG.model_copy(update={"tokens_per_micro_batch": 100_000, "accumulation": 1})
    apart = CONFIG.model_copy(update={"tokens_per_micro_batch": 16, "accumulation": 4})
    one, whole = train(spec_of(model, branches, together), tmp_path / "together")
    four, split = train(spec_of(model, branches, apart), tmp_path / "apart")
    assert whole.n_steps == split.n_steps == 3
    assert whole.padding_share > 0.3
    assert split.padding_share == 0
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-9, atol=1e-12)
    table = BranchTable([branches])
    rows = [table[f"run-{index}"] for index in range(4)]
    want = sum(useful_operations(row.n_tokens, row.n_tokens**2 / 2, len(row.positions_P)) for row in rows)
    for point in (whole.curve[0], split.curve[0]):
        assert point.tflops_per_s is not None
        step_s = sum(row.n_tokens for row in rows) / point.tokens_per_s
        assert point.tflops_per_s * 1e12 * step_s == pytest.approx(want, rel=1e-9)


def test_first_loss_is_the_weighted_mean_over_scored_tokens(model: Ref, tmp_path: Path) -> None:
    """From full logits, token by token."""
    branches = uneven_branches(tmp_path)
    config = CONFIG.model_copy(update={"tokens_per_micro_batch": 16, "accumulation": 4, "epochs": 1})
    _, report = train(spec_of(model, branches, config), tmp_path / "out")
    base = load_base(model, BASE, torch.device("cpu"), 4096)
    table = BranchTable([branches])
    total = weight = 0.0
    for name in table.row_of:
        branch = table[name]
        ids = torch.from_numpy(branch.token_ids_T.astype("int64"))
        logp = base(ids[None]).logits[0].log_softmax(-1)
        for position, w in zip(branch.positions_P.tolist(), branch.weights_P.tolist(), strict=True):
            total -= w * float(logp[position - 1, ids[position]])
            weight += w
    assert report.curve[0].loss == pytest.approx(total / weight, rel=1e-6)


def test_loss_equals_the_models_own_on_labels(model: Ref, tmp_path: Path) -> None:
    """transformers' causal LM loss (what TRL's SFTTrainer trains on) with labels -100 outside the scored spans."""
    branches, _ = make_tables(tmp_path, n_pairs=4, n_heldout=0)
    table = BranchTable([branches])
    batch = collate([table[name] for name in table.row_of])
    labels = torch.full_like(batch.input_ids_BT, -100)
    labels[batch.rows_P, batch.positions_P] = batch.input_ids_BT[batch.rows_P, batch.positions_P]
    base: PeftModel = new_adapter(load_base(model, BASE, torch.device("cpu"), 4096), LoraConfig(r=4), 0)
    theirs = base(input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, labels=labels).loss
    ours = -token_logprobs(base, *batch[:4]).mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)  # theirs is in float32


def test_loss_falls_and_every_row_is_seen_once_an_epoch(model: Ref, tmp_path: Path) -> None:
    branches, _ = make_tables(tmp_path, n_pairs=6, n_heldout=2)
    seen: list[tuple[int, ...]] = []

    def scorer(*arguments: Any) -> torch.Tensor:
        _, ids, mask, *_ = arguments
        seen.extend(tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, mask, strict=True))
        return token_logprobs(*arguments)

    _, report = train(spec_of(model, branches, CONFIG), tmp_path / "out", scorer=scorer)
    table = BranchTable([branches])
    expected = sorted(tuple(table[f"good-{task}"].token_ids_T.tolist()) for task in range(6)) * 3
    assert sorted(seen) == sorted(expected)
    assert report.n_examples == 6
    assert report.n_tokens_seen == sum(map(len, expected))
    assert report.last_loss < report.first_loss - 0.05
    assert 0 < report.n_tokens_scored < report.n_tokens_seen


def test_stop_then_resume_equals_an_uninterrupted_run(model: Ref, tmp_path: Path) -> None:
    branches, _ = make_tables(tmp_path, n_pairs=8, n_heldout=0)
    spec = spec_of(model, branches, CONFIG)
    whole, uninterrupted = train(spec, tmp_path / "whole")
    stop, calls = Stop(), 0

    def scorer(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        stop.wanted = calls >= 4
        return token_logprobs(*arguments)

    with pytest.raises(StageError, match="stopped on request after step 4"):
        train(spec, tmp_path / "resumed", scorer=scorer, stop=stop)
    resumed, report = train(spec, tmp_path / "resumed")
    assert report.resumed_from_step == 4
    assert report.n_tokens_seen == uninterrupted.n_tokens_seen
    assert [point.loss for point in report.curve] == [point.loss for point in uninterrupted.curve]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_start_after_an_early_stop_trains_no_step_more(model: Ref, tmp_path: Path) -> None:
    """It stops at step 2, in the middle of the first epoch, where no checkpoint is due."""
    branches, _ = make_tables(tmp_path, n_pairs=4, n_heldout=0)
    early_stop = EarlyStopConfig(patience_steps=1, min_gain=100.0)
    config = SftConfig(epochs=3, tokens_per_micro_batch=16, accumulation=1, save_steps=1000, early_stop=early_stop)
    spec = spec_of(model, branches, config)
    adapter, report = train(spec, tmp_path / "out")
    again, resumed = train(spec, tmp_path / "out")
    assert resumed.resumed_from_step == resumed.n_steps == report.n_steps == 2
    assert resumed.stopped_early == report.stopped_early is not None
    assert resumed.curve == report.curve
    assert all(torch.equal(again[name], adapter[name]) for name in adapter)


def test_start_from_the_checkpoint_of_the_last_step_trains_no_step_more(model: Ref, tmp_path: Path) -> None:
    """The last of the 6 steps is in the middle of the second epoch."""
    branches, _ = make_tables(tmp_path, n_pairs=4, n_heldout=0)
    config = SftConfig(epochs=1.5, tokens_per_micro_batch=16, accumulation=1, save_steps=1000)
    spec = spec_of(model, branches, config)
    adapter, report = train(spec, tmp_path / "out")
    again, resumed = train(spec, tmp_path / "out")
    assert resumed.resumed_from_step == resumed.n_steps == report.n_steps == 6
    assert resumed.curve == report.curve
    assert resumed.n_tokens_seen == report.n_tokens_seen
    assert resumed.n_tokens_scored == report.n_tokens_scored
    assert all(torch.equal(again[name], adapter[name]) for name in adapter)


def test_epochs_count_as_they_are_written(model: Ref, tmp_path: Path) -> None:
    """0.28 epochs of 25 steps are 7; in binary the product is a little above that."""
    branches, _ = make_tables(tmp_path, n_pairs=25, n_heldout=0)
    config = SftConfig(epochs=0.28, tokens_per_micro_batch=16)
    _, report = train(spec_of(model, branches, config), tmp_path / "out")
    assert report.n_steps == 7


def test_equal_inputs_give_equal_bytes_in_any_folder(model: Ref, tmp_path: Path) -> None:
    branches, _ = make_tables(tmp_path, n_pairs=3, n_heldout=0)
    spec = spec_of(model, branches, CONFIG)
    for name in ("one", "two"):
        train(spec, tmp_path / name)
    digests = [ref_of(tmp_path / name / "adapter", "adapter").sha256 for name in ("one", "two")]
    assert digests[0] == digests[1]
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in (tmp_path / "one" / "adapter").iterdir())


def test_non_finite_loss_names_the_branches(model: Ref, tmp_path: Path) -> None:
    branches, _ = make_tables(tmp_path, n_pairs=3, n_heldout=0)
    with pytest.raises(StageError, match=r"the loss is nan on branches good-\d"):
        train(spec_of(model, branches, CONFIG), tmp_path / "out", scorer=lambda *a: token_logprobs(*a) * float("nan"))
    assert not (tmp_path / "out" / "adapter").exists()


def test_only_resolved_runs_of_the_train_split_are_trained_on(tmp_path: Path) -> None:
    rows = [
        branch_row("a", "t1", "resolved", 2, 1),
        branch_row("b", "t1", "failed", 2, 2),
        branch_row("c", "t2", "unknown", 2, 3),
        branch_row("d", "t3", "resolved", 2, 4, split="heldout"),
    ]
    write_table(tmp_path / "branches.arrow", BRANCHES, rows)
    table = BranchTable([ref_of(tmp_path / "branches.arrow", "branches")])
    assert sft.chosen_rows(table, only_resolved=True) == ["a"]
    assert sft.chosen_rows(table, only_resolved=False) == ["a", "b", "c"]


def test_no_resolved_run_is_a_user_error(tmp_path: Path) -> None:
    write_table(tmp_path / "branches.arrow", BRANCHES, [branch_row("b", "t1", "failed", 2, 2)])
    with pytest.raises(UserError, match="none of the 1 training branches is of a resolved run"):
        sft.chosen_rows(BranchTable([ref_of(tmp_path / "branches.arrow", "branches")]), only_resolved=True)


def test_folder_without_weights_is_a_user_error(model: Ref, tmp_path: Path) -> None:
    branches, _ = make_tables(tmp_path, n_pairs=2, n_heldout=0)
    empty = tmp_path / "empty"
    empty.mkdir()
    spec = spec_of(model.model_copy(update={"path": str(empty)}), branches, CONFIG)
    with pytest.raises(UserError, match="not a loadable model"):
        train(spec, tmp_path / "out")


def test_long_row_goes_alone() -> None:
    assert length_bucketed([10, 500, 20, 30], budget=60) == [[1], [3, 2], [0]]
