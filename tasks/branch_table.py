"""Reading the branches and trajectories tables by row, without holding them in memory."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from schemas.errors import ArtifactError
from schemas.trajectory import Message, Trajectory
from tasks.pair_rules import Branch

_BRANCH_COLUMNS: Final = [name for name in Branch._fields if name != "row"]


class BranchTable:
    """The branches table, read by row, and the branches that rules add to it; only the latter are held in memory."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        columns = table.select(_BRANCH_COLUMNS).to_pylist()
        self.branches = [Branch(row=index, **row) for index, row in enumerate(columns)]
        self.added: dict[int, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> Branch:
        """Takes in a derived branch until `forget`."""
        index = self.table.num_rows + len(self.added)
        self.added[index] = row
        return Branch(row=index, **{name: row[name] for name in _BRANCH_COLUMNS})

    def forget(self) -> None:
        """Drops the derived branches."""
        self.added.clear()

    def whole(self, branch: Branch) -> dict[str, Any]:
        """The branch's row; its token ids are an array."""
        if branch.row in self.added:
            return self.added[branch.row]
        columns = {
            name: self.table[name][branch.row].as_py() for name in self.table.column_names if name != "token_ids"
        }
        return columns | {"token_ids": self.token_ids(branch)}

    def token_ids(self, branch: Branch) -> np.ndarray:
        """[n_tokens] int32; of the table's own branches a view of the mapped file."""
        if branch.row in self.added:
            return self.added[branch.row]["token_ids"]
        return self.table["token_ids"][branch.row].values.to_numpy()

    def spans(self, branch: Branch) -> list[dict[str, Any]]:
        if branch.row in self.added:
            return self.added[branch.row]["spans"]
        return self.table["spans"][branch.row].as_py()

    def scored_ids(self, branch: Branch) -> np.ndarray:
        """[n_scored] int32."""
        ids = self.token_ids(branch)
        scored = [ids[span["start"] : span["end"]] for span in self.spans(branch) if span["weight"] > 0]
        return np.concatenate(scored) if scored else ids[:0]

    def kind_weights(self) -> dict[int, float]:
        """Span kind -> its weight where it is scored, as the render stage's config has it."""
        weights: dict[int, float] = {}
        for batch in self.table.select(["spans"]).to_batches():
            spans = batch.column(0).flatten()
            kinds, values = (spans.field(name).to_numpy() for name in ("kind", "weight"))
            for kind in np.unique(kinds[values > 0]):
                weights[int(kind)] = max(weights.get(int(kind), 0.0), float(values[kinds == kind].max()))
        return weights


class Runs:
    """The trajectories table, read by trajectory id."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.rows = {name: index for index, name in enumerate(table["trajectory_id"].to_pylist())}

    def messages(self, trajectory_id: str) -> tuple[Message, ...]:
        """Raises ArtifactError when the branches come from another table of trajectories."""
        if trajectory_id not in self.rows:
            raise ArtifactError(f"trajectory {trajectory_id} is in the branches and not in the trajectories")
        (row,) = self.table.slice(self.rows[trajectory_id], 1).to_pylist()
        return Trajectory.model_validate(row).messages
