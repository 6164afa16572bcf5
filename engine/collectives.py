"""The few things ranks say to each other: two scalars a pair, one flat gradient a step, digests.

Shapes: R ranks, K values, G gradient elements of all trainable parameters, in the order of their names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from schemas.errors import StageError

_LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class PeerLostError(StageError):
    """The other rank is gone; its own error is the one that matters."""


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process, as read from its environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    store_is_hosted: bool = False
    attempt: str = "0"


@dataclass(frozen=True)
class Group:
    """This process among the ranks. `backend` is none, gloo or nccl."""

    rank: int = 0
    world_size: int = 1
    backend: str = "none"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: Launch = field(default_factory=lambda: Launch())


def take_launch() -> Launch:
    """Reads the variables of `torch.distributed.run` and takes them out of the environment.

    accelerate wraps the model in DDP and shards the data when it finds them; here each rank's Trainer has to see a
    world of one, because ranks hold different branches of the same pair.
    """
    values = {name: os.environ.pop(name, None) for name in _LAUNCH_VARIABLES}
    if values["RANK"] is None:
        return Launch()
    return Launch(
        rank=int(values["RANK"]),
        world_size=int(values["WORLD_SIZE"] or 1),
        local_rank=int(values["LOCAL_RANK"] or 0),
        host=values["MASTER_ADDR"] or "127.0.0.1",
        port=int(values["MASTER_PORT"] or 0),
        store_is_hosted=os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def group_of(launch: Launch, device: torch.device) -> Group:
    """This process among the ranks, not joined yet: NCCL when it owns a CUDA device, gloo otherwise."""
    if launch.world_size == 1:
        return Group(device=device)
    return Group(launch.rank, launch.world_size, "nccl" if device.type == "cuda" else "gloo", device, launch)


def join(group: Group, *, timeout_s: float = 1800.0) -> None:
    """Meets the other ranks, once. The model is loaded before: unsloth takes a process group for one it should use.

    Raises:
        PeerLostError: the others did not come within the time-out.
    """
    if group.world_size == 1 or dist.is_initialized():
        return
    launch, timeout = group.launch, timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            launch.host,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.store_is_hosted,
            timeout=timeout,
        )
        dist.init_process_group(
            group.backend,
            store=PrefixStore(f"traceforge/{launch.attempt}", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"rank {launch.rank} could not reach the other ranks: {error}") from error


def leave(group: Group) -> None:
    if group.world_size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _lost(group: Group, error: BaseException) -> PeerLostError:
    return PeerLostError(f"rank {group.rank}: another rank is gone: {str(error).splitlines()[0]}")


def gather(group: Group, values_K: Tensor) -> Tensor:
    """values_RK in float64 on the CPU: every rank's values, in rank order. Blocks until all have come.

    Raises:
        PeerLostError: a rank died.
    """
    own_K = values_K.detach().to(group.device, torch.float64)
    if group.world_size == 1 or not own_K.numel():
        return own_K.expand(group.world_size, -1).cpu()
    all_RK = own_K.new_empty(group.world_size, own_K.numel())
    try:
        dist.all_gather(list(all_RK.unbind(0)), own_K)
    except (RuntimeError, dist.DistError) as error:
        raise _lost(group, error) from error
    return all_RK.cpu()


def least(group: Group, value: int) -> int:
    """The smallest of what the ranks give: what every one of them can do.

    Raises:
        PeerLostError: a rank died.
    """
    return int(gather(group, torch.tensor([value], dtype=torch.float64)).min())


def swap(group: Group, peer: int, value: float) -> float:
    """Gives a number to another rank and returns the one it gives; float64.

    Raises:
        PeerLostError: that rank died.
    """
    own = torch.tensor([value], dtype=torch.float64, device=group.device)
    other = torch.empty_like(own)
    try:
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]):
            request.wait()
        return float(other)
    except (RuntimeError, dist.DistError) as error:
        raise _lost(group, error) from error


def sum_gradients(group: Group, parameters: Sequence[nn.Parameter]) -> None:
    """Replaces every gradient by its SUM over the ranks, through one flat buffer.

    The loss of a pair is one function of both branches, so the parts add up: an average would halve the step.

    Raises:
        PeerLostError: a rank died.
    """
    if group.world_size == 1:
        return
    flat_G = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
    try:
        dist.all_reduce(flat_G, op=dist.ReduceOp.SUM)
    except (RuntimeError, dist.DistError) as error:
        raise _lost(group, error) from error
    start = 0
    for parameter in parameters:
        parameter.grad = flat_G[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def gather_objects(group: Group, own: Any) -> list[Any]:
    """What every rank gave, in rank order.

    Raises:
        PeerLostError: a rank died.
    """
    everyone: list[Any] = [own]
    if group.world_size > 1:
        everyone = [None] * group.world_size
        try:
            dist.all_gather_object(everyone, own)
        except (RuntimeError, dist.DistError) as error:
            raise _lost(group, error) from error
    return everyone


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's dtype, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return hashlib.sha256(head + plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def compare_digests(group: Group, digests: Mapping[str, str], what: str) -> None:
    """Stops the run when the ranks do not hold the same.

    Raises:
        StageError: digests differ; names the first of them.
        PeerLostError: a rank died.
    """
    everyone = gather_objects(group, dict(digests))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        names = sorted(set(first) | set(other))
        different = [name for name in names if first.get(name) != other.get(name)]
        if different:
            raise StageError(f"ranks 0 and {rank} differ {what}: {different[0]} ({len(different)} in all)")
