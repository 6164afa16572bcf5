"""Running out of memory: which side ran out, what was allocated beside what the ledger had predicted, what to do.

A stage that runs out ends. It is never tried again in another way: what would be computed might differ in the last
digits, and half a run would have been trained by each.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.budget import Side, Stand, advice
from engine.host_memory import HostMemoryError, host_limits, tightest
from engine.memory import GIB, Ledger
from schemas.errors import StageError

if TYPE_CHECKING:
    from transformers import Trainer

    from engine.group import Group
    from engine.scorers import Engine

MIB = 2**20
_HOST_TEXTS = ("can't allocate memory", "Cannot allocate memory")  # PyTorch's CPU allocator raises a RuntimeError
_DEVICE_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def side_of(error: BaseException) -> Side | None:
    """Which memory an error says is exhausted; None for every other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, (MemoryError, HostMemoryError)):
        return "host"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    if isinstance(error, RuntimeError):
        if any(text in str(error) for text in _DEVICE_TEXTS):
            return "device"
        if any(text in str(error) for text in _HOST_TEXTS):
            return "host"
    return None


@dataclass
class Watched:
    """What a stage has built so far, for the report of what was allocated."""

    trainer: Trainer | None = None


class Allocated(NamedTuple):
    """Bytes at the moment of failure: per component where the owner is known, and by PyTorch's allocator."""

    components: dict[str, int]
    now_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    free_bytes: int
    total_bytes: int


def _with_quantisation(parameter: Tensor) -> int:
    """Bytes of a weight and, for bitsandbytes' formats, of the scales that belong to it."""
    n_bytes, states = parameter.nbytes, [getattr(parameter, "quant_state", None)]
    while states:
        state = states.pop()
        if state is not None:
            n_bytes += state.absmax.nbytes
            states.append(getattr(state, "state2", None))
    return n_bytes


def components_of(model: nn.Module | None, optimizer: Any) -> dict[str, int]:
    """Bytes of what is known by its owner, in the ledger's words for its static rows."""
    found: dict[str, int] = {}

    def add(name: str, n_bytes: int) -> None:
        found[name] = found.get(name, 0) + n_bytes

    for name, parameter in model.named_parameters() if model is not None else ():
        if parameter.requires_grad or "lora_" in name:
            add("adapters", parameter.nbytes)
            if parameter.grad is not None:
                add("gradients", parameter.grad.nbytes)
        elif "embed_tokens" in name or "lm_head" in name:
            add("embedding and head", parameter.nbytes)
        else:
            add("decoder weights", _with_quantisation(parameter))
    states: Mapping[Any, Any] = getattr(optimizer, "state", {})
    tensors = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    if tensors:
        add("optimiser", sum(tensor.nbytes for tensor in tensors))
    return found


def allocated_now(watched: Watched, device: torch.device) -> Allocated:
    """Zero for everything but the components off the GPU."""
    trainer = watched.trainer
    components = components_of(trainer.model, trainer.optimizer) if trainer is not None else {}
    if device.type != "cuda":
        return Allocated(components, 0, 0, 0, 0, 0, 0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Allocated(
        components,
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        free_bytes,
        total_bytes,
    )


def comparison(ledger: Ledger | None, used: Allocated) -> str:
    """A table of predicted and allocated MiB, component by component, and the allocator's own figures below."""
    predicted: Mapping[str, int] = {}
    if ledger is not None:
        predicted = {
            row.component if row.moment == "static" else f"{row.moment}: {row.component}": row.device_bytes
            for row in ledger.rows
            if row.moment in ("static", "kept", ledger.peak_moment) and row.device_bytes
        }
    lines = [f"{'component':<48}{'predicted MiB':>14}{'allocated MiB':>14}"]
    for name in [*predicted, *(name for name in used.components if name not in predicted)]:
        want, have = predicted.get(name), used.components.get(name)
        cells = [f"{value / MIB:,.1f}" if value is not None else "-" for value in (want, have)]
        lines.append(f"{name:<48}{cells[0]:>14}{cells[1]:>14}")
    if used.total_bytes:
        rest = used.now_bytes - sum(used.components.values())
        lines.append(f"{'activations, buffers and libraries':<48}{'':>14}{rest / MIB:>14,.1f}")
        peak = f"{ledger.peak_device_bytes / MIB:,.1f}" if ledger is not None else "-"
        lines.append(f"{'all (predicted: peak; allocated: at failure)':<48}{peak:>14}{used.now_bytes / MIB:>14,.1f}")
        idle = used.reserved_bytes - used.now_bytes
        lines.append(
            f"allocator: {used.now_bytes / GIB:.2f} GiB allocated and {used.reserved_bytes / GIB:.2f} reserved at "
            f"failure, so {idle / GIB:.2f} held in pieces that did not fit; peaks {used.peak_bytes / GIB:.2f} and "
            f"{used.peak_reserved_bytes / GIB:.2f}; {used.free_bytes / GIB:.2f} of {used.total_bytes / GIB:.2f} "
            f"GiB free on the device"
        )
    if ledger is not None and ledger.host_bytes:
        limit = tightest(host_limits())
        lines.append(
            f"host: {ledger.host_bytes / GIB:.2f} GiB predicted to be pinned for the longest branch; {limit.by} now "
            f"leaves {limit.available_bytes / GIB:.2f}"
        )
    return "\n".join(lines)


def report_of(engine: Engine, watched: Watched, group: Group, side: Side, error: BaseException) -> str:
    """The whole story: one line with cause and advice, then the comparison."""
    used = allocated_now(watched, group.device)
    said = str(error).splitlines()[0].rstrip(".") if str(error) else "no details"
    stand = Stand("host", tightest(host_limits()).available_bytes, world_size=group.world_size)
    if side == "device":
        idle_bytes = used.reserved_bytes - used.now_bytes
        obtainable_bytes = used.reserved_bytes + used.free_bytes
        stand = Stand("device", obtainable_bytes, used.peak_reserved_bytes, idle_bytes, group.world_size)
    plan = engine.planned
    predicted = ""
    if plan.ledger is not None:
        predicted_bytes = plan.ledger.peak_device_bytes if side == "device" else plan.ledger.host_bytes
        predicted = f"; the ledger had predicted {predicted_bytes / GIB:.2f} GiB"
    return (
        f"out of memory on the {side} with branches of up to {plan.longest_tokens:,} tokens (engine {plan.engine})"
        f"{predicted}: {said}. To go on: {'; or '.join(advice(stand, plan))}\n{comparison(plan.ledger, used)}"
    )


@contextlib.contextmanager
def memory_advice(engine: Engine, group: Group) -> Iterator[Watched]:
    """Turns running out of memory into a report and advice; the stage puts what it builds into what it is given.

    Raises:
        StageError: in place of the errors that `side_of` knows.
    """
    watched = Watched()
    try:
        yield watched
    except (RuntimeError, MemoryError, OSError, HostMemoryError) as error:
        side = side_of(error)
        if side is None:
            raise
        raise StageError(report_of(engine, watched, group, side, error)) from error
