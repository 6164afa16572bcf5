"""What the Prefect UI shows of each stage: one markdown page for each result, made from its report alone.

The one exception is the picture of a training run's GPUs, which is drawn from the samples that its result refers to.
"""

from functools import singledispatch
from typing import NamedTuple

from artifacts import charts
from artifacts import markdown as md
from artifacts.training_card import gpu_table, training_page
from schemas.reports import (
    Evaluated,
    Ingested,
    ModelReady,
    ModelScore,
    Paired,
    Promoted,
    Rendered,
    StageResult,
    Trained,
)
from schemas.runs import RunReport


class Card(NamedTuple):
    key: str
    """lowercase letters, digits and dashes"""
    title: str
    markdown: str


@singledispatch
def card(result: StageResult) -> Card:
    """The result's page in the UI."""
    raise TypeError(f"no card of {type(result).__name__}")


@card.register
def _(result: Ingested) -> Card:
    report = result.report
    lengths = {f"{int(edge):,}": n_runs for edge, n_runs in report.length_chars.items()}
    markdown = md.page(
        f"**{report.n_trajectories:,} runs** with {report.n_turns:,} turns, from {report.n_files:,} files."
        + ("" if report.redact else " **Not redacted.**"),
        md.counts("By outcome", ("outcome", "runs"), report.by_outcome),
        md.counts("By format", ("format", "runs"), report.by_format),
        md.counts("By exit status (the agent's own claim)", ("exit status", "runs"), report.by_exit_status),
        "### Lengths\n\n"
        + md.picture(charts.bars(lengths, x_label="characters, up to", y_label="runs"), "runs by length")
        if lengths
        else "",
        md.counts("Redactions", ("what", "times"), report.redactions),
        md.counts("Left out, by reason", ("reason", "files, lines, runs"), report.left_out_by_reason),
        md.dropped("Quarantined files", report.quarantined, report.n_quarantined),
        md.dropped("Damaged lines", report.damaged, report.n_damaged),
        md.dropped("Duplicates left out", report.duplicates, report.n_duplicates),
        f"All of it, a line each: {md.cell(md.Code(report.left_out))}" if report.left_out_by_reason else "",
        md.payloads(result.refs()),
    )
    return Card("ingest", "Ingested runs", markdown)


@card.register
def _(result: ModelReady) -> Card:
    text = f"**{md.cell(result.name)}**: {result.n_parameters:,} parameters."
    return Card("model", "Base model", md.page(text, md.payloads(result.refs())))


@card.register
def _(result: Rendered) -> Card:
    report = result.report
    markdown = md.page(
        f"**{report.n_branches:,} branches** with {report.n_tokens:,} tokens, of which {report.n_scored:,} are scored "
        f"({md.percent(report.n_scored / max(1, report.n_tokens))}). Chat template: {md.cell(report.template)}.",
        f"**Branches beyond the {report.trained_positions:,} positions that the model was trained on: "
        f"{report.n_beyond_positions:,}.** `rope_scaling` in its config.json may extend them; `render.max_tokens` "
        "leaves such branches out."
        if report.n_beyond_positions
        else "",
        "### Runs kept at each length limit (tokens)",
        md.picture(charts.bars(report.kept_at_limit, x_label="tokens", y_label="runs"), "runs kept by length limit"),
        md.values("Branch lengths, before any was dropped", ("", "tokens"), report.length_tokens),
        md.counts("Tokens by kind", ("kind", "tokens"), report.tokens_by_kind),
        md.counts("By split", ("split", "branches"), report.by_split),
        md.counts("Training runs that leak into the held-out side", ("how", "runs"), report.n_leaks),
        md.table(
            ("training run", "held-out run", "how", "similarity"),
            [
                (leak.train, leak.heldout, f"{leak.kind} {leak.text} text", f"{leak.similarity:.2f}")
                for leak in report.leaks[: md.DROPPED_SHOWN]
            ],
        )
        if report.leaks
        else "",
        md.dropped("Dropped", report.dropped),
        md.payloads(result.refs()),
    )
    return Card("render", "Rendered branches", markdown)


@card.register
def _(result: Paired) -> Card:
    report, shared = result.report, result.report.shared_prefix_histogram
    gaps = {name.replace("_", " "): n_tokens for name, n_tokens in report.length_gap_tokens.items()}
    markdown = md.page(
        f"**{report.n_pairs:,} pairs** of {report.n_tasks_with_pairs:,} tasks.",
        md.counts("By rule", ("rule", "pairs"), report.by_rule),
        md.counts("By split", ("split", "pairs"), report.by_split),
        md.counts("Candidates refused, by guard", ("guard", "candidates"), report.rejected_by_reason),
        md.values("Shared prefix", ("", "tokens"), report.shared_prefix_tokens),
        md.picture(charts.bars(shared, x_label="shared leading tokens", y_label="pairs"), "pairs by shared prefix")
        if shared
        else "",
        md.values("Length gap, chosen minus rejected", ("", "tokens"), gaps),
        md.dropped("Dropped", report.dropped),
        md.payloads(result.refs()),
    )
    return Card("pairs", "Preference pairs", markdown)


@card.register
def _(result: Trained) -> Card:
    stage = result.report.stage
    return Card(stage, {"sft": "Training: SFT", "simpo": "Training: SimPO"}[stage], training_page(result))


def _score_row(score: ModelScore) -> tuple[object, ...]:
    interval = score.pair_accuracy_ci95
    return (
        score.name,
        score.n_branches,
        score.n_pairs,
        md.number(score.nll_per_action_token),
        md.percent(score.pair_accuracy),
        md.NONE if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}",
        md.signed(score.mean_margin),
    )


@card.register
def _(result: Evaluated) -> Card:
    report = result.report
    head = ("model", "branches", "pairs", "NLL", "pair accuracy", "95 % interval", "mean margin")
    likelihoods = {
        score.name: score.nll_per_action_token for score in report.models if score.nll_per_action_token is not None
    }
    buckets = [
        (
            score.name,
            "more" if bucket.max_tokens is None else md.number(bucket.max_tokens),
            bucket.n_branches,
            md.number(bucket.nll_per_action_token),
        )
        for score in report.models
        for bucket in score.buckets
        if bucket.n_branches
    ]
    markdown = md.page(
        f"Held-out tasks: {report.n_heldout_tasks:,}. Evaluated in {md.duration(report.wall_s)}: "
        f"{report.n_tokens_seen:,} tokens seen by attention, {report.n_tokens_scored:,} scored. "
        "NLL and margin are in nats per scored token.",
        md.table(head, map(_score_row, report.models)),
        md.picture(charts.bars(likelihoods, x_label="", y_label="nats per action token"), "NLL by model")
        if likelihoods
        else "",
        "### By length\n\n" + md.table(("model", "up to tokens", "branches", "NLL"), buckets) if buckets else "",
        gpu_table(report.gpus),
    )
    return Card("evaluate", "Evaluation on held-out tasks", markdown)


@card.register
def _(result: Promoted) -> Card:
    report = result.report
    verdict = (
        "**Promoted**: `current` now names the candidate."
        if report.promoted
        else "**Not promoted**: `current` is unchanged."
    )
    reasons = "\n".join(f"- {md.cell(reason)}" for reason in report.reasons)
    incumbent = report.incumbent_sha256
    rows = [
        ("candidate", md.Code(report.candidate_sha256[:16])),
        ("incumbent", md.Code(incumbent[:16]) if incumbent else "none"),
    ]
    return Card("promote", "Promotion", md.page(verdict, reasons, md.table(("", "sha256"), rows)))


def run_card(report: RunReport) -> Card:
    """The page of a whole run: one line a stage."""
    rows = [(run.stage, run.outcome, md.duration(run.wall_s), run.summary) for run in report.stages]
    verdict = f"**{report.status.replace('_', ' ')}**" + (f": {md.cell(report.message)}" if report.message else "")
    record = md.cell(md.Code(f"{report.store}/runs/{report.run_id}.json"))
    return Card(
        "run",
        f"Run {report.name}",
        md.page(
            f"{verdict}, in {md.duration(report.wall_s)}.",
            md.table(("stage", "", "time", "result"), rows) if rows else "",
            f"Record: {record}",
        ),
    )
