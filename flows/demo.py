"""The demonstration: sample runs made on the spot, the whole pipeline on them, and a check that it really learned."""

import json
from pathlib import Path

from rich.console import Console

from flows.local import run_inline
from schemas.errors import StageError
from schemas.load import load_config
from schemas.runs import RunReport
from schemas.sample import SampleReport
from tasks.sample.generate import generate_samples
from tasks.sample.output import MANIFEST_NAME

CONFIG = Path("configs/demo.toml")
RUNS_PER_TASK = 4
TARGET_TOKENS = 2_000


def _is_there(folder: Path, wanted: dict[str, object]) -> bool:
    manifest = folder / MANIFEST_NAME
    if not manifest.is_file():
        return False
    settings = json.loads(manifest.read_text(encoding="utf-8"))["settings"]
    return all(settings.get(name) == value for name, value in wanted.items())


def make_samples(
    folder: Path, n_tasks: int, seed: int, runs_per_task: int, target_tokens: int, console: Console
) -> SampleReport:
    """Makes sample runs, showing how far it is."""
    with console.status("sample runs") as status:
        return generate_samples(
            folder,
            n_tasks=n_tasks,
            seed=seed,
            runs_per_task=runs_per_task,
            target_tokens=target_tokens,
            progress=lambda done, total: status.update(f"sample runs: {done} of {total}"),
        )


def _ensure_samples(folder: Path, n_tasks: int, seed: int, console: Console) -> None:
    wanted: dict[str, object] = {
        "n_tasks": n_tasks,
        "seed": seed,
        "runs_per_task": RUNS_PER_TASK,
        "target_tokens": [TARGET_TOKENS, TARGET_TOKENS],
    }
    if not _is_there(folder, wanted):
        report = make_samples(folder, n_tasks, seed, RUNS_PER_TASK, TARGET_TOKENS, console)
        console.print(f"{report.n_runs} sample runs of {report.n_tasks} tasks made in {report.duration_s:.1f} s")


def check_learned(report: RunReport) -> None:
    """Asserts what the demonstration claims.

    Raises:
        StageError: the SFT loss did not fall, or the SimPO margin on the training pairs did not rise.
    """
    if report.sft is None or report.simpo is None:
        raise StageError("the demo ended before it trained")
    sft, simpo = report.sft.report, report.simpo.report
    if not sft.last_loss < sft.first_loss:
        raise StageError(f"the SFT loss did not fall: {sft.first_loss:.4f} to {sft.last_loss:.4f}")
    if simpo.first_margin is None or simpo.last_margin is None or not simpo.last_margin > simpo.first_margin:
        raise StageError(f"the SimPO margin did not rise: {simpo.first_margin} to {simpo.last_margin}")


def run_demo(*, n_tasks: int, seed: int, console: Console) -> RunReport:
    """Makes samples, runs `configs/demo.toml` on them and checks the outcome.

    Raises:
        StageError: it trained, and learned nothing.
    """
    config = load_config(CONFIG)
    _ensure_samples(Path(config.source.paths[0]), n_tasks, seed, console)
    report = run_inline(config, console=console)
    check_learned(report)
    return report


def _caution(report: RunReport) -> list[str]:
    """What the table of held-out pairs does not say, in a sentence each."""
    if report.paired is None or report.promoted is None:
        return []
    n_pairs, decision = report.paired.report.by_split["heldout"], report.promoted.report
    why = f"{'promoted' if decision.promoted else 'not promoted'}: {'; '.join(decision.reasons)}"
    return [
        f"{n_pairs} held-out pairs and a model of random weights show that the machinery runs, not how good it is.",
        f"SimPO was {why}.",
    ]


def where_to_look(report: RunReport) -> str:
    """The next steps, for a person who has just seen the demonstration."""
    sft, simpo = report.sft, report.simpo
    assert sft is not None
    assert simpo is not None
    sample = next(Path(load_config(CONFIG).source.paths[0]).rglob("*.traj.json"))
    return "\n".join(
        (
            f"SFT loss     {sft.report.first_loss:.4f} -> {sft.report.last_loss:.4f} nats per action token",
            f"SimPO margin {simpo.report.first_margin:+.4f} -> {simpo.report.last_margin:+.4f} on the training pairs",
            *_caution(report),
            "",
            "Next:",
            f"  traceforge inspect {sample}    a run, its spans in colour, and what is scored",
            f"  traceforge run {CONFIG}    again: every stage comes from the cache",
            f"  traceforge run {CONFIG} --set 'source.paths=[\"YOUR/RUNS\"]'",
            f"  traceforge artifacts list    everything that was made, in {report.store}",
        )
    )
