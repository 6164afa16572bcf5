"""From the branch and pair tables to what a scorer takes: token ids, scored positions, weights.

Shapes: B rows of a micro-batch, T tokens (padded on the right), P scored positions over all rows of the batch.

A scored position is the index of the *target* token: its log-probability comes from the hidden state one before it.
Position 0 has nothing before it and is never scored. Weights come from the spans; weight 0 is not scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from engine.inputs import AGAIN, branch_fault, open_input
from schemas.errors import UserError
from schemas.refs import Ref

_BRANCH_COLUMNS = ("branch_id", "task_id", "split", "outcome", "token_ids", "spans", "n_tokens", "n_scored")
_PAIR_COLUMNS = ("pair_id", "task_id", "chosen_branch_id", "rejected_branch_id", "weight", "split")


@dataclass(frozen=True)
class Branch:
    """One rendered run, ready to be scored."""

    branch_id: str
    token_ids_T: np.ndarray
    positions_P: np.ndarray
    weights_P: np.ndarray

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids_T)


class Batch(NamedTuple):
    """A padded micro-batch on one device: the arguments of a scorer, and the weight of each scored position."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    rows_P: Tensor
    positions_P: Tensor
    weights_P: Tensor


def scored_positions(starts: np.ndarray, ends: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions >= 1 of the tokens in spans [start, end) of weight > 0, ascending, and the weight of each.

    Returns:
        positions_P (int64) and weights_P (float64).
    """
    kept = weights > 0
    ranges = [np.arange(max(start, 1), end) for start, end in zip(starts[kept], ends[kept], strict=True)]
    lengths = [len(positions) for positions in ranges]
    if not ranges:
        return np.empty(0, np.int64), np.empty(0, np.float64)
    return np.concatenate(ranges).astype(np.int64), np.repeat(weights[kept].astype(np.float64), lengths)


class BranchTable(Dataset[Branch]):
    """Branches of one or more tables, memory-mapped: a row is read when it is asked for, by branch_id."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        """Raises UserError: a table is missing, damaged or another one, or a branch_id occurs twice."""
        tables = [open_input(ref, _BRANCH_COLUMNS) for ref in refs]
        self.table: pa.Table = pa.concat_tables(tables)
        self._counts = np.stack([self.table[name].to_numpy() for name in ("n_tokens", "n_scored")])
        self._paths = [ref.path for ref in refs]
        self._ends = np.cumsum([table.num_rows for table in tables])
        names: list[str] = self.table["branch_id"].to_pylist()
        self.row_of: dict[str, int] = {}
        for row, name in enumerate(names):
            if self.row_of.setdefault(name, row) != row:
                raise UserError("the branch_id occurs twice", where=self._where(row, name), fix=AGAIN)

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, branch_id: str) -> bool:
        return branch_id in self.row_of

    def _where(self, row: int, branch_id: str) -> str:
        return f"{self._paths[int(np.searchsorted(self._ends, row, side='right'))]}, branch {branch_id}"

    def column(self, name: str) -> list[Any]:
        return self.table[name].to_pylist()

    def token_ids(self, branch_id: str) -> np.ndarray:
        """[n_tokens] int32, a view of the mapped file."""
        return self.table["token_ids"][self.row_of[branch_id]].values.to_numpy()

    def __getitem__(self, branch_id: str) -> Branch:
        """The branch of that id.

        Raises:
            UserError: no such branch, none of its tokens is scored, or its row contradicts itself.
        """
        if branch_id not in self.row_of:
            raise UserError(f"there is no branch {branch_id}", where=", ".join(self._paths), fix=AGAIN)
        row, token_ids_T = self.row_of[branch_id], self.token_ids(branch_id)
        spans = self.table["spans"][row].values
        start, end, weight = (spans.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end", "weight"))
        n_tokens, n_scored = self._counts[:, row].tolist()
        if fault := branch_fault(token_ids_T, np.stack([start, end]), weight, n_tokens, n_scored):
            raise UserError(fault, where=self._where(row, branch_id), fix=AGAIN)
        positions_P, weights_P = scored_positions(start, end, weight)
        if not len(positions_P):
            raise UserError("it has no scored token", where=self._where(row, branch_id), fix=AGAIN)
        return Branch(branch_id, token_ids_T, positions_P, weights_P)

    def check(self, branch_ids: Iterable[str], vocab_size: int | None) -> None:
        """Reads the branches once, so that a bad one is told before the model is loaded and not hours later.

        Args:
            vocab_size: rows of the model's embedding; None: not known, and not compared.

        Raises:
            UserError: as for reading a branch, or a token is none of the model's.
        """
        for name in branch_ids:
            token_ids_T = self[name].token_ids_T
            place = int(token_ids_T.argmax())
            if vocab_size is not None and token_ids_T[place] >= vocab_size:
                raise UserError(
                    f"its token {place} is {token_ids_T[place]}, and the model has {vocab_size}",
                    where=self._where(self.row_of[name], name),
                    fix="render the runs with this model's tokenizer",
                )


class Pair(NamedTuple):
    pair_id: str
    task_id: str
    chosen: str
    rejected: str
    weight: float


def read_pairs(ref: Ref, split: str, branches: BranchTable) -> list[Pair]:
    """Pairs of one split, in the table's order.

    Raises:
        UserError: the table cannot be read, or a pair has a bad weight, a branch that is in no table, or nothing to
            compare.
    """
    table = open_input(ref, _PAIR_COLUMNS)
    rows = zip(*(table[name].to_pylist() for name in _PAIR_COLUMNS), strict=True)
    pairs = [Pair(*row[:5]) for row in rows if row[5] == split]
    for pair in pairs:
        if fault := _pair_fault(pair, branches):
            raise UserError(fault, where=f"{ref.path}, pair {pair.pair_id}", fix=AGAIN)
    return pairs


def _pair_fault(pair: Pair, branches: BranchTable) -> str | None:
    if not (np.isfinite(pair.weight) and pair.weight >= 0):
        return f"its weight is {pair.weight:g}; expected a finite one, 0 or above"
    if missing := [name for name in (pair.chosen, pair.rejected) if name not in branches]:
        return f"its branch {missing[0]} is in no branch table"
    if pair.chosen == pair.rejected:
        return f"branch {pair.chosen} is on both sides"
    if np.array_equal(branches.token_ids(pair.chosen), branches.token_ids(pair.rejected)):
        return f"its branches {pair.chosen} and {pair.rejected} hold the same tokens"
    return None


def collate(branches: Sequence[Branch], pad_id: int = 0) -> Batch:
    """Right-padded micro-batch. Padding is masked and never scored, so `pad_id` changes nothing."""
    n_tokens = max(branch.n_tokens for branch in branches)
    input_ids_BT = torch.full((len(branches), n_tokens), pad_id, dtype=torch.long)
    attention_mask_BT = torch.zeros_like(input_ids_BT)
    for row, branch in enumerate(branches):
        input_ids_BT[row, : branch.n_tokens] = torch.from_numpy(branch.token_ids_T.astype(np.int64))
        attention_mask_BT[row, : branch.n_tokens] = 1
    rows_P = np.repeat(np.arange(len(branches)), [len(branch.positions_P) for branch in branches])
    return Batch(
        input_ids_BT,
        attention_mask_BT,
        torch.from_numpy(rows_P),
        torch.from_numpy(np.concatenate([branch.positions_P for branch in branches])),
        torch.from_numpy(np.concatenate([branch.weights_P for branch in branches])),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))


def length_bucketed(n_tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices in micro-batches of like length: rows x longest row <= `budget` padded tokens.

    Every row is in exactly one batch; a row longer than the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(n_tokens)), key=lambda row: (-n_tokens[row], row)):
        # rows come longest first, so a batch's first row is what the others are padded to
        if batches and (len(batches[-1]) + 1) * n_tokens[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def padding_share(n_tokens: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens that are padding, in [0, 1)."""
    padded = sum(len(batch) * max(n_tokens[row] for row in batch) for batch in batches)
    return 1 - sum(n_tokens) / padded if padded else 0.0


class ShuffledBatches(Sampler[list[int]]):
    """Fixed batches in an order drawn from (seed, epoch): the same on every rank and after every resume."""

    def __init__(self, batches: Sequence[Sequence[int]], seed: int) -> None:
        self.batches, self.seed, self.epoch = [list(batch) for batch in batches], seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in np.random.default_rng([self.seed, self.epoch]).permutation(len(self.batches)):
            yield self.batches[index]

    def digest(self, n_epochs: int, name_of: Callable[[int], str]) -> str:
        """sha256 of the names of the rows of all epochs, in training order."""
        sha256 = hashlib.sha256()
        for epoch in range(n_epochs):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.batches))
            for index in order:
                sha256.update(repr([name_of(row) for row in self.batches[index]]).encode())
        return sha256.hexdigest()


class EpochLoader(torch.utils.data.DataLoader[Any]):
    """A DataLoader over `ShuffledBatches` that passes the epoch on, as the Trainer's loop expects of a loader."""

    def __init__(self, dataset: Dataset[Any], sampler: ShuffledBatches, collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate_fn)
        self.shuffled = sampler

    def set_epoch(self, epoch: int) -> None:
        self.shuffled.set_epoch(epoch)
