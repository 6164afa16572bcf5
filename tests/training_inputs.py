"""Small training inputs made by tests: a model folder, branches and pairs on made-up tasks with something to learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from artifacts.store import payload_digest
from artifacts.tables import write_table
from engine.loading import load_adapter, load_base, new_adapter, save_adapter
from schemas.config import LoraConfig, ModelConfig
from schemas.refs import Kind, Ref
from schemas.reports import Paired, PairReport
from schemas.spec import TrainSpec
from schemas.tables import BRANCHES, PAIRS, SPAN_KINDS
from schemas.training import SimpoConfig

VOCABULARY = 64
ACTION, OBSERVATION, PROMPT, TURN_END = (SPAN_KINDS.index(n) for n in ("action", "observation", "prompt", "turn_end"))


def ref_of(path: Path, kind: Kind, n_rows: int | None = None) -> Ref:
    sha256, n_bytes = payload_digest(path)
    return Ref(kind=kind, path=str(path), sha256=sha256, n_bytes=n_bytes, n_rows=n_rows)


def float64_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Qwen3RMSNorm.forward in the input's own precision, for tests that tell 1e-9 from 1e-8.

    transformers computes it in float32 whatever the model's dtype, so that two exact ways to the same gradient of a
    float64 model differ by 1e-8 as soon as they sum in another order.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (wide * scale).to(hidden.dtype)


def make_model(folder: Path, seed: int = 0, hidden_size: int = 32, head_size: int = 8) -> Ref:
    """A random 2-layer Qwen3 with a word-level tokenizer, as a model folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return ref_of(folder, "model")


def useful_operations(n_tokens: int, seen: float, n_scored: int) -> float:
    """What one pass through the default model and back has to compute once: 2 x 2 W T, 3 x 4 L H E of the pairs of
    tokens that are seen, 2 x 2 D V P (`engine.cost`).
    """
    hidden, query, key, mlp, n_layers = 32, 4 * 8, 2 * 8, 64, 2
    linears = n_layers * hidden * (2 * query + 2 * key + 3 * mlp)
    return 4 * linears * n_tokens + 12 * n_layers * query * seen + 4 * hidden * VOCABULARY * n_scored


def branch_row(
    branch_id: str, task: str, outcome: str, n_turns: int, seed: int, *, split: str = "train", weight: float = 1.0
) -> dict[str, Any]:
    """A run of turns (observation, action, turn end). Good actions count up from 10, bad ones down from 60."""
    draw = np.random.default_rng(seed)
    tokens: list[int] = draw.integers(3, VOCABULARY, 5).tolist()
    spans = [{"start": 0, "end": 5, "kind": PROMPT, "message": 0, "weight": 0.0}]
    for turn in range(n_turns):
        for kind, length in (
            (OBSERVATION, int(draw.integers(3, 12))),
            (ACTION, int(draw.integers(2, 6))),
            (TURN_END, 1),
        ):
            start = len(tokens)
            if kind == ACTION:
                run = range(10, 10 + length) if outcome == "resolved" else range(60, 60 - length, -1)
                tokens += list(run)
            elif kind == TURN_END:
                tokens.append(1)
            else:
                tokens += draw.integers(3, VOCABULARY, length).tolist()
            scored = 0.0 if kind == OBSERVATION else weight
            spans.append({"start": start, "end": len(tokens), "kind": kind, "message": turn + 1, "weight": scored})
    return {
        "branch_id": branch_id,
        "trajectory_id": branch_id,
        "task_id": task,
        "split": split,
        "outcome": outcome,
        "score": 1.0 if outcome == "resolved" else 0.0,
        "token_ids": tokens,
        "spans": spans,
        "n_tokens": len(tokens),
        "n_scored": sum(span["end"] - span["start"] for span in spans if span["weight"] > 0),
        "has_reasoning": False,
        "opening_sha256": "0" * 64,
    }


def pair_row(pair_id: str, chosen: dict[str, Any], rejected: dict[str, Any], weight: float = 1.0) -> dict[str, Any]:
    return {
        "pair_id": pair_id,
        "rule": "outcome",
        "task_id": chosen["task_id"],
        "split": chosen["split"],
        "chosen_branch_id": chosen["branch_id"],
        "rejected_branch_id": rejected["branch_id"],
        "n_shared_prefix": 0,
        "chosen_n_tokens": chosen["n_tokens"],
        "rejected_n_tokens": rejected["n_tokens"],
        "chosen_n_scored": chosen["n_scored"],
        "rejected_n_scored": rejected["n_scored"],
        "weight": weight,
    }


def behind_prefix(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The run, continuing from where the other has all but its last turn behind it."""
    n_spans = len(other["spans"]) - 3  # three spans a turn
    shift = other["spans"][n_spans - 1]["end"]
    own = [s | {"start": s["start"] + shift, "end": s["end"] + shift} for s in row["spans"]]
    tokens = other["token_ids"][:shift] + row["token_ids"]
    n_scored = row["n_scored"] + sum(s["end"] - s["start"] for s in other["spans"][:n_spans] if s["weight"] > 0)
    spans = other["spans"][:n_spans] + own
    return row | {"token_ids": tokens, "spans": spans, "n_tokens": len(tokens), "n_scored": n_scored}


def make_tables(
    folder: Path,
    n_pairs: int = 8,
    n_heldout: int = 4,
    weights: Sequence[float] = (1.0,),
    *,
    shared_prefix: bool = False,
) -> tuple[Ref, Paired]:
    """branches.arrow and pairs.arrow: one pair a task, of very different lengths (1 to 24 turns).

    With `shared_prefix` the failed run of every second task is a short one that goes on from the resolved one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, pairs = [], []
    for task in range(n_pairs + n_heldout):
        split = "train" if task < n_pairs else "heldout"
        turns = 1 + (task * 7) % 24, 1 + (task * 11 + 5) % 24
        if shared_prefix and task % 2:
            turns = turns[0], 1 + task % 3
        good = branch_row(f"good-{task}", f"task-{task}", "resolved", turns[0], 2 * task, split=split)
        bad = branch_row(f"bad-{task}", f"task-{task}", "failed", turns[1], 2 * task + 1, split=split)
        if shared_prefix and task % 2:
            bad = behind_prefix(bad, good)
        rows += [good, bad]
        pairs.append(pair_row(f"pair-{task}", good, bad, weights[task % len(weights)]))
    write_table(folder / "branches.arrow", BRANCHES, rows)
    write_table(folder / "pairs.arrow", PAIRS, pairs)
    report = PairReport(
        n_pairs=len(pairs),
        by_rule={"outcome": len(pairs)},
        by_split={"train": n_pairs, "heldout": n_heldout},
        n_tasks_with_pairs=len(pairs),
    )
    paired = Paired(pairs=ref_of(folder / "pairs.arrow", "pairs", len(pairs)), report=report)
    return ref_of(folder / "branches.arrow", "branches", len(rows)), paired


def make_adapter(folder: Path, model: Ref, *, seed: int = 5, dtype: str = "float64", dropout: float = 0.0) -> Ref:
    """A LoRA whose B is not zero, stored as the training stages store theirs."""
    base = load_base(model, ModelConfig(name="tiny", dtype=dtype), torch.device("cpu"), 4096)  # type: ignore[arg-type]
    adapter = new_adapter(base, LoraConfig(r=4, alpha=8.0, dropout=dropout), seed)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    save_adapter(adapter, folder, base_name="tiny", model_sha256=model.sha256, stage="sft")
    return ref_of(folder, "adapter")


def simpo_spec(folder: Path, config: SimpoConfig, *, dropout: float = 0.0, **tables: Any) -> TrainSpec:
    """A float64 SimPO run on fresh tables in `folder`."""
    model = make_model(folder / "model")
    branches, paired = make_tables(folder, **tables)
    return TrainSpec(
        stage="simpo",
        branches=(branches,),
        pairs=paired.pairs,
        model=model,
        base=ModelConfig(name="tiny", dtype="float64"),
        adapters={"start": make_adapter(folder / "start", model, dropout=dropout)},
        simpo=config,
    )


def start_model(spec: TrainSpec) -> PeftModel:
    """What training by the spec starts from."""
    base = load_base(spec.model, spec.base, torch.device("cpu"), 4096)
    return load_adapter(base, spec.adapters["start"], spec.model, trainable=True)
