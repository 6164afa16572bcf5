"""What the Prefect UI shows of each stage: one markdown page for each result, made from its report alone."""

from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from typing import NamedTuple

from artifacts import charts
from schemas.refs import Ref
from schemas.reports import (
    Dropped,
    Evaluated,
    Ingested,
    ModelReady,
    ModelScore,
    Paired,
    Promoted,
    Rendered,
    StageResult,
    Trained,
    TrainReport,
)
from schemas.runs import RunReport

DROPPED_SHOWN = 20
"""All of a card lies in the server's database; the report in the artifact store has the whole list."""


NONE = "n/a"


class Card(NamedTuple):
    key: str
    """lowercase letters, digits and dashes"""
    title: str
    markdown: str


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"


def _cell(text: object) -> str:
    """Text of the data may hold anything: neither a table row nor the page may break on it."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _values(title: str, values: Mapping[str, float]) -> str:
    """In the order given."""
    if not values:
        return ""
    return f"### {title}\n\n" + _table(("", "n"), [(name, _number(value)) for name, value in values.items()])


def _counts(title: str, counts: Mapping[str, float]) -> str:
    """Largest first."""
    return _values(title, dict(sorted(counts.items(), key=lambda item: -item[1])))


def _picture(uri: str, alternative: str) -> str:
    return f"![{alternative}]({uri})"


def _dropped(title: str, dropped: Sequence[Dropped], n_all: int = 0) -> str:
    """`n_all`: how many there are, where `dropped` lists only the first of them."""
    if not dropped:
        return ""
    n_all = max(n_all, len(dropped))
    more = f"\n\n… and {n_all - DROPPED_SHOWN:,} more" if n_all > DROPPED_SHOWN else ""
    table = _table(("what", "why"), [(item.what, item.reason) for item in dropped[:DROPPED_SHOWN]])
    return f"### {title} ({n_all:,})\n\n{table}{more}"


def _payloads(refs: Sequence[Ref]) -> str:
    if not refs:
        return ""
    rows = [(f"`{ref.path}`", _number(ref.n_rows), f"{ref.n_bytes / 2**20:,.2f}", ref.sha256[:16]) for ref in refs]
    return "### Files\n\n" + _table(("path", "rows", "MiB", "sha256"), rows)


def _page(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


@singledispatch
def summary(result: StageResult) -> str:
    """The result in a few words, for the run's table."""
    raise TypeError(f"no summary of {type(result).__name__}")


@singledispatch
def card(result: StageResult) -> Card:
    """The result's page in the UI."""
    raise TypeError(f"no card of {type(result).__name__}")


@summary.register
def _(result: Ingested) -> str:
    report = result.report
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(report.by_outcome.items()))
    n_quarantined = max(report.n_quarantined, len(report.quarantined))
    quarantined = f"; {n_quarantined} files quarantined" if n_quarantined else ""
    return f"{report.n_trajectories} runs ({outcomes}){quarantined}"


@card.register
def _(result: Ingested) -> Card:
    report = result.report
    markdown = _page(
        f"**{report.n_trajectories:,} runs** with {report.n_turns:,} turns, from {report.n_files:,} files."
        + ("" if report.redact else " **Not redacted.**"),
        _counts("By outcome", report.by_outcome),
        _counts("By format", report.by_format),
        _counts("By exit status (the agent's own claim)", report.by_exit_status),
        "### Lengths\n\n"
        + _picture(charts.bars(report.length_chars, x_label="characters, up to", y_label="runs"), "runs by length")
        if report.length_chars
        else "",
        _counts("Redactions", report.redactions),
        _counts("Left out, by reason", report.left_out_by_reason),
        _dropped("Quarantined files", report.quarantined, report.n_quarantined),
        _dropped("Damaged lines", report.damaged, report.n_damaged),
        _dropped("Duplicates left out", report.duplicates, report.n_duplicates),
        _payloads(result.refs()),
    )
    return Card("ingest", "Ingested runs", markdown)


@summary.register
def _(result: ModelReady) -> str:
    return f"{result.name}, {result.n_parameters / 1e6:,.1f}M parameters"


@card.register
def _(result: ModelReady) -> Card:
    text = f"**{result.name}**: {result.n_parameters:,} parameters."
    return Card("model", "Base model", _page(text, _payloads(result.refs())))


@summary.register
def _(result: Rendered) -> str:
    report = result.report
    dropped = f"; {len(report.dropped)} dropped" if report.dropped else ""
    share = report.n_scored / max(1, report.n_tokens)
    return f"{report.n_branches} branches, {report.n_tokens:,} tokens, {share:.1%} scored{dropped}"


@card.register
def _(result: Rendered) -> Card:
    report = result.report
    markdown = _page(
        f"**{report.n_branches:,} branches** with {report.n_tokens:,} tokens, of which {report.n_scored:,} are scored "
        f"({report.n_scored / max(1, report.n_tokens):.1%}). Chat template: {_cell(report.template)}.",
        "### Runs kept at each length limit (tokens)",
        _picture(charts.bars(report.kept_at_limit, x_label="tokens", y_label="runs"), "runs kept by length limit"),
        _values("Branch lengths (tokens)", report.length_tokens),
        _counts("Tokens by kind", report.tokens_by_kind),
        _counts("By split", report.by_split),
        _dropped("Dropped", report.dropped),
        _payloads(result.refs()),
    )
    return Card("render", "Rendered branches", markdown)


@summary.register
def _(result: Paired) -> str:
    report = result.report
    splits = ", ".join(f"{count} {name}" for name, count in sorted(report.by_split.items()))
    return f"{report.n_pairs} pairs of {report.n_tasks_with_pairs} tasks ({splits})"


@card.register
def _(result: Paired) -> Card:
    report, shared = result.report, result.report.shared_prefix_histogram
    markdown = _page(
        f"**{report.n_pairs:,} pairs** of {report.n_tasks_with_pairs:,} tasks.",
        _counts("By rule", report.by_rule),
        _counts("By split", report.by_split),
        _counts("Candidates refused, by guard", report.rejected_by_reason),
        _values("Shared prefix (tokens)", report.shared_prefix_tokens),
        _picture(charts.bars(shared, x_label="shared leading tokens", y_label="pairs"), "pairs by shared prefix")
        if shared
        else "",
        _values("Length gap, chosen minus rejected (tokens)", report.length_gap_tokens),
        _dropped("Dropped", report.dropped),
        _payloads(result.refs()),
    )
    return Card("pairs", "Preference pairs", markdown)


@summary.register
def _(result: Trained) -> str:
    report = result.report
    text = f"loss {report.first_loss:.4f} → {report.last_loss:.4f} in {report.n_steps} steps"
    if report.first_margin is not None and report.last_margin is not None:
        text += f"; margin {report.first_margin:+.4f} → {report.last_margin:+.4f}"
    return text


def _curves(report: TrainReport) -> str:
    points = report.curve
    if not points:
        return ""
    panels: dict[str, dict[str, list[float | None]]] = {"loss": {"loss": [point.loss for point in points]}}
    if any(point.margin is not None for point in points):
        panels["margin (nats per token)"] = {"margin": [point.margin for point in points]}
    if any(point.chosen_logp is not None for point in points):
        panels["log-probability (nats per token)"] = {
            "chosen": [point.chosen_logp for point in points],
            "rejected": [point.rejected_logp for point in points],
        }
    panels["gradient norm"] = {"norm": [point.grad_norm for point in points]}
    return _picture(charts.lines([point.step for point in points], panels), "training curves")


@card.register
def _(result: Trained) -> Card:
    report = result.report
    rows = [
        ("examples", _number(report.n_examples)),
        ("steps", _number(report.n_steps)),
        ("tokens seen by attention", _number(report.n_tokens_seen)),
        ("tokens scored", _number(report.n_tokens_scored)),
        ("padding share", f"{report.padding_share:.1%}"),
        ("loss, first quarter → last", f"{report.first_loss:.4f} → {report.last_loss:.4f}"),
        ("margin, before → after", f"{_number(report.first_margin)} → {_number(report.last_margin)}"),
        ("wall time", f"{report.wall_s:,.1f} s"),
        ("peak memory", f"{report.peak_memory_bytes / 2**30:,.2f} GiB"),
        ("processes, plan, collectives", f"{report.world_size}, {report.plan}, {report.backend}"),
        ("resumed from step", _number(report.resumed_from_step)),
    ]
    markdown = _page(
        _curves(report),
        _table(("", ""), rows),
        "### In effect\n\n" + _table(("", ""), sorted(report.settings.items())) if report.settings else "",
        _payloads(result.refs()),
    )
    return Card(report.stage, f"Training: {report.stage.upper()}", markdown)


@summary.register
def _(result: Evaluated) -> str:
    parts = []
    for score in result.report.models:
        accuracy = NONE if score.pair_accuracy is None else f"{score.pair_accuracy:.0%}"
        parts.append(f"{score.name} NLL {_number(score.nll_per_action_token)} acc {accuracy}")
    return "; ".join(parts)


def _score_row(score: ModelScore) -> tuple[object, ...]:
    interval = score.pair_accuracy_ci95
    return (
        score.name,
        score.n_branches,
        score.n_pairs,
        _number(score.nll_per_action_token),
        _number(score.pair_accuracy),
        NONE if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}",
        _number(score.mean_margin),
    )


@card.register
def _(result: Evaluated) -> Card:
    report = result.report
    head = ("model", "branches", "pairs", "NLL per action token", "pair accuracy", "95 % interval", "mean margin")
    likelihoods = {
        score.name: score.nll_per_action_token for score in report.models if score.nll_per_action_token is not None
    }
    buckets = [
        (score.name, _number(bucket.max_tokens), bucket.n_branches, _number(bucket.nll_per_action_token))
        for score in report.models
        for bucket in score.buckets
        if bucket.n_branches
    ]
    markdown = _page(
        f"Held-out tasks: {report.n_heldout_tasks:,}. Evaluated in {report.wall_s:,.1f} s.",
        _table(head, map(_score_row, report.models)),
        _picture(charts.bars(likelihoods, x_label="", y_label="nats per action token"), "NLL by model")
        if likelihoods
        else "",
        "### By length\n\n" + _table(("model", "up to tokens", "branches", "NLL per action token"), buckets)
        if buckets
        else "",
    )
    return Card("evaluate", "Evaluation on held-out tasks", markdown)


@summary.register
def _(result: Promoted) -> str:
    return ("promoted: " if result.report.promoted else "not promoted: ") + "; ".join(result.report.reasons)


@card.register
def _(result: Promoted) -> Card:
    report = result.report
    verdict = "**Promoted**: the alias `current` now names the candidate." if report.promoted else "**Not promoted.**"
    reasons = "\n".join(f"- {_cell(reason)}" for reason in report.reasons)
    rows = [("candidate", report.candidate_sha256[:16]), ("incumbent", (report.incumbent_sha256 or "none")[:16])]
    return Card("promote", "Promotion", _page(verdict, reasons, _table(("", "sha256"), rows)))


def run_card(report: RunReport) -> Card:
    """The page of a whole run: one line a stage."""
    rows = [(run.stage, run.outcome, f"{run.wall_s:,.1f}", run.summary) for run in report.stages]
    verdict = f"**{report.status}**" + (f": {_cell(report.message)}" if report.message else "")
    head = f"{verdict}, {report.wall_s:,.1f} s, store `{report.store}`, record `runs/{report.run_id}.json`."
    return Card("run", f"Run {report.name}", _page(head, _table(("stage", "", "seconds", "result"), rows)))
