"""What the Prefect UI shows of each stage: one markdown page for each result, made from its report alone.

The one exception is the picture of a training run's GPUs, which is drawn from the samples that its result refers to.
"""

from functools import singledispatch
from pathlib import Path
from typing import NamedTuple

from artifacts import charts
from artifacts import markdown as md
from artifacts.gpu_samples import gpu_picture
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
    TrainReport,
)
from schemas.runs import RunReport


class Card(NamedTuple):
    key: str
    """lowercase letters, digits and dashes"""
    title: str
    markdown: str


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
    markdown = md.page(
        f"**{report.n_trajectories:,} runs** with {report.n_turns:,} turns, from {report.n_files:,} files."
        + ("" if report.redact else " **Not redacted.**"),
        md.counts("By outcome", report.by_outcome),
        md.counts("By format", report.by_format),
        md.counts("By exit status (the agent's own claim)", report.by_exit_status),
        "### Lengths\n\n"
        + md.picture(charts.bars(report.length_chars, x_label="characters, up to", y_label="runs"), "runs by length")
        if report.length_chars
        else "",
        md.counts("Redactions", report.redactions),
        md.counts("Left out, by reason", report.left_out_by_reason),
        md.dropped("Quarantined files", report.quarantined, report.n_quarantined),
        md.dropped("Damaged lines", report.damaged, report.n_damaged),
        md.dropped("Duplicates left out", report.duplicates, report.n_duplicates),
        md.payloads(result.refs()),
    )
    return Card("ingest", "Ingested runs", markdown)


@summary.register
def _(result: ModelReady) -> str:
    return f"{result.name}, {result.n_parameters / 1e6:,.1f}M parameters"


@card.register
def _(result: ModelReady) -> Card:
    text = f"**{result.name}**: {result.n_parameters:,} parameters."
    return Card("model", "Base model", md.page(text, md.payloads(result.refs())))


@summary.register
def _(result: Rendered) -> str:
    report = result.report
    dropped = f"; {len(report.dropped)} dropped" if report.dropped else ""
    n_leaks = sum(report.n_leaks.values())
    leaks = f"; {n_leaks} training runs leak into the held-out side" if n_leaks else ""
    share = report.n_scored / max(1, report.n_tokens)
    return f"{report.n_branches} branches, {report.n_tokens:,} tokens, {share:.1%} scored{dropped}{leaks}"


@card.register
def _(result: Rendered) -> Card:
    report = result.report
    markdown = md.page(
        f"**{report.n_branches:,} branches** with {report.n_tokens:,} tokens, of which {report.n_scored:,} are scored "
        f"({report.n_scored / max(1, report.n_tokens):.1%}). Chat template: {md.cell(report.template)}.",
        "### Runs kept at each length limit (tokens)",
        md.picture(charts.bars(report.kept_at_limit, x_label="tokens", y_label="runs"), "runs kept by length limit"),
        md.values("Branch lengths (tokens)", report.length_tokens),
        md.counts("Tokens by kind", report.tokens_by_kind),
        md.counts("By split", report.by_split),
        md.counts("Training runs that leak into the held-out side", report.n_leaks),
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


@summary.register
def _(result: Paired) -> str:
    report = result.report
    splits = ", ".join(f"{count} {name}" for name, count in sorted(report.by_split.items()))
    return f"{report.n_pairs} pairs of {report.n_tasks_with_pairs} tasks ({splits})"


@card.register
def _(result: Paired) -> Card:
    report, shared = result.report, result.report.shared_prefix_histogram
    markdown = md.page(
        f"**{report.n_pairs:,} pairs** of {report.n_tasks_with_pairs:,} tasks.",
        md.counts("By rule", report.by_rule),
        md.counts("By split", report.by_split),
        md.counts("Candidates refused, by guard", report.rejected_by_reason),
        md.values("Shared prefix (tokens)", report.shared_prefix_tokens),
        md.picture(charts.bars(shared, x_label="shared leading tokens", y_label="pairs"), "pairs by shared prefix")
        if shared
        else "",
        md.values("Length gap, chosen minus rejected (tokens)", report.length_gap_tokens),
        md.dropped("Dropped", report.dropped),
        md.payloads(result.refs()),
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
    return md.picture(charts.lines([point.step for point in points], panels), "training curves")


def _peaks(report: TrainReport) -> str:
    text = f"{report.peak_memory_bytes / 2**30:,.2f} GiB"
    if report.peak_reserved_bytes is not None:
        text += f" allocated, {report.peak_reserved_bytes / 2**30:,.2f} GiB reserved"
    return text


def _gpus(result: Trained) -> str:
    if not result.report.gpus:
        return ""
    rows = [
        (
            use.rank,
            use.name,
            f"{use.peak_used_bytes / 2**30:,.2f} of {use.total_bytes / 2**30:,.2f}",
            md.number(use.mean_busy_percent),
            md.number(use.peak_power_w),
        )
        for use in result.report.gpus
    ]
    head = ("rank", "GPU", "peak in use (GiB)", "mean busy (%)", "peak power (W)")
    uri = gpu_picture(Path(result.gpu_samples.path)) if result.gpu_samples else ""
    return md.page("### GPUs, by NVML", md.table(head, rows), md.picture(uri, "GPUs over the run") if uri else "")


@card.register
def _(result: Trained) -> Card:
    report = result.report
    rows = [
        ("examples", md.number(report.n_examples)),
        ("steps", md.number(report.n_steps)),
        ("tokens seen by attention", md.number(report.n_tokens_seen)),
        ("tokens scored", md.number(report.n_tokens_scored)),
        ("padding share", f"{report.padding_share:.1%}"),
        ("loss, first quarter → last", f"{report.first_loss:.4f} → {report.last_loss:.4f}"),
        ("margin, before → after", f"{md.number(report.first_margin)} → {md.number(report.last_margin)}"),
        ("wall time", f"{report.wall_s:,.1f} s"),
        ("peak memory", _peaks(report)),
        ("processes, plan, collectives", f"{report.world_size}, {report.plan}, {report.backend}"),
        ("resumed from step", md.number(report.resumed_from_step)),
    ]
    markdown = md.page(
        _curves(report),
        md.table(("", ""), rows),
        _gpus(result),
        "### In effect\n\n" + md.table(("", ""), sorted(report.settings.items())) if report.settings else "",
        md.payloads(result.refs()),
    )
    return Card(report.stage, f"Training: {report.stage.upper()}", markdown)


@summary.register
def _(result: Evaluated) -> str:
    parts = []
    for score in result.report.models:
        accuracy = md.NONE if score.pair_accuracy is None else f"{score.pair_accuracy:.0%}"
        parts.append(f"{score.name} NLL {md.number(score.nll_per_action_token)} acc {accuracy}")
    return "; ".join(parts)


def _score_row(score: ModelScore) -> tuple[object, ...]:
    interval = score.pair_accuracy_ci95
    return (
        score.name,
        score.n_branches,
        score.n_pairs,
        md.number(score.nll_per_action_token),
        md.number(score.pair_accuracy),
        md.NONE if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}",
        md.number(score.mean_margin),
    )


@card.register
def _(result: Evaluated) -> Card:
    report = result.report
    head = ("model", "branches", "pairs", "NLL per action token", "pair accuracy", "95 % interval", "mean margin")
    likelihoods = {
        score.name: score.nll_per_action_token for score in report.models if score.nll_per_action_token is not None
    }
    buckets = [
        (score.name, md.number(bucket.max_tokens), bucket.n_branches, md.number(bucket.nll_per_action_token))
        for score in report.models
        for bucket in score.buckets
        if bucket.n_branches
    ]
    markdown = md.page(
        f"Held-out tasks: {report.n_heldout_tasks:,}. Evaluated in {report.wall_s:,.1f} s: {report.n_tokens_seen:,} "
        f"tokens seen by attention, {report.n_tokens_scored:,} scored.",
        md.table(head, map(_score_row, report.models)),
        md.picture(charts.bars(likelihoods, x_label="", y_label="nats per action token"), "NLL by model")
        if likelihoods
        else "",
        "### By length\n\n" + md.table(("model", "up to tokens", "branches", "NLL per action token"), buckets)
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
    reasons = "\n".join(f"- {md.cell(reason)}" for reason in report.reasons)
    rows = [("candidate", report.candidate_sha256[:16]), ("incumbent", (report.incumbent_sha256 or "none")[:16])]
    return Card("promote", "Promotion", md.page(verdict, reasons, md.table(("", "sha256"), rows)))


def run_card(report: RunReport) -> Card:
    """The page of a whole run: one line a stage."""
    rows = [(run.stage, run.outcome, f"{run.wall_s:,.1f}", run.summary) for run in report.stages]
    verdict = f"**{report.status}**" + (f": {md.cell(report.message)}" if report.message else "")
    head = f"{verdict}, {report.wall_s:,.1f} s, store `{report.store}`, record `runs/{report.run_id}.json`."
    return Card("run", f"Run {report.name}", md.page(head, md.table(("stage", "", "seconds", "result"), rows)))
