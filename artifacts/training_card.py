"""The page of a training run: its curves, what it cost, what was really in effect."""

from pathlib import Path

from artifacts import charts
from artifacts import markdown as md
from artifacts.gpu_samples import gpu_picture
from schemas.reports import GpuUse, Trained, TrainPoint, TrainReport


def _gib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / 2**30


def _known(panel: dict[str, list[float | None]]) -> bool:
    return any(value is not None for series in panel.values() for value in series)


def _curves(points: tuple[TrainPoint, ...]) -> str:
    if not points:
        return ""
    panels: dict[str, dict[str, list[float | None]]] = {
        "loss": {"loss": [point.loss for point in points]},
        "margin (nats per token)": {"margin": [point.margin for point in points]},
        "log-probability (nats per token)": {
            "chosen": [point.chosen_logp for point in points],
            "rejected": [point.rejected_logp for point in points],
        },
        "gradient norm": {"norm": [point.grad_norm for point in points]},
        "tokens per second": {"speed": [point.tokens_per_s for point in points]},
        "GPU memory, peak of the step (GiB)": {
            "allocated": [_gib(point.allocated_bytes) for point in points],
            "reserved": [_gib(point.reserved_bytes) for point in points],
        },
    }
    shown = {label: panel for label, panel in panels.items() if _known(panel)}
    return md.picture(charts.lines([point.step for point in points], shown), "training curves")


def _peaks(report: TrainReport) -> str:
    text = f"{report.peak_memory_bytes / 2**30:,.2f} GiB"
    if report.peak_reserved_bytes is None:
        return f"{text} of host memory"
    return f"{text} allocated, {report.peak_reserved_bytes / 2**30:,.2f} GiB reserved"


def gpu_table(gpus: tuple[GpuUse, ...]) -> str:
    """What NVML saw, a line a rank; empty where there was no GPU."""
    if not gpus:
        return ""
    rows = [
        (
            use.rank,
            use.name,
            f"{use.peak_used_bytes / 2**30:,.2f} of {use.total_bytes / 2**30:,.2f}",
            md.number(use.mean_busy_percent),
            md.number(use.peak_power_w),
        )
        for use in gpus
    ]
    head = ("rank", "GPU", "peak in use (GiB)", "mean busy (%)", "peak power (W)")
    return "### GPUs, by NVML\n\n" + md.table(head, rows)


def training_page(result: Trained) -> str:
    """Markdown. What does not apply to the stage has no row."""
    report = result.report
    margins = (report.first_margin, report.last_margin)
    rows = [
        ("examples", md.number(report.n_examples)),
        ("steps", md.number(report.n_steps)),
        ("resumed from step", md.number(report.resumed_from_step) if report.resumed_from_step else ""),
        ("stopped early", report.stopped_early or ""),
        ("tokens seen by attention", md.number(report.n_tokens_seen)),
        ("tokens scored", md.number(report.n_tokens_scored)),
        ("padding", md.percent(report.padding_share)),
        ("loss, first quarter → last", f"{report.first_loss:.4f} → {report.last_loss:.4f}"),
        (
            "margin, before → after",
            "" if None in margins else f"{md.signed(margins[0])} → {md.signed(margins[1])} nats per token",
        ),
        ("wall time", md.duration(report.wall_s)),
        ("peak memory", _peaks(report)),
        ("processes", md.number(report.world_size)),
        ("plan", report.plan),
        ("collectives", report.backend if report.world_size > 1 else ""),
        ("ranks waiting for others", "" if report.idle_share is None else md.percent(report.idle_share)),
    ]
    samples = gpu_picture(Path(result.gpu_samples.path)) if result.gpu_samples else ""
    return md.page(
        _curves(report.curve),
        md.table(("", ""), [row for row in rows if row[1]]),
        gpu_table(report.gpus),
        md.picture(samples, "GPUs over the run") if samples else "",
        "### In effect\n\n" + md.table(("setting", "value"), sorted(report.settings.items()))
        if report.settings
        else "",
        md.payloads(result.refs()),
    )
