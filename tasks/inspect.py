"""`traceforge inspect`: what a run looks like to training: its spans, their tokens, and what is scored.

Reads a log file of any supported format, packed or not, or a row of a trajectories, branches or pairs table. Files
beside a log that say how its run ended are joined by ingestion alone: a log looked at by itself has the outcome that
it holds.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerFast

from artifacts.tables import open_table
from schemas.config import RenderConfig, SplitConfig
from schemas.errors import ArtifactError, UserError
from schemas.inspection import BranchView, InspectReport, PairView, Segment
from schemas.refs import Ref
from schemas.tables import SPAN_KINDS
from schemas.trajectory import Trajectory
from tasks.branch_rows import branch_rows, refusal
from tasks.jinja import RenderError
from tasks.read_logs import file_runs
from tasks.renderer import Renderer, make_renderer, render_run
from tasks.sources import SourceError
from tasks.sources.draft import Run, to_trajectory


def inspect_file(
    path: Path,
    model: Ref | Path,
    config: RenderConfig,
    *,
    row: int = 0,
    chat_template: str = "auto",
    branches: Sequence[Path] = (),
    redact: bool = True,
) -> InspectReport:
    """Looks at one run, branch or pair.

    Args:
        path: a log file, or a trajectories, branches or pairs table (.arrow).
        row: which one of the file.
        branches: tables in which a pair's branches are looked up; without any, those of the pairs' store.
        redact: whether a log's secrets are replaced, as in ingestion.

    Raises:
        UserError: the file cannot be read, has no such row, or the run cannot be rendered.
    """
    if not path.is_file():
        raise UserError("no such file", where=path)
    renderer = make_renderer(model, chat_template)
    if path.suffix != ".arrow":
        run, n_rows = _logged_run(path, row, redact)
        return _run_report(path, row, n_rows, to_trajectory(run), renderer, config)
    try:
        table = open_table(path)
    except ArtifactError as error:
        raise UserError(str(error)) from error
    _check_row(row, table.num_rows, path)
    values = table.slice(row, 1).to_pylist()[0]
    name = (table.schema.metadata or {})[b"traceforge.table"].decode()
    if name == "trajectories":
        return _run_report(path, row, table.num_rows, Trajectory.model_validate(values), renderer, config)
    report = InspectReport(path=str(path), row=row, n_rows=table.num_rows, template=renderer.template.name)
    tokenizer = renderer.tokens.whole
    if name == "branches":
        return report.model_copy(update={"branch": _branch_view(values, tokenizer)})
    return report.model_copy(update={"pair": _pair_view(values, branches or _beside(path, values), tokenizer)})


def _logged_run(path: Path, row: int, redact: bool) -> tuple[Run, int]:
    """(the run, how many the file holds)."""
    wanted, n_runs = None, 0
    try:
        for run in file_runs(path, redact=redact):
            wanted = run if n_runs == row else wanted
            n_runs += 1
    except SourceError as error:
        raise UserError(str(error), where=path) from error
    if wanted is None:
        raise _no_row(row, n_runs, path)
    return wanted, n_runs


def _check_row(row: int, n_rows: int, path: Path) -> None:
    if not 0 <= row < n_rows:
        raise _no_row(row, n_rows, path)


def _no_row(row: int, n_rows: int, path: Path) -> UserError:
    return UserError(f"no row {row}", where=path, fix=f"rows 0 to {n_rows - 1}" if n_rows else "the file holds no run")


def _run_report(
    path: Path, row: int, n_rows: int, trajectory: Trajectory, renderer: Renderer, config: RenderConfig
) -> InspectReport:
    try:
        run = render_run(trajectory, renderer, config)
    except RenderError as error:
        raise UserError(f"the run cannot be rendered: {error}", where=path) from error
    whole = config.model_copy(update={"mode": "trajectory"})
    branch = next(branch_rows(trajectory, run, whole, SplitConfig()))
    view = _branch_view(branch, renderer.tokens.whole, refusal(branch, config))
    return InspectReport(path=str(path), row=row, n_rows=n_rows, template=renderer.template.name, branch=view)


def _segments(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Segment]:
    ids = np.asarray(row["token_ids"])
    return [
        Segment(
            kind=SPAN_KINDS[span["kind"]],
            message=span["message"],
            weight=span["weight"],
            n_tokens=span["end"] - span["start"],
            text=decode(tokenizer, ids[span["start"] : span["end"]]),
        )
        for span in row["spans"]
    ]


def decode(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> str:
    """The text of token ids, added tokens included, nothing cleaned up."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _branch_view(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, refused: str | None = None) -> BranchView:
    by_kind: Counter[str] = Counter(dict.fromkeys(SPAN_KINDS, 0))
    scored_by_kind: Counter[str] = Counter()
    segments = _segments(row, tokenizer)
    for segment in segments:
        by_kind[segment.kind] += segment.n_tokens
        if segment.weight > 0:
            scored_by_kind[segment.kind] += segment.n_tokens
    return BranchView(
        branch_id=row["branch_id"],
        task_id=row["task_id"],
        outcome=row["outcome"],
        score=row["score"],
        split=row["split"],
        n_tokens=row["n_tokens"],
        n_scored=row["n_scored"],
        n_turns_scored=len({segment.message for segment in segments if segment.weight > 0}),
        tokens_by_kind=dict(by_kind),
        scored_by_kind=dict(scored_by_kind),
        refused=refused,
        segments=tuple(segments),
    )


def _beside(pairs: Path, pair: dict[str, Any]) -> list[Path]:
    """Branches tables of the store that hold a side of a pair, the newest first.

    Another render of the same runs gives the same branch ids, so the sides' lengths are compared too. Tables
    that cannot be read (of another version, half deleted) are passed over.
    """
    found = []
    tables = sorted(
        pairs.absolute().parent.parent.parent.glob("branches/*/*.arrow"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(tables):
        try:
            table: pa.Table = open_table(path)
        except ArtifactError:
            continue
        for name in ("chosen", "rejected"):
            row = pc.index(table["branch_id"], pair[f"{name}_branch_id"]).as_py()
            counts = ("n_tokens", "n_scored")
            if row >= 0 and all(table[count][row].as_py() == pair[f"{name}_{count}"] for count in counts):
                found.append(path)
                break
    return found


def _find_branch(branch_id: str, tables: Sequence[Path]) -> dict[str, Any]:
    for path in tables:
        try:
            table: pa.Table = open_table(path)
        except ArtifactError as error:
            raise UserError(str(error)) from error
        found = pc.index(table["branch_id"], branch_id).as_py()
        if found >= 0:
            return table.slice(found, 1).to_pylist()[0]
    raise UserError(
        f"no branch {branch_id} in {len(tables)} branches tables",
        fix="give the pair's branches.arrow, and derived_branches.arrow if there is one, with --branches",
    )


def _split_at(row: dict[str, Any], at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row's spans before and from a token on."""
    before = [span | {"end": min(span["end"], at)} for span in row["spans"] if span["start"] < at]
    after = [span | {"start": max(span["start"], at)} for span in row["spans"] if span["end"] > at]
    return row | {"spans": before}, row | {"spans": after}


def _pair_view(pair: dict[str, Any], tables: Sequence[Path], tokenizer: PreTrainedTokenizerFast) -> PairView:
    sides = {}
    shared: tuple[Segment, ...] = ()
    for name in ("chosen", "rejected"):
        row = _find_branch(pair[f"{name}_branch_id"], tables)
        before, after = _split_at(row, pair["n_shared_prefix"])
        shared = tuple(_segments(before, tokenizer))
        sides[name] = _branch_view(row, tokenizer).model_copy(update={"segments": tuple(_segments(after, tokenizer))})
    return PairView(
        pair_id=pair["pair_id"],
        rule=pair["rule"],
        n_shared_prefix=pair["n_shared_prefix"],
        shared_prefix=shared,
        **sides,
    )
