"""Predicted work of a branch: what the dealing of branches to ranks goes by. Imports no torch.

Letters: T tokens, P scored positions, L layers, W weights of the decoder's linears, H*E query heads times head size,
D hidden size, V vocabulary. Units: floating-point operations (a multiply-add is two). LoRA's own share is left out.

    linears    2 W T
    attention  2 L H E T^2      causal, QK and PV over half the square; its backward 2.5 times that: QK again, and four
                                products for the gradients
    head       2 D V P          forward; again, and once more for the gradient, in backward
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.memory import Setup, dimensions

ATTENTION_BACKWARD, ATTENTION_AGAIN = 2.5, 0.5


class BranchCost(NamedTuple):
    """Operations of one branch's forward and backward pass."""

    forward: float
    backward: float
    wasted: float = 0.0
    """Of both: what is computed again in backward, and what a mask throws away."""

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def useful(self) -> float:
        return self.total - self.wasted


class CostModel(NamedTuple):
    """Sizes of a model, and what its engine computes twice."""

    n_layers: int
    hidden_size: int
    query_size: int
    vocab_size: int
    n_linear_weights: int
    recomputes: bool
    """Whether backward repeats the forward's linears (layer checkpointing, or the long-context walk)."""
    in_blocks: bool = False
    """Whether a pass over both tails of a pair computes visible pairs of tokens only (the long-context walk)."""

    def branch(self, n_tokens: int, n_scored: int) -> BranchCost:
        """One branch on its own."""
        return self._cost(n_tokens, n_tokens * n_tokens / 2, n_scored)

    def packed(self, n_prefix: int, n_chosen_tail: int, n_rejected_tail: int, n_scored: int) -> BranchCost:
        """Prefix and both tails in one pass; under a dense block mask no part of the square is saved."""
        n_tokens, n_chosen = n_prefix + n_chosen_tail + n_rejected_tail, n_prefix + n_chosen_tail
        seen = n_chosen * n_chosen / 2 + n_rejected_tail * (n_prefix + n_rejected_tail / 2)
        return self._cost(n_tokens, seen, n_scored, masked=0.0 if self.in_blocks else n_tokens * n_tokens - seen)

    def _cost(self, n_tokens: int, seen: float, n_scored: int, masked: float = 0.0) -> BranchCost:
        """`seen` and `masked`: pairs of tokens that attention computes, those that count and those that do not."""
        linears = 2.0 * self.n_linear_weights * n_tokens
        per_pair = 4.0 * self.n_layers * self.query_size
        attention = per_pair * (seen + masked)
        head = 2.0 * self.hidden_size * self.vocab_size * n_scored
        again = linears if self.recomputes else 0.0
        return BranchCost(
            forward=linears + attention + head,
            backward=linears + ATTENTION_BACKWARD * attention + 2 * head + again,
            wasted=again + head + per_pair * (ATTENTION_AGAIN * seen + (1 + ATTENTION_BACKWARD) * masked),
        )


def cost_model(config: Mapping[str, Any], *, recomputes: bool, in_blocks: bool = False) -> CostModel:
    """The cost model of a transformers config (as a dict) of the Llama, Mistral, Qwen2 or Qwen3 family."""
    sizes = dimensions(config, Setup(base="fp32", align=1))
    per_layer = sizes.hidden_size * (sizes.qkv_size + sizes.query_size + 3 * sizes.mlp_size)
    return CostModel(
        n_layers=sizes.n_layers,
        hidden_size=sizes.hidden_size,
        query_size=sizes.query_size,
        vocab_size=sizes.vocab_size,
        n_linear_weights=sizes.n_layers * per_layer,
        recomputes=recomputes,
        in_blocks=in_blocks,
    )
