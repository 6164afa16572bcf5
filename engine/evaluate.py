"""Base, SFT, SimPO and incumbent on held-out tasks, in one process, with one base model.

nll_per_action_token  mean of -log p over all scored tokens of resolved held-out branches (nats; a long run counts more)
pair_accuracy         share of held-out pairs whose chosen branch has the strictly higher mean log-probability
mean_margin           mean of ā_c - ā_r over held-out pairs (nats per scored token), ā weighted as in training

The confidence interval of the accuracy is a bootstrap over tasks, not pairs: pairs of one task share runs.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from peft import PeftModel

from engine.data import BranchTable, Pair, collate, length_bucketed, read_pairs, to_device
from engine.group import Group, join
from engine.health import check_scores
from engine.loading import check_origin, load_adapter, load_base
from engine.out_of_memory import memory_advice
from engine.scorers import open_engine
from engine.scores import Scorer
from schemas.config import EvaluateConfig
from schemas.refs import EvaluatedModel
from schemas.reports import BucketScore, EvalReport, ModelScore
from schemas.spec import TrainSpec


class BranchScore(NamedTuple):
    """One branch under one model."""

    n_tokens: int
    nll_nats: float
    n_scored: int
    mean_logp: float


@torch.no_grad()
def score_branches(
    model: torch.nn.Module, branches: BranchTable, names: Sequence[str], budget: int, group: Group, scorer: Scorer
) -> dict[str, BranchScore]:
    """Every named branch once, in length-bucketed batches of at most `budget` padded tokens."""
    lengths_of = dict(zip(branches.column("branch_id"), branches.column("n_tokens"), strict=True))
    scores: dict[str, BranchScore] = {}
    for rows in length_bucketed([lengths_of[name] for name in names], budget):
        members = [branches[names[row]] for row in rows]
        batch = to_device(collate(members), group.device)
        logp_P = scorer(model, *batch[:4]).double()
        for row, branch in enumerate(members):
            own = batch.rows_P == row
            logp, weights = logp_P[own], batch.weights_P[own]
            mean = float((weights * logp).sum() / weights.sum())
            scores[branch.branch_id] = BranchScore(branch.n_tokens, -float(logp.sum()), len(logp), mean)
    return scores


def nll_per_token(scores: Iterable[BranchScore]) -> float | None:
    """Nats per scored token over branches; None without any."""
    scores = list(scores)
    n_scored = sum(score.n_scored for score in scores)
    return sum(score.nll_nats for score in scores) / n_scored if n_scored else None


def by_length(scores: Sequence[BranchScore], edges: Sequence[int]) -> tuple[BucketScore, ...]:
    """Scores by length bucket (0, e1], (e1, e2], ..., above the last edge; empty buckets are left out."""
    tops = [*sorted(edges), None]
    members: dict[int | None, list[BranchScore]] = defaultdict(list)
    for score in scores:
        members[next(top for top in tops if top is None or score.n_tokens <= top)].append(score)
    return tuple(
        BucketScore(max_tokens=top, n_branches=len(members[top]), nll_per_action_token=nll_per_token(members[top]))
        for top in tops
        if members[top]
    )


def bootstrap_accuracy(
    margins_by_task: Mapping[str, Sequence[float]], n_samples: int, seed: int
) -> tuple[float, float] | None:
    """95 % interval of the share of margins above zero, resampling whole tasks; None without a margin."""
    tasks = [np.asarray(margins) for _, margins in sorted(margins_by_task.items()) if len(margins)]
    if not tasks:
        return None
    wins = np.array([(margins > 0).sum() for margins in tasks])
    sizes = np.array([len(margins) for margins in tasks])
    drawn = np.random.default_rng(seed).integers(len(tasks), size=(n_samples, len(tasks)))
    shares = wins[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def model_score(
    name: EvaluatedModel,
    scores: Mapping[str, BranchScore],
    resolved: Sequence[str],
    pairs: Sequence[Pair],
    config: EvaluateConfig,
) -> ModelScore:
    """The report of one model from its branch scores."""
    margins: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        margins[pair.task_id].append(scores[pair.chosen].mean_logp - scores[pair.rejected].mean_logp)
    flat = [margin for task in margins.values() for margin in task]
    own = [scores[branch] for branch in resolved]
    return ModelScore(
        name=name,
        n_branches=len(own),
        n_pairs=len(flat),
        nll_per_action_token=nll_per_token(own),
        pair_accuracy=sum(margin > 0 for margin in flat) / len(flat) if flat else None,
        pair_accuracy_ci95=bootstrap_accuracy(margins, config.bootstrap_samples, config.seed),
        mean_margin=sum(flat) / len(flat) if flat else None,
        buckets=by_length(own, config.length_buckets),
    )


def _load_all(spec: TrainSpec, max_tokens: int, group: Group) -> torch.nn.Module:
    """The base model with every adapter of the spec beside it, in evaluation mode."""
    model: torch.nn.Module = load_base(spec.model, spec.base, group.device, max_tokens)
    for name, adapter in spec.adapters.items():
        model = load_adapter(model, adapter, spec.model, trainable=False, name=name)
    return model.eval()


def _selected(model: torch.nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    """The model as `name`: one of its adapters, or `base`, which is all adapters off."""
    if not isinstance(model, PeftModel):
        return contextlib.nullcontext()
    if name == "base":
        return model.disable_adapter()
    model.set_adapter(name)
    return contextlib.nullcontext()


def evaluate(spec: TrainSpec, config: EvaluateConfig, group: Group, scorer: Scorer | None = None) -> EvalReport:
    """Scores the base model (adapter off) and every adapter of the spec.

    An empty held-out side is not an error: the values are None and `settings` says so.

    Raises:
        UserError: an adapter of another model.
        StageError: a log-probability is not finite; names the branch.
    """
    started = time.monotonic()
    branches = BranchTable(spec.branches)
    columns = (branches.column(name) for name in ("branch_id", "task_id", "split", "outcome"))
    heldout = [(name, task, outcome) for name, task, split, outcome in zip(*columns, strict=True) if split == "heldout"]
    resolved = [name for name, _, outcome in heldout if outcome == "resolved"]
    pairs = read_pairs(spec.pairs, "heldout", branches) if spec.pairs else []
    names = sorted({*resolved, *(name for pair in pairs for name in (pair.chosen, pair.rejected))})
    for adapter in spec.adapters.values():
        check_origin(adapter, spec.model)

    counts = (branches.column(name) for name in ("branch_id", "n_tokens", "n_scored"))
    lengths = {name: (tokens, scored) for name, tokens, scored in zip(*counts, strict=True)}
    n_tokens, n_scored = (sum(lengths[name][place] for name in names) for place in (0, 1))
    engine = model = None
    if names:
        engine = open_engine(spec, branches, names, group, optimizer=None, accumulating=False)
        with memory_advice(engine, group):
            model = _load_all(spec, engine.longest_tokens, group)
    join(group)
    if model is not None and engine is not None:
        engine.agree_on_attention(model, group)
    found: list[ModelScore] = []
    for name in ("base", *spec.adapters):
        scores: dict[str, BranchScore] = {}
        if model is not None and engine is not None:
            with _selected(model, name), memory_advice(engine, group):
                budget = config.tokens_per_micro_batch
                scores = score_branches(model, branches, names, budget, group, scorer or engine.scorer)
            check_scores({branch: -score.nll_nats for branch, score in scores.items()}, f"model {name}")
        result = model_score(cast("EvaluatedModel", name), scores, resolved, pairs, config)
        print(
            f"evaluate {name}: nll {result.nll_per_action_token}, pair accuracy {result.pair_accuracy}, "
            f"margin {result.mean_margin} ({len(resolved)} resolved branches, {len(pairs)} pairs)",
            flush=True,
        )
        found.append(result)
    note = (
        engine.settings(model)
        if engine
        else {"heldout": "empty: no held-out resolved run and no held-out pair, so nothing was scored"}
    )
    return EvalReport(
        models=tuple(found),
        n_heldout_tasks=len({task for _, task, _ in heldout}),
        n_tokens_seen=len(found) * n_tokens,
        n_tokens_scored=len(found) * n_scored,
        wall_s=time.monotonic() - started,
        settings={"device": str(group.device), "dtype": spec.base.dtype, "torch": torch.__version__} | note,
    )
