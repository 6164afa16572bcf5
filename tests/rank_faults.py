"""What tests of faults in a real process group share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

from artifacts.store import write_atomically
from schemas.spec import TrainSpec
from schemas.training import OptimizerConfig, SimpoConfig
from tasks import launch as launcher

CONFIG = SimpoConfig(
    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_share=0.0), epochs=4, accumulation=2, save_steps=3, seed=3
)

SOON_S = 120
"""20 to 25 s on a machine that does nothing else; what must not happen is that ranks wait for half an hour."""


def ranks_of(folder: Path) -> dict[int, psutil.Process]:
    """The living training processes that work in a folder, by rank."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if (
                "--stop-with-parent" in command
                and str(folder / "spec.json") in command
                and "torch.distributed.run" not in command
            ):
                found[int(process.environ().get("RANK", "0"))] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def prepare(folder: Path, spec: TrainSpec) -> Path:
    folder.mkdir(parents=True)
    write_atomically(folder / "spec.json", spec.model_dump_json())
    return folder / "spec.json"


def at_step(step: int, act: Callable[[], None]) -> Callable[[str], None]:
    """A log callback that acts once, when the line of a step has come."""
    done = threading.Event()

    def log(line: str) -> None:
        if f"step {step}/" in line and not done.is_set():
            done.set()
            act()

    return log


def with_fault(fault: str, patch: pytest.MonkeyPatch) -> None:
    """Ranks that are launched from now on have one of the faults of failing_rank.py."""
    command = launcher._command

    def faulty(spec_path: Path, n_processes: int) -> list[str]:
        words = command(spec_path, n_processes)
        place = words.index("engine.train")
        return [*words[: place - 1], str(Path(__file__).with_name("failing_rank.py")), *words[place + 1 :]]

    patch.setattr(launcher, "_command", faulty)
    patch.setenv("PYTHONPATH", str(REPOSITORY))
    patch.setenv("FAULT", fault)
