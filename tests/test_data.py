"""Tables to tensors: scored positions, padding, length-bucketed batches, the order of an epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_inputs import branch_row, make_tables, ref_of

from artifacts.tables import write_table
from engine.data import (
    BranchTable,
    EpochLoader,
    ShuffledBatches,
    collate,
    length_bucketed,
    padding_share,
    read_pairs,
    scored_positions,
)
from schemas.errors import UserError
from schemas.tables import BRANCHES


def test_scored_positions_are_target_indices() -> None:
    positions, weights = scored_positions(np.array([0, 3, 6]), np.array([3, 6, 8]), np.array([0.0, 0.5, 2.0]))
    assert positions.tolist() == [3, 4, 5, 6, 7]
    assert weights.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0]


def test_position_zero_is_never_scored() -> None:
    positions, weights = scored_positions(np.array([0]), np.array([3]), np.array([1.0]))
    assert positions.tolist() == [1, 2]
    assert weights.tolist() == [1.0, 1.0]


def test_branch_reads_back_its_scored_tokens(tmp_path: Path) -> None:
    row = branch_row("run", "task", "resolved", n_turns=3, seed=4)
    write_table(tmp_path / "branches.arrow", BRANCHES, [row])
    branch = BranchTable([ref_of(tmp_path / "branches.arrow", "branches")])["run"]
    expected = [i for span in row["spans"] if span["weight"] > 0 for i in range(span["start"], span["end"])]
    assert branch.positions_P.tolist() == expected
    assert branch.token_ids_T.tolist() == row["token_ids"]
    assert len(branch.positions_P) == row["n_scored"]


def test_branch_without_scored_token_is_an_error(tmp_path: Path) -> None:
    write_table(tmp_path / "branches.arrow", BRANCHES, [branch_row("run", "task", "resolved", 2, 4, weight=0.0)])
    with pytest.raises(UserError, match="branch run: it has no scored token"):
        BranchTable([ref_of(tmp_path / "branches.arrow", "branches")])["run"]


def test_branch_ids_must_be_unique_over_tables(tmp_path: Path) -> None:
    write_table(tmp_path / "branches.arrow", BRANCHES, [branch_row("run", "task", "resolved", 2, 4)])
    ref = ref_of(tmp_path / "branches.arrow", "branches")
    with pytest.raises(UserError, match="branch run: the branch_id occurs twice"):
        BranchTable([ref, ref])


def test_collate_pads_on_the_right_and_addresses_rows(tmp_path: Path) -> None:
    rows = [branch_row("short", "t", "resolved", 1, 1), branch_row("long", "t", "failed", 6, 2)]
    write_table(tmp_path / "branches.arrow", BRANCHES, rows)
    table = BranchTable([ref_of(tmp_path / "branches.arrow", "branches")])
    batch = collate([table["short"], table["long"]], pad_id=7)
    assert batch.input_ids_BT.shape == (2, rows[1]["n_tokens"])
    assert batch.attention_mask_BT.sum(1).tolist() == [rows[0]["n_tokens"], rows[1]["n_tokens"]]
    assert (batch.input_ids_BT[0, rows[0]["n_tokens"] :] == 7).all()
    for index, row in enumerate(rows):
        own = batch.positions_P[batch.rows_P == index]
        targets = batch.input_ids_BT[index, own].tolist()
        assert targets == [
            token
            for span in row["spans"]
            if span["weight"] > 0
            for token in row["token_ids"][span["start"] : span["end"]]
        ]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 1200))
def test_every_row_is_in_exactly_one_bucket_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = length_bucketed(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
    assert 0 <= padding_share(lengths, batches) < 1


def test_padding_share_counts_padding() -> None:
    assert padding_share([10, 5], [[0, 1]]) == pytest.approx(0.25)
    assert padding_share([10, 5], [[0], [1]]) == 0


def test_order_depends_on_seed_and_epoch_only() -> None:
    batches = [[index] for index in range(20)]

    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = ShuffledBatches(batches, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert sorted(order(1, 3)) == batches


def test_digest_covers_every_epoch() -> None:
    batches = [[index] for index in range(6)]
    one = ShuffledBatches(batches, 1)
    assert one.digest(2, str) == ShuffledBatches(batches, 1).digest(2, str)
    assert len({one.digest(1, str), one.digest(2, str), ShuffledBatches(batches, 2).digest(2, str)}) == 3


def test_loader_passes_the_epoch_on() -> None:
    sampler = ShuffledBatches([[index] for index in range(9)], seed=0)
    loader = EpochLoader(list(range(9)), sampler, torch.tensor)  # type: ignore[arg-type]
    first = [int(batch) for batch in loader]
    loader.set_epoch(1)
    second = [int(batch) for batch in loader]
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second


def test_pairs_of_a_split(tmp_path: Path) -> None:
    branches, paired = make_tables(tmp_path, n_pairs=3, n_heldout=2)
    table = BranchTable([branches])
    assert [pair.pair_id for pair in read_pairs(paired.pairs, "train", table)] == ["pair-0", "pair-1", "pair-2"]
    assert [pair.task_id for pair in read_pairs(paired.pairs, "heldout", table)] == ["task-3", "task-4"]
