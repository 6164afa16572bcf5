"""`traceforge plan`: what a branch of a given length needs, component by component, before anything is loaded."""

import json
from pathlib import Path

from pydantic import Field

from artifacts.store import Store
from engine.budget import memory_setup
from engine.choose import choose_plan, longest_branch
from engine.memory import GIB, Ledger
from schemas.base import Frozen
from schemas.config import RunConfig
from tasks.model import prepare_model


class PlanReport(Frozen):
    """The memory of one branch, forward, backward and optimiser, on one device."""

    model: str
    n_tokens: int
    n_scored: int
    device_limit_bytes: int
    host_limit_bytes: int
    peak_device_bytes: int
    host_bytes: int
    longest_tokens: int = Field(description="the longest branch that fits the same limits")
    ledger: Ledger

    def text(self) -> str:
        return (
            f"{self.ledger.table()}\n\n{self.model}: a branch of {self.n_tokens:,} tokens, {self.n_scored:,} of them "
            f"scored, peaks at {self.peak_device_bytes / GIB:.2f} GiB on the device and {self.host_bytes / GIB:.2f} "
            f"GiB on the host;\nthe longest that fits is {self.longest_tokens:,} tokens"
        )


def plan_memory(config: RunConfig, *, n_tokens: int, n_scored: int, device_gib: float, host_gib: float) -> PlanReport:
    """Predicts the memory of the preference stage for one branch.

    Raises:
        UserError: no such model, or the branch does not fit; the text says how long one may be.
    """
    model = prepare_model(config.model, Store(config.store))
    model_config = json.loads((Path(model.model.path) / "config.json").read_text(encoding="utf-8"))
    setup = memory_setup(
        config.model,
        lora_rank=config.lora.r,
        lora_targets=config.lora.target_modules,
        optimizer=config.simpo.optimizer,
        n_scored=n_scored,
        accumulating=config.simpo.accumulation > 1 or config.simpo.plan != "parallel",
    )
    device_bytes, host_bytes = int(device_gib * GIB), int(host_gib * GIB)
    _, ledger = choose_plan(model_config, n_tokens, setup, device_bytes=device_bytes, host_bytes=host_bytes)
    return PlanReport(
        model=model.name,
        n_tokens=n_tokens,
        n_scored=n_scored,
        device_limit_bytes=device_bytes,
        host_limit_bytes=host_bytes,
        peak_device_bytes=ledger.peak_device_bytes,
        host_bytes=ledger.host_bytes,
        longest_tokens=longest_branch(model_config, setup, device_bytes=device_bytes, host_bytes=host_bytes),
        ledger=ledger,
    )
