"""Preference optimisation on pairs of whole runs: set-up, the checks before step 1, the run, its report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import PrinterCallback, TrainerState, TrainingArguments

from engine import losses
from engine.agreement import compare_inputs, compare_plans
from engine.budget import window_of
from engine.checkpoints import Checkpoints, resumed_step, start_from
from engine.cost import cost_model
from engine.data import BranchTable, Pair, read_pairs
from engine.deal import describe
from engine.group import Group, join
from engine.health import EarlyStop
from engine.loading import load_adapter, load_base, save_adapter
from engine.out_of_memory import memory_advice
from engine.preference_trainer import Pairs, PreferenceTrainer
from engine.reference_scores import reference_scores
from engine.rope import depends_on_length
from engine.schedule import training_windows
from engine.scorers import Engine, open_engine
from engine.scores import Scorer, split_head
from engine.session import (
    StepPrinter,
    Stop,
    curve,
    first_and_last_loss,
    peak_memory,
    trainer_settings,
)
from engine.start_scores import branch_logprobs, branch_names, mean_margin, pairs_to_score, start_logprobs
from engine.trackers import check_trackers, tracker_callbacks
from schemas.errors import UserError
from schemas.reports import TrainReport
from schemas.spec import TrainSpec
from schemas.training import SimpoConfig

MAX_PACKED_TOKENS = 16_384
"""On a GPU, in the plain engine: the longest pass over both tails of a pair; its block mask grows with the square."""


def constants_of(config: SimpoConfig) -> dict[str, float]:
    """The constants of the configured loss, by the names of its arguments."""
    constants = {"beta": config.beta}
    if config.loss == "simpo":
        constants |= {"gamma": config.resolved_gamma, "cpo_alpha": config.cpo_alpha}
    if config.loss == "dpo":
        constants["label_smoothing"] = config.label_smoothing
    return constants


def loss_of(config: SimpoConfig) -> losses.PairLossFunction:
    """The configured loss with its own constants."""
    return partial(getattr(losses, config.loss), **constants_of(config))


def _pairs_per_step(windows: Sequence[Sequence[int]]) -> str:
    sizes = [len(window) for window in windows]
    return f"{min(sizes)} to {max(sizes)}"


def _max_packed_tokens(config: SimpoConfig, engine: Engine, base: Any, dropout: float, group: Group) -> int:
    """The longest shared-prefix pass, in packed tokens; 0 where it is not offered.

    Raises:
        UserError: the plan is shared_prefix, and the model, engine or adapter does not allow it.
    """
    problem = None
    if dropout > 0:
        problem = "under dropout the two branches of a pair draw different masks over their common prefix"
    elif window_of(base.config) is not None:
        problem = "the model attends within a sliding window"
    elif depends_on_length(split_head(base)[0]):
        problem = "the model's rotary embeddings depend on the length of what a token stands in"
    if problem is None and engine.name == "long_context":
        return engine.longest_pair()
    if problem is None:
        return MAX_PACKED_TOKENS if group.device.type == "cuda" else 2**31
    if config.plan == "shared_prefix":
        raise UserError(f"plan shared_prefix is not possible: {problem}", where="simpo.plan", fix='use "auto"')
    return 0


def train(
    spec: TrainSpec, config: SimpoConfig, group: Group, out: Path, stop: Stop, scorer: Scorer | None = None
) -> TrainReport:
    """Trains from the adapter `start` into `out/adapter`, resuming from the newest whole checkpoint in `out`.

    Every rank calls it with the same spec; only rank 0 writes.

    Args:
        scorer: None: that of the engine which the config asks for.

    Raises:
        UserError: no training pair, a branch that does not fit, an adapter of another model, or an odd number of ranks
            for plan parallel.
        StageError: a score, loss or gradient is not finite (names the pair), the ranks differ (names the tensor), a
            checkpoint could not be written, or a signal asked to stop (after a checkpoint was saved).
        PeerLostError: another rank died.
    """
    if config.plan == "parallel" and group.world_size % 2:
        raise UserError(
            f"plan parallel needs an even number of ranks, and {group.world_size} were started",
            where="simpo.plan",
            fix="start an even number (simpo.n_processes, or --nproc-per-node by hand), or take another plan",
        )
    check_trackers(config.trackers)
    branches = BranchTable(spec.branches)
    rows = read_pairs(spec.pairs, "train", branches) if spec.pairs else []
    if not rows:
        raise UserError("no pair is in the train split", where="simpo", fix="see the pair report for what was refused")
    engine = open_engine(spec, branches, branch_names(rows), group, optimizer=config.optimizer, accumulating=True)
    with memory_advice(engine, group) as watched:
        trainer = _load(spec, config, group, out, stop, engine, scorer or engine.scorer, branches, rows)
        watched.trainer = trainer
        checkpoint = start_from(out, spec.digest(), group)
        if checkpoint is not None:
            trainer.meter.restore(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).log_history)
        windows = trainer.windows
        dealt = [trainer.deal_of(window) for window in windows]
        compare_plans(group, dealt, checkpoint)
        compared, with_kl = pairs_to_score(rows, windows, config)
        score = partial(
            branch_logprobs, trainer.policy, branches, group=group, scorer=trainer.scorer, cost=trainer.cost
        )
        path = out / "start_logprobs.json"
        trainer.start_logps = start_logprobs(path, checkpoint is not None, with_kl, branches, group, score)
        first_margin = mean_margin(trainer.start_logps, branches, compared)
        plan_text = f"{config.plan}: {describe(dealt)}"
        early_stop = EarlyStop(config.early_stop)
        trainer.add_callback(early_stop)
        trainer.add_callback(Checkpoints(group, trainer.policy, out, config.save_steps, stop, run=spec.digest()))
        if group.rank == 0:
            for callback in (StepPrinter(), *tracker_callbacks(spec, config.trackers)):
                trainer.add_callback(callback)
            print(
                f"{config.loss}: {len(rows)} pairs, {len(windows)} steps of {_pairs_per_step(windows)} pairs, "
                f"{group.world_size} process(es) ({group.backend}), "
                f"{', '.join(f'{name} {value:g}' for name, value in constants_of(config).items())}, "
                f"margin before step 1 {first_margin:.4f}\n"
                f"plan {plan_text}\nengine {engine.name}: {engine.why}",
                flush=True,
            )
        trainer.meter.start()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        stop.end(group, trainer.state.global_step)
        margins = first_margin, mean_margin(score(branch_names(compared)), branches, compared)
    if group.rank == 0:
        origin = {"base_name": spec.base.name, "model_sha256": spec.model.sha256, "stage": "simpo"}
        save_adapter(trainer.policy, out / "adapter", **origin)
    return _report(spec, config, trainer, engine, margins, plan_text, early_stop.reason, resumed_step(checkpoint))


def _load(
    spec: TrainSpec,
    config: SimpoConfig,
    group: Group,
    out: Path,
    stop: Stop,
    engine: Engine,
    scorer: Scorer,
    branches: BranchTable,
    rows: list[Pair],
) -> PreferenceTrainer:
    """Model, adapter and reference scores, in a trainer without callbacks; the ranks have met when it returns."""
    base = load_base(spec.model, spec.base, group.device, engine.longest_tokens)
    model = load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
    join(group)
    engine.agree_on_attention(model, group)
    windows = training_windows(config, len(rows))
    compare_inputs(group, spec, model, rows, windows)
    checkpointing = engine.name == "plain" and group.device.type == "cuda"
    walked = engine.name == "long_context"
    cost = cost_model(base.config.to_dict(), recomputes=checkpointing or walked, in_blocks=walked)
    kind = losses.LOSSES[config.loss]
    references: dict[str, float] = {}
    if kind.needs_reference:
        folder = Path(spec.reference_folder or out)
        kernels = f"{engine.name}, {engine.attention(base)}"
        references = reference_scores(spec, model, branches, branch_names(rows), group, folder, scorer, kernels)
    pairs = Pairs(rows, branches, loss_of(config), kind, references)
    dropout = float(model.peft_config["default"].lora_dropout)  # type: ignore[attr-defined]
    max_packed_tokens = _max_packed_tokens(config, engine, base, dropout, group)
    shares = walked and config.plan in ("auto", "shared_prefix")
    packed = [pairs.packed_tokens(index) for index in range(len(pairs))] if shares else []
    engine.pin_host(group.device, max((n for n in packed if n <= max_packed_tokens), default=0))
    settings = trainer_settings(
        out,
        config.optimizer,
        epochs=1,  # of the Trainer's: all windows of all our epochs
        steps_per_epoch=len(windows),
        accumulation=1,
        seed=config.seed,
        device=group.device,
        checkpointing=checkpointing,
        trackers=config.trackers if group.rank == 0 else (),
    )
    trainer = PreferenceTrainer(
        model=model,
        pairs=pairs,
        windows=windows,
        cost=cost,
        max_packed_tokens=max_packed_tokens,
        plan=config.plan,
        balanced=config.balanced,
        group=group,
        scorer=scorer,
        stop=stop,
        args=TrainingArguments(**settings),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _report(
    spec: TrainSpec,
    config: SimpoConfig,
    trainer: PreferenceTrainer,
    engine: Engine,
    margins: tuple[float, float],
    plan_text: str,
    stopped_early: str | None,
    resumed_from_step: int,
) -> TrainReport:
    group, windows = trainer.group, trainer.windows
    points = curve(trainer.state.log_history)
    first_loss, last_loss = first_and_last_loss(points)
    idle = [point.idle_share for point in points if point.idle_share is not None]
    return TrainReport(
        stage="simpo",
        n_examples=len(trainer.pairs),
        n_steps=trainer.state.global_step,
        n_tokens_seen=trainer.meter.tokens_seen,
        n_tokens_scored=trainer.meter.tokens_scored,
        padding_share=0.0,
        first_loss=first_loss,
        last_loss=last_loss,
        first_margin=margins[0],
        last_margin=margins[1],
        wall_s=trainer.meter.train_s,
        world_size=group.world_size,
        backend=group.backend,
        plan=plan_text,
        **peak_memory(trainer.meter.peaks),  # type: ignore[arg-type]
        idle_share=sum(idle) / len(idle) if idle else None,
        stopped_early=stopped_early,
        resumed_from_step=resumed_from_step,
        settings=engine.settings(trainer.policy)
        | {
            "device": str(group.device),
            "dtype": spec.base.dtype,
            "optimizer": config.optimizer.optimizer,
            "loss": config.loss,
            "reference": "base model" if losses.LOSSES[config.loss].needs_reference else "none",
            **{name: f"{value:g}" for name, value in constants_of(config).items()},
            "pairs_per_step": _pairs_per_step(windows),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        curve=points,
    )
