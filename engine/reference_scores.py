"""Mean log-probabilities of the reference model, computed once and kept.

The reference is the same model with the adapter off. A file holds the scores of one model under one dtype,
quantisation and backend, one line a branch, keyed by the branch's tokens, scored positions and weights. Lines are
appended as they are computed, so an interrupted pass goes on where it was; each carries its own digest, so a torn or
altered line is computed again; and on every load a few scores are computed anew and compared, so a file that no longer
belongs to this model is not trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel

from artifacts.store import named
from engine.collectives import gather
from engine.data import Branch, BranchTable, collate, to_device
from engine.group import Group
from engine.health import check_scores
from engine.scores import Scorer, branch_scores
from schemas.spec import TrainSpec

BRANCHES_PER_FLUSH = 8
"""Per rank: how much work an interruption can cost."""

SPOT_CHECKS = 2
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Relative: what another thread count or kernel may change in a mean over a branch, with room."""


def branch_key(branch: Branch) -> str:
    """sha256 of what a score depends on besides the model."""
    digest = hashlib.sha256()
    for part in (branch.token_ids_T.astype(np.int32), branch.positions_P.astype(np.int64), branch.weights_P):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.hexdigest()


def file_of(spec: TrainSpec, folder: Path, kernels: str) -> Path:
    """The file of scores that belong to this model as it is loaded, and to what computed them.

    Args:
        kernels: names of the engine and of its attention, which round in their own way.
    """
    base = spec.base
    identity = [spec.model.sha256, base.dtype, base.quantization, base.backend, kernels, "adapter off"]
    return folder / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.jsonl"


def _line_digest(key: str, mean: float) -> str:
    return hashlib.sha256(f"{key} {mean!r}".encode()).hexdigest()[:16]


def read_scores(path: Path) -> dict[str, float]:
    """branch_key -> mean score (nats per scored token), without the lines that are torn, altered or not finite."""
    scores: dict[str, float] = {}
    if not path.is_file():
        return scores
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            key, mean, digest = entry["key"], float(entry["mean"]), entry["digest"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if digest == _line_digest(key, mean) and math.isfinite(mean):
            scores[key] = mean
    return scores


def _append(path: Path, scores: Mapping[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"key": k, "mean": m, "digest": _line_digest(k, m)}) for k, m in scores.items()]
    with named(path), path.open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(lines))  # the leading line break ends a line that was torn before
        file.flush()
        os.fsync(file.fileno())


@torch.no_grad()
def _compute(model: PeftModel, members: Sequence[Branch], group: Group, scorer: Scorer) -> list[float]:
    """Mean scores of the members under the base model, the members dealt to the ranks.

    Raises:
        StageError: one is not finite; names the branch. On every rank.
    """
    means_N = torch.zeros(len(members), dtype=torch.float64)
    model.eval()
    with model.disable_adapter():
        for index, branch in enumerate(members):
            if index % group.world_size == group.rank:
                batch = to_device(collate([branch]), group.device)
                means_N[index] = float(branch_scores(scorer(model, *batch[:4]), batch.weights_P)[1])
    means = gather(group, means_N).sum(0).tolist()
    check_scores({branch.branch_id: mean for branch, mean in zip(members, means, strict=True)}, "the reference model")
    return means


def reference_scores(
    spec: TrainSpec,
    model: PeftModel,
    branches: BranchTable,
    names: Sequence[str],
    group: Group,
    folder: Path,
    scorer: Scorer,
    kernels: str,
) -> dict[str, float]:
    """branch_id -> mean log-probability under the base model (nats per scored token), from the file where it has it.

    Every rank calls it with the same names; rank 0 writes. `kernels`: as in `file_of`.

    Raises:
        StageError: a score is not finite; names the branch.
        PeerLostError: another rank died.
    """
    path = file_of(spec, folder, kernels)
    keys = {name: branch_key(branches[name]) for name in names}
    known = read_scores(path)
    # one rank may read while another appends: all go by what rank 0 has read
    wanted = sorted(names, key=lambda name: (branches[name].n_tokens, name))
    found = gather(group, torch.tensor([float(keys[name] in known) for name in wanted]))[0].bool().tolist()
    kept = [name for name, there in zip(wanted, found, strict=True) if there]
    values = gather(group, torch.tensor([known.get(keys[name], 0.0) for name in kept], dtype=torch.float64))[0].tolist()
    means = dict(zip(kept, values, strict=True))
    checked = kept[:SPOT_CHECKS]  # the shortest ones: cheap, and as telling as any
    fresh = _compute(model, [branches[name] for name in checked], group, scorer)
    tolerance = TOLERANCE[spec.base.dtype]
    if not all(abs(new - means[name]) <= tolerance * abs(new) for name, new in zip(checked, fresh, strict=True)):
        print(f"{path.name}: a stored reference score is not this model's; all are computed again", flush=True)
        means = {}
        if group.rank == 0:
            path.unlink()
    missing = [name for name in wanted if name not in means]
    stride = BRANCHES_PER_FLUSH * group.world_size
    for first in range(0, len(missing), stride):
        part = missing[first : first + stride]
        computed = _compute(model, [branches[name] for name in part], group, scorer)
        if group.rank == 0:
            _append(path, {keys[name]: mean for name, mean in zip(part, computed, strict=True)})
        means |= dict(zip(part, computed, strict=True))
    if group.rank == 0:
        print(f"reference scores: {len(kept)} known, {len(missing)} computed", flush=True)
    return means
