"""The few things ranks say to each other: two scalars a pair, one flat gradient a step, digests.

Shapes: R ranks, K values, G gradient elements of all trainable parameters, in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from schemas.errors import StageError, UserError

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


MEETING_TIMEOUT_S = 1800.0
"""Models are loaded in it, by the slowest rank as well."""

COLLECTIVE_TIMEOUT_S = 86_400.0
"""A rank may wait for another's pair, hours at 262K tokens on a slow card. Dead ranks are noticed by the launcher."""


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


@cache
def _store(launch: Launch) -> PrefixStore:
    """Where ranks find each other's words before they meet as a process group.

    Raises:
        PeerLostError: nobody hosts it.
    """
    try:
        store = TCPStore(
            launch.host,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.store_is_hosted,
            timeout=timedelta(seconds=MEETING_TIMEOUT_S),
        )
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"rank {launch.rank} could not reach the other ranks: {error}") from error
    return PrefixStore(f"traceforge/{launch.attempt}", store)


def _tell(group: Group, name: str, value: str) -> list[str]:
    """What every rank says of this, in rank order; for before `join`, once a name. PeerLostError: one says nothing."""
    launch = group.launch
    try:
        _store(launch).set(f"{name}/{launch.rank}", value)
        return [_store(launch).get(f"{name}/{rank}").decode() for rank in range(launch.world_size)]
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"rank {launch.rank} heard nothing of another rank's {name}: {error}") from error


def least(group: Group, name: str, values: Sequence[int]) -> list[int]:
    """The smallest of each value over the ranks: what all of them have. For before `join`, once a name.

    Raises:
        PeerLostError: a rank died.
    """
    if group.world_size == 1:
        return list(values)
    told = [json.loads(text) for text in _tell(group, name, json.dumps(list(values)))]
    return [min(column) for column in zip(*told, strict=True)]


def check_devices(group: Group, uuid: str | None) -> None:
    """Before anything else is shared: each rank has a GPU of its own, or none has one.

    Args:
        uuid: of this rank's GPU; None: it has none.

    Raises:
        UserError: a rank has a GPU and another has none, so that they have no way to talk; or two have the same.
        PeerLostError: a rank died.
    """
    if group.world_size == 1:
        return
    gpus = _tell(group, "device", uuid or "none")
    if set(gpus) == {"none"}:
        return
    without = [rank for rank, gpu in enumerate(gpus) if gpu == "none" or gpu in gpus[:rank]]
    if without:
        names = ", ".join(map(str, without))
        raise UserError(
            f"{len(gpus)} processes on {len(set(gpus) - {'none'})} GPUs: rank {names} has none of its own",
            where="simpo.n_processes",
            fix="set it to the number of GPUs that CUDA_VISIBLE_DEVICES shows (with 1 the plan is sequential)",
        )


def check_spec(group: Group, digest: str) -> None:
    """Before anything is loaded: every rank was given the same spec. Others would meet in collectives of other sizes.

    Raises:
        UserError: one was given another.
        PeerLostError: a rank died.
    """
    if group.world_size == 1:
        return
    told = _tell(group, "spec", digest)
    if others := [str(rank) for rank, other in enumerate(told) if other != told[0]]:
        raise UserError(
            f"rank 0 was given another spec than rank {', '.join(others)}",
            where="spec.json",
            fix="give every node the same file",
        )


def join(group: Group) -> None:
    """Meets the other ranks, once. The model is loaded before: unsloth takes a process group for one it should use.

    Raises:
        PeerLostError: the others did not come within `MEETING_TIMEOUT_S`.
    """
    if group.world_size == 1 or dist.is_initialized():
        return
    launch = group.launch
    try:
        dist.init_process_group(
            group.backend,
            store=_store(launch),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
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
