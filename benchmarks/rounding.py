"""Which of bfloat16's roundings move the gradient: each alone, and all but each, against float32. On a CPU, minutes.

    python -m benchmarks.rounding OUT.jsonl                 # random: 24 layers of 256 features, 512 tokens
    python -m benchmarks.rounding OUT.jsonl --model FOLDER --text FILE   # a transformers folder of the Llama family

All arithmetic is float32; where a bfloat16 run would store a tensor, its value ("forward") or its gradient ("gradient")
is rounded to bfloat16. Weights are bfloat16 values from the start. LoRA of rank 16 is on all seven linears, with A and
B random.

Shapes: T tokens, D hidden size, F MLP size, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.engine_common import append_result

RANK = 16
PLACES = {
    "stream": "the residual stream, after attention and after the MLP",
    "normed": "outputs of the norms",
    "qkv": "q, k, v as projected",
    "rotated": "q, k after RoPE",
    "weights": "attention weights",
    "attended": "attention output",
    "gate_up": "gate and up",
    "gated": "silu(gate) * up",
    "head": "the normed states that the head reads",
}
Roundings = frozenset[tuple[str, str]]
EVERYTHING: Roundings = frozenset((place, way) for place in PLACES for way in ("forward", "gradient"))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: bool, gradient: bool) -> Tensor:
        ctx.gradient = gradient
        return x.bfloat16().float() if value else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grads[0].bfloat16().float() if ctx.gradient else grads[0]), None, None


class Subject(NamedTuple):
    """A model, LoRA pairs by the linear they belong to, a text, and the first position that is scored."""

    model: Any
    adapters: dict[nn.Module, tuple[Tensor, Tensor]]
    ids_T: Tensor
    first_scored: int


def _linear(subject: Subject, linear: Any, x_TI: Tensor) -> Tensor:
    a, b = subject.adapters[linear]
    return x_TI @ linear.weight.t() + 2 * ((x_TI @ a.t()) @ b.t())


def _norm(x_TD: Tensor, norm: Any) -> Tensor:
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def _rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * cos_TE[:, None] + torch.cat((-second, first), dim=-1) * sin_TE[:, None]


def run(subject: Subject, rounded: Roundings) -> tuple[Tensor, Tensor]:
    """Scores, and the gradient of their mean by all LoRA matrices as one vector."""

    def at(place: str, x: Tensor) -> Tensor:
        return _Round.apply(x, (place, "forward") in rounded, (place, "gradient") in rounded)  # type: ignore

    decoder, ids_T = subject.model.model, subject.ids_T
    n_tokens = len(ids_T)
    x_TD = decoder.embed_tokens(ids_T)
    cos_1TE, sin_1TE = decoder.rotary_emb(x_TD, torch.arange(n_tokens)[None])
    future_TT = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    for layer in decoder.layers:
        attn, mlp = layer.self_attn, layer.mlp
        normed_TD = at("normed", _norm(x_TD, layer.input_layernorm))
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        q, k, v = (at("qkv", _linear(subject, p, normed_TD)).unflatten(1, (-1, attn.head_dim)) for p in projections)
        q, k = (at("rotated", _rotate(x, cos_1TE[0], sin_1TE[0])) for x in (q, k))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores_HTT = torch.einsum("ihe,jhe->hij", q, k) * attn.scaling
        weights_HTT = at("weights", scores_HTT.masked_fill(future_TT, -torch.inf).softmax(-1))
        attended = at("attended", torch.einsum("hij,jhe->ihe", weights_HTT, v).flatten(1))
        x_TD = at("stream", x_TD + _linear(subject, attn.o_proj, attended))
        normed_TD = at("normed", _norm(x_TD, layer.post_attention_layernorm))
        gate, up = (at("gate_up", _linear(subject, p, normed_TD)) for p in (mlp.gate_proj, mlp.up_proj))
        gated_TF = at("gated", nn.functional.silu(gate) * up)
        x_TD = at("stream", x_TD + _linear(subject, mlp.down_proj, gated_TF))
    first = subject.first_scored
    normed_PD = at("head", _norm(x_TD[first - 1 : -1], decoder.norm))
    logp_P = subject.model.lm_head(normed_PD).log_softmax(-1).gather(1, ids_T[first:, None]).squeeze(1)
    parameters = [p for pair in subject.adapters.values() for p in pair]
    grads = torch.autograd.grad(logp_P.mean(), parameters)
    return logp_P.detach(), torch.cat([grad.flatten() for grad in grads]).double()


def _with_adapters(model: Any, ids_T: Tensor) -> Subject:
    model = model.bfloat16().float().requires_grad_(False)
    adapters = {}
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for linear in part.children():
                if isinstance(linear, nn.Linear):
                    n_out, n_in = linear.weight.shape
                    a = (torch.rand(RANK, n_in) * 2 - 1) / math.sqrt(n_in)
                    adapters[linear] = tuple(
                        x.bfloat16().float().requires_grad_() for x in (a, 0.01 * torch.randn(n_out, RANK))
                    )
    return Subject(model, adapters, ids_T, len(ids_T) // 2)


def random_subject(n_tokens: int) -> Subject:
    """24 layers of 256 features, with the spread that 0.02 gives at 4,096 features."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=2048, initializer_range=0.02 * math.sqrt(4096 / 256), tie_word_embeddings=False,
    )  # fmt: skip
    return _with_adapters(LlamaForCausalLM(config), torch.randint(0, 2048, (n_tokens,)))


def stored_subject(folder: Path, text: Path, n_tokens: int) -> Subject:
    """A trained model on the first tokens of a text."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"]
    return _with_adapters(model, torch.tensor(ids[:n_tokens]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text go together")
    if arguments.model is None:
        subject = random_subject(arguments.tokens)
    else:
        subject = stored_subject(arguments.model, arguments.text, arguments.tokens)
    logp_P, true = run(subject, frozenset())
    cases = {"everything": EVERYTHING}
    cases |= {f"every {way}": frozenset(x for x in EVERYTHING if x[1] == way) for way in ("forward", "gradient")}
    cases |= {f"only {place}, {way}": frozenset({(place, way)}) for place, way in sorted(EVERYTHING)}
    cases |= {f"all but {place}": frozenset(x for x in EVERYTHING if x[0] != place) for place in PLACES}
    name = arguments.model.name if arguments.model else "random"
    for case, rounded in cases.items():
        scores_P, grad = run(subject, rounded)
        cosine = float(grad @ true / (grad.norm() * true.norm()))
        append_result(
            arguments.out,
            {"model": name, "rounded": case, "one_minus_cosine": float(f"{1 - cosine:.3g}"),
             "mean_residual_nats": round(float((scores_P - logp_P).abs().mean()), 5)},
        )  # fmt: skip


if __name__ == "__main__":
    main()
