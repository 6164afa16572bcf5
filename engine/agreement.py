"""What all ranks must have in common before they work on the same pairs: compared by digests, before step 1."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoints import content_of
from engine.collectives import compare_digests, gather_objects, tensor_digest
from engine.data import Pair
from engine.deal import Deal
from engine.group import Group
from engine.loading import trainable_parameters
from schemas.errors import UserError
from schemas.spec import TrainSpec

_WHEN = "before step 1"


def _frozen_sample(model: Any) -> str:
    """sha256 over up to 4,096 evenly spread elements of every frozen tensor: catches another base model."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            digest.update(f"{name}{tensor_digest(flat[:: max(1, flat.numel() // 4096)])}".encode())
    return digest.hexdigest()


def _text_digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def compare_inputs(
    group: Group, spec: TrainSpec, model: Any, pairs: Sequence[Pair], windows: Sequence[Sequence[int]]
) -> None:
    """Spec, base model, adapter and order of pairs; before anything is scored, since scores are kept.

    Raises:
        StageError: they differ; names the tensor, or what else it is.
        PeerLostError: a rank died.
    """
    order = [[pairs[index].pair_id for index in window] for window in windows]
    digests = {
        "the run spec": spec.digest(),
        "the order of pairs": _text_digest(order),
        "the base model": _frozen_sample(model),
    }
    adapter = {name: tensor_digest(parameter) for name, parameter in trainable_parameters(model).items()}
    compare_digests(group, digests | adapter, _WHEN)


def compare_plans(group: Group, dealt: Sequence[Deal], checkpoint: Path | None) -> None:
    """Who works on which branch, and what training goes on from: the checkpoint's content, not its name.

    Raises:
        UserError: a rank's folder holds another checkpoint: it is a node's own.
        StageError: the plans differ.
        PeerLostError: a rank died.
    """
    compare_digests(group, {"who works on which branch": _text_digest(dealt)}, _WHEN)
    names = gather_objects(group, checkpoint.name if checkpoint else "no checkpoint")
    contents = gather_objects(group, content_of(checkpoint) if checkpoint else "")
    for rank, (name, content) in enumerate(zip(names, contents, strict=True)):
        if content != contents[0]:
            another = name if name != names[0] else f"another {name}"
            raise UserError(
                f"rank 0 would go on from {names[0]}, rank {rank} from {another}",
                where="the folder of spec.json",
                fix="let all nodes share one, or copy what lies in that of rank 0 to the others",
            )
