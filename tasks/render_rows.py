"""From runs to rendered rows, the same on every machine: what `render_engines` spreads over processes.

A rendered row is a row of `branches`, or what stands in the place of one that was refused, with what the report and the
leak check need. The function takes and gives Arrow tables and depends on nothing but its arguments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from artifacts.tables import iter_rows
from schemas.config import RenderConfig, SplitConfig
from schemas.refs import Ref
from schemas.tables import BRANCHES
from schemas.trajectory import Trajectory
from tasks.branch_rows import branch_rows, refusal
from tasks.jinja import RenderError
from tasks.leaks import COLUMNS, fingerprints
from tasks.model import load_tokenizer
from tasks.renderer import Renderer, render_run, renderer_of

RENDERED: Final = pa.schema(
    [
        *BRANCHES,
        ("run", pa.int64()),  # row of the trajectories table; rows are in its order
        ("name", pa.large_string()),  # the run, for people
        ("reason", pa.large_string()),  # why the row is refused; null when it is not
        *((name, pa.binary()) for name in COLUMNS),
    ]
)
"""A refused row has no tokens and spans; the length is null where the run could not be rendered at all."""


@dataclass(frozen=True)
class RenderJob:
    """All that rendering depends on beside the runs; small, and sent to every process."""

    model: Ref | Path
    template_name: str
    template_source: str
    config: RenderConfig
    split: SplitConfig

    def renderer(self) -> Renderer:
        """Raises UserError: the tokenizer does not load, or the template cannot be trained with."""
        model = self.model
        path, sha256 = (model.path, model.sha256) if isinstance(model, Ref) else (str(model), "")
        return _renderer(path, sha256, self.template_name, self.template_source)


@lru_cache(maxsize=1)
def _renderer(path: str, sha256: str, template_name: str, template_source: str) -> Renderer:
    """Once a process; `sha256` keeps a renderer from outliving the model folder it was made from."""
    return renderer_of(load_tokenizer(Path(path)), template_name, template_source)


def render_batch(runs: pa.Table, numbers: Sequence[int], job: RenderJob) -> pa.Table:
    """Rows of `trajectories` -> rows of `RENDERED`.

    Args:
        numbers: of each run, its row in the whole table.

    Raises:
        UserError: the template cannot be used for this corpus at all.
    """
    renderer = job.renderer()
    rows = [
        row
        for number, values in zip(numbers, iter_rows(runs), strict=True)
        for row in _rows_of(Trajectory.model_validate(values), number, renderer, job)
    ]
    return pa.Table.from_pylist(rows, schema=RENDERED)


def _rows_of(trajectory: Trajectory, number: int, renderer: Renderer, job: RenderJob) -> Iterator[dict[str, Any]]:
    name = f"{trajectory.source_path} ({trajectory.trajectory_id})"
    common = {"run": number, "name": name, "trajectory_id": trajectory.trajectory_id}
    try:
        run = render_run(trajectory, renderer, job.config)
    except RenderError as error:
        yield common | {"reason": str(error)}
        return
    known = fingerprints(trajectory.messages, run) if job.split.heldout_share > 0 else {}
    for row in branch_rows(trajectory, run, job.config, job.split):
        reason = refusal(row, job.config)
        if reason is None:
            yield common | known | row | {"reason": None}
        else:
            kept = {key: row[key] for key in ("branch_id", "split", "n_tokens")}
            yield common | kept | {"name": f"{name} {row['branch_id']}", "reason": reason}
