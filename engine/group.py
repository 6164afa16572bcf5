"""Who this process is among the ranks, and how they find each other before they meet as a process group.

The model is loaded before they meet; what they must agree on by then goes through the store that their launcher hosts.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
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

_SHARING_NCCL = 23000
"""The first release that reads NCCL_MULTI_RANK_GPU_ENABLE; one before refuses two ranks on a GPU as they first talk."""


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


def _nccl_version() -> int:
    """Of the library that is loaded, 23007 for 2.30.7; 0: none of its own. PyTorch's is that of its headers."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _may_share_gpus() -> bool:
    """Whether NCCL was asked to let ranks share a GPU, and can: two ranks on one card, to try them, not to be fast."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and _nccl_version() >= _SHARING_NCCL


def check_devices(group: Group, uuid: str | None) -> None:
    """Before anything else is shared: each rank has a GPU of its own, or none has one.

    Args:
        uuid: of this rank's GPU; None: it has none.

    Raises:
        UserError: a rank has a GPU and another has none, so that they have no way to talk; or two have the same, and
            NCCL cannot have that or was not asked to.
        PeerLostError: a rank died.
    """
    if group.world_size == 1:
        return
    gpus = _tell(group, "device", uuid or "none")
    if set(gpus) == {"none"}:
        return
    shared = _may_share_gpus()
    without = [rank for rank, gpu in enumerate(gpus) if gpu == "none" or (gpu in gpus[:rank] and not shared)]
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
