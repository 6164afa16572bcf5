"""A stage's result in a few words, for the table of a run."""

from functools import singledispatch

from artifacts import markdown as md
from schemas.reports import Evaluated, Ingested, ModelReady, Paired, Promoted, Rendered, StageResult, Trained


@singledispatch
def summary(result: StageResult) -> str:
    """The result in a few words."""
    raise TypeError(f"no summary of {type(result).__name__}")


@summary.register
def _(result: Ingested) -> str:
    report = result.report
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(report.by_outcome.items()))
    n_quarantined = max(report.n_quarantined, len(report.quarantined))
    quarantined = f"; {n_quarantined} files quarantined" if n_quarantined else ""
    return f"{report.n_trajectories} runs ({outcomes}){quarantined}"


@summary.register
def _(result: ModelReady) -> str:
    return f"{result.name}, {result.n_parameters / 1e6:,.1f}M parameters"


@summary.register
def _(result: Rendered) -> str:
    report = result.report
    dropped = f"; {len(report.dropped)} dropped" if report.dropped else ""
    n_leaks = sum(report.n_leaks.values())
    leaks = f"; {n_leaks} training runs leak into the held-out side" if n_leaks else ""
    beyond = ""
    if report.n_beyond_positions:
        beyond = f"; {report.n_beyond_positions} beyond the model's {report.trained_positions:,} positions"
    share = report.n_scored / max(1, report.n_tokens)
    return f"{report.n_branches} branches, {report.n_tokens:,} tokens, {share:.1%} scored{dropped}{leaks}{beyond}"


@summary.register
def _(result: Paired) -> str:
    report = result.report
    splits = ", ".join(f"{count} {name}" for name, count in sorted(report.by_split.items()))
    return f"{report.n_pairs} pairs of {report.n_tasks_with_pairs} tasks ({splits})"


@summary.register
def _(result: Trained) -> str:
    report = result.report
    text = f"loss {report.first_loss:.4f} → {report.last_loss:.4f} in {report.n_steps} steps"
    if report.first_margin is not None and report.last_margin is not None:
        text += f"; margin {md.signed(report.first_margin)} → {md.signed(report.last_margin)}"
    return text


@summary.register
def _(result: Evaluated) -> str:
    parts = []
    for score in result.report.models:
        accuracy = md.NONE if score.pair_accuracy is None else f"{score.pair_accuracy:.0%}"
        parts.append(f"{score.name} NLL {md.number(score.nll_per_action_token)} acc {accuracy}")
    return "; ".join(parts)


@summary.register
def _(result: Promoted) -> str:
    return ("promoted: " if result.report.promoted else "not promoted: ") + "; ".join(result.report.reasons)
