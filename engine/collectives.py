"""The few things ranks say to each other: two scalars a pair, one flat gradient a step, digests.

Shapes: R ranks, K values, G gradient elements of all trainable parameters, in the order of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.group import Group, PeerLostError
from schemas.errors import StageError


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
