"""The scorer for long branches: the decoder's layers walked explicitly (`engine.walk`).

Shapes: B rows, T tokens, P scored positions.

To autograd a walk is a single function of the LoRA parameters, so any loss on the scores, gradient accumulation and
optimisers work unchanged. Short rows of a batch are packed into one walk, in which none sees another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from engine.attention import AttentionBackend, fastest, probe_backends
from engine.block_attention import BlockBackends, block_backends
from engine.budget import LONG_CONTEXT_FAMILIES, window_of
from engine.linears import compute_dtype
from engine.model_config import config_problem, stored_format
from engine.offload import HostPool, numbered
from engine.plan import MemoryPlan
from engine.rope import depends_on_length
from engine.scores import check_positions, split_head
from engine.segments import WINDOW_GAP_TOKENS, one_row, packed_rows
from engine.unchanged import adapters_in_effect, layer_linears, used_tensors
from engine.walk import Sequence, Walk, WalkFunction
from schemas.errors import UserError

PACK_TOKENS = 16_384
"""Rows are packed up to so many tokens: from there on nothing of a walk's fixed work is left to save."""

PLAIN_LORA = ("Linear", "Linear4bit", "Linear8bitLt")
"""peft's LoRA layers that add B A x, scaled, to what their linear computes."""
PLAIN_LORA_FIX = "use plain LoRA, on linears of the layers"


def uncovered(config: Any, n_tokens: int, *, trains: bool) -> str | None:
    """What the walk would not compute as a model of this transformers config does; None: nothing.

    Args:
        n_tokens: of the longest branch.
    """
    window = window_of(config)
    if config.model_type not in LONG_CONTEXT_FAMILIES:
        return f"model type {config.model_type} (covered: {', '.join(LONG_CONTEXT_FAMILIES)})"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act}"
    if trains and getattr(config, "attention_dropout", 0.0):
        return f"attention dropout ({config.attention_dropout:g})"
    if problem := config_problem(config):
        return problem
    if (stored := stored_format(config)) not in ("none", "nf4", "int8"):
        return f"weights stored quantised by {stored}"
    if window is not None and n_tokens > window:
        return f"a sliding window of {window:,} tokens on a branch of {n_tokens:,}"
    return None


def _adapter_problem(model: nn.Module, decoder: nn.Module) -> tuple[str, str] | None:
    """What of the model's peft adapters the walk would compute otherwise, and what to do; None: nothing.

    The walk reads a peft layer's base layer, and beside it the LoRA matrices of the decoder's linears. So that is all
    there may be: adapters in effect are LoRA, on these linears and without a variant's own forward. Wrappers of
    `modules_to_save` and `trainable_token_indices` show the weights in effect as their own.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type != "LORA":
            return f"adapters of type {config.peft_type.value}", PLAIN_LORA_FIX
    linears: dict[Any, str] = {module: name for name, module in layer_linears(decoder)}
    tuners = [(module, name) for module, name in linears.items() if isinstance(module, BaseTunerLayer)]
    others = [(model, "")]
    while others:
        module, name = others.pop()
        if isinstance(module, BaseTunerLayer):
            tuners.append((module, name))
        elif not isinstance(module, AuxiliaryTrainingWrapper):
            others += [(child, part) for part, child in module.named_children() if child not in linears]
    for module, name in tuners:
        if module.merged and module.disable_adapters:
            return f"a disabled adapter that is still merged into {name}", "call unmerge_adapter()"
        for adapter in adapters_in_effect(module):
            if module not in linears:
                return f"an adapter on {name}", PLAIN_LORA_FIX
            if problem := _lora_problem(module, adapter):
                return f"{problem} on {name}", PLAIN_LORA_FIX
    return None


def _lora_problem(module: Any, adapter: str) -> str | None:
    """What a peft layer on a linear does beside adding B A x, scaled; None: nothing."""
    if not isinstance(module, LoraLayer) or type(module).__name__ not in PLAIN_LORA:
        return f"a peft layer {type(module).__qualname__}"
    if adapter in module.lora_variant:
        return type(module.lora_variant[adapter]).__name__
    if module.base_layer is not module.get_base_layer():
        return "several peft layers"
    return None


def check_model(model: nn.Module, n_tokens: int) -> None:
    """UserError unless the walk computes exactly what this model would, for branches of n_tokens."""
    decoder, head = split_head(model)
    problem = uncovered(decoder.config, n_tokens, trains=decoder.training)
    if problem is None and getattr(head, "bias", None) is not None:
        problem = "a bias on the LM head"
    found = (problem, 'set it to "plain" or "auto"') if problem else _adapter_problem(model, decoder)
    if found is not None:
        raise UserError(f"the long-context engine does not cover {found[0]}", where="model.engine", fix=found[1])


def _check_trained(model: nn.Module) -> None:
    """UserError when anything but LoRA matrices is trained."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if outside := [name for name in trained if "lora_A" not in name and "lora_B" not in name]:
        raise UserError(
            f"the long-context engine trains LoRA matrices only, not {outside[0]} ({len(outside)} such)",
            fix='freeze it, or set model.engine to "plain"',
        )


def packs(lengths: dict[int, int], pack_tokens: int) -> list[list[int]]:
    """Rows, in order, in packs of at most pack_tokens tokens (a longer row is a pack of its own).

    Args:
        lengths: tokens of every row, by its number.
    """
    found: list[list[int]] = []
    used = pack_tokens + 1
    for row, length in lengths.items():
        if used + length > pack_tokens:
            found.append([])
            used = 0
        found[-1].append(row)
        used += length
    return found


class LongContextScorer:
    """A scorer (see `engine.scores`) for long branches: `plan_for(n_tokens)` says what is kept where.

    Rows of a batch lose their padding; short ones are packed, the others walked one after another. Of several walks of
    one batch only the last keeps what backward needs; the others run their forward pass again in backward, so that a
    batch takes the memory of its largest walk. One host buffer serves all calls; a sequence scored by another call
    while a backward is still due gets a buffer of its own.

    Args:
        packed_plan_for: the plan of packed rows, or of a pair behind its common prefix, of so many tokens in all.
        pack_tokens: rows are packed up to so many tokens; 0: never.
        gap_tokens: the last layer computes windows around scored positions; nearer ones are one.
    """

    def __init__(
        self,
        plan_for: Callable[[int], MemoryPlan],
        *,
        packed_plan_for: Callable[[int], MemoryPlan] | None = None,
        pack_tokens: int = PACK_TOKENS,
        chunk_positions: int = 256,
        gap_tokens: int = WINDOW_GAP_TOKENS,
    ) -> None:
        self._plan_for, self._packed_plan_for = plan_for, packed_plan_for or plan_for
        self.pack_tokens, self._chunk_positions, self._gap_tokens = pack_tokens, chunk_positions, gap_tokens
        self._pools: list[HostPool] = []
        self.backend: AttentionBackend | None = None
        self.probe_s: dict[str, float] = {}

    @property
    def host_bytes(self) -> int:
        """Pinned host memory held now."""
        return sum(pool.capacity_bytes for pool in self._pools)

    def reserve_host(self, n_bytes: int, device: torch.device) -> None:
        """Pin the host buffer now (0.3 s a GiB), for the longest branch to come. StageError when the host refuses."""
        self._free_pool(device).reserve(n_bytes)

    def release_host(self) -> None:
        """Unpin the host buffers that no branch uses now; the next branch pins one again."""
        for pool in self._pools:
            if not pool.busy:
                pool.release()

    def _free_pool(self, device: torch.device) -> HostPool:
        device = numbered(device)
        for pool in self._pools:
            if not pool.busy and pool.device == device:
                break
        else:
            pool = HostPool(device)
            self._pools.append(pool)
        return pool

    def choose_backend(self, model: nn.Module, n_tokens: int, device: torch.device) -> AttentionBackend:
        """The attention backend, probed on the first call; `probe_s` then holds the seconds each one took."""
        if self.backend is None:
            decoder: Any = split_head(model)[0]
            config, attn = decoder.config, decoder.layers[0].self_attn
            self.probe_s = probe_backends(
                device, compute_dtype(attn.q_proj), n_tokens=n_tokens, head_size=attn.head_dim,
                n_heads=config.num_attention_heads, n_key_heads=config.num_key_value_heads,
            )  # fmt: skip
            self.backend = fastest(self.probe_s)
        return self.backend

    @property
    def backends(self) -> BlockBackends | None:
        """What blocks of each size take; None until a backend is chosen."""
        return block_backends(self.backend, self.probe_s) if self.backend else None

    def score(self, model: nn.Module, sequence: Sequence, *, keep: bool = True) -> Tensor:
        """logp_P in nats of the sequence's targets; UserError for models that the walk does not cover.

        keep=False: nothing is kept for backward, which runs the forward pass again.
        """
        layout, device = sequence.layout, sequence.input_ids_T.device
        decoder, head = split_head(model)
        check_model(model, max(s.first_position + s.stop - s.start for s in layout.segments))
        if not layout.is_one_row and depends_on_length(decoder):
            raise UserError(
                "rotary embeddings that depend on the length allow one branch at a time", fix='use plan "auto"'
            )
        used = {}
        if torch.is_grad_enabled():
            _check_trained(model)
            used = used_tensors(decoder, head.weight)  # type: ignore[arg-type]
        self.choose_backend(model, layout.n_tokens, device)
        assert self.backends is not None
        plan_for = self._plan_for if layout.is_one_row else self._packed_plan_for
        walk = Walk(
            model, sequence, plan_for(layout.n_tokens), self.backends,
            lambda: self._free_pool(device), chunk_positions=self._chunk_positions, gap_tokens=self._gap_tokens,
        )  # fmt: skip
        trained = [one.tensor for of_module in used.values() for one in of_module if one.trained]
        if len({id(tensor) for tensor in trained}) < len(trained):
            raise UserError(
                "the long-context engine does not cover linears that share a LoRA matrix",
                fix='set model.engine to "plain"',
            )
        if not trained:
            with torch.no_grad():
                return walk.forward(keep=False)
        return WalkFunction.apply(walk, keep, used, *trained)  # type: ignore[return-value]

    def __call__(
        self, model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, rows_P: Tensor, positions_P: Tensor
    ) -> Tensor:
        """logp_P in nats; errors as `engine.scores.token_logprobs`, UserError for models the walk does not cover."""
        check_positions(input_ids_BT, attention_mask_BT, rows_P, positions_P)
        pack_tokens = 0 if depends_on_length(split_head(model)[0]) else self.pack_tokens
        pieces, order = [], []
        kept_BT = attention_mask_BT.bool()
        place_BT, n_tokens_B = kept_BT.cumsum(1) - 1, kept_BT.sum(1).tolist()
        found = packs({row: n_tokens_B[row] for row in rows_P.unique().tolist()}, pack_tokens)
        for number, pack in enumerate(found, 1):
            before, chosen, start = [], [], 0
            for row in pack:
                chosen.append((rows_P == row).nonzero().flatten())
                before.append(place_BT[row, positions_P[chosen[-1]]] - 1 + start)
                start += n_tokens_B[row]
            lengths = [n_tokens_B[row] for row in pack]
            ids_T, before_P = torch.cat([input_ids_BT[row][kept_BT[row]] for row in pack]), torch.cat(before)
            layout = packed_rows(lengths) if len(pack) > 1 else one_row(start)
            sequence = Sequence(ids_T, layout, before_P, ids_T[before_P + 1])
            pieces.append(self.score(model, sequence, keep=number == len(found)))
            order += chosen
        return torch.cat(pieces)[torch.cat(order).argsort()]
