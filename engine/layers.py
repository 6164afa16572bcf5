"""Scores of one long branch, with the decoder's layers walked explicitly.

Shapes: B rows, T tokens, P scored positions, D hidden size, X columns for LoRA beside D.

No autograd graph exists inside: forward is a loop that keeps what the memory plan says, backward a loop in reverse
that recomputes one layer at a time. To autograd the whole branch is a single function of the LoRA parameters, so any
loss on the scores, gradient accumulation and optimisers work unchanged. Exact: attention sees every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention import AttentionBackend, choose_backend
from engine.blocks import LayerBackward, LayerForward
from engine.head import head_logprobs
from engine.linears import compute_dtype
from engine.offload import HostPool, Kept, Transfers, slot_bytes
from engine.plan import MemoryPlan, kept_shapes
from engine.scores import check_positions, split_head
from engine.workspace import LayerActivations, Workspace
from schemas.errors import UserError

SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3")


def check_model(model: nn.Module, n_tokens: int) -> None:
    """UserError unless the walk computes exactly what this model would, for branches of n_tokens."""
    decoder, head = split_head(model)
    config: Any = decoder.config
    problem = None
    if config.model_type not in SUPPORTED_MODELS:
        problem = f"model type {config.model_type} (covered: {', '.join(SUPPORTED_MODELS)})"
    elif config.hidden_act not in ("silu", "swish"):
        problem = f"activation {config.hidden_act}"
    elif getattr(head, "bias", None) is not None or hasattr(head, "lora_A"):
        problem = "a bias or an adapter on the LM head"
    elif decoder.training and getattr(config, "attention_dropout", 0.0):
        problem = "attention dropout"
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if problem is None and window is not None and windowed and n_tokens > window:
        problem = f"sliding-window attention of {window} tokens on a branch of {n_tokens}"
    if problem is not None:
        raise UserError(f"the long-context engine does not cover {problem}", fix="use the plain scorer")


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    outside = [name for name, _ in trained if "lora_A" not in name and "lora_B" not in name]
    if outside:
        raise UserError(
            f"the long-context engine trains LoRA matrices only, not {outside[0]} ({len(outside)} such)",
            fix="freeze it, or use the plain scorer",
        )
    return [p for _, p in trained]


class _BranchWalk:
    """Forward and backward of one row without padding."""

    def __init__(
        self,
        model: nn.Module,
        input_ids_T: Tensor,
        positions_P: Tensor,
        plan: MemoryPlan,
        backend: AttentionBackend,
        pool: HostPool | None,
        chunk_positions: int,
    ) -> None:
        decoder, head = split_head(model)
        self.decoder: Any = decoder
        self.head_weight: Tensor = head.weight  # type: ignore[assignment]
        self.input_ids_T, self.positions_P = input_ids_T, positions_P
        self.plan, self.backend, self.pool, self.chunk_positions = plan, backend, pool, chunk_positions
        self.transfers = Transfers(input_ids_T.device)
        self.kept: list[LayerActivations] = []
        self.scratch, self.scratch_inputs = LayerActivations(), list[Kept]()
        self.unit_grad_PD: Tensor | None = None

    def _workspace(self) -> tuple[Any, MemoryPlan, int, Transfers, AttentionBackend]:
        return self.decoder, self.plan, self.input_ids_T.numel(), self.transfers, self.backend

    def _allocate(self, walk: Workspace, pool: HostPool) -> None:
        shapes = kept_shapes(walk.sizes, self.plan, walk.n_tokens)
        on_host = [shape.place == "host" for shape in shapes]
        pool.reserve(sum(slot_bytes(shape.n_bytes) for shape, host in zip(shapes, on_host, strict=True) if host))
        self.kept = [LayerActivations() for _ in self.plan.layers]
        for shape, host in zip(shapes, on_host, strict=True):
            dtype = walk.sum_dtype if shape.field == "lse" else walk.dtype
            size = (shape.n_rows, shape.width)
            kept = Kept(pool.take(*size, dtype) if host else torch.empty(size, dtype=dtype, device=walk.device))
            owner = self.scratch if shape.layer < 0 else self.kept[shape.layer]
            if shape.field in ("attention", "lse"):
                getattr(owner, shape.field).append(kept)
            elif shape.layer < 0:
                self.scratch_inputs.append(kept)
            else:
                setattr(owner, shape.field, kept)

    def forward(self) -> Tensor:
        """logp_P; keeps what backward needs when there is a pool."""
        walk = LayerForward(*self._workspace())
        if self.pool is not None:
            self._allocate(walk, self.pool)
        embedding: Tensor = self.decoder.embed_tokens.weight
        hidden_TD = nn.functional.embedding(self.input_ids_T.to(embedding.device), embedding)
        hidden_TD = hidden_TD.to(walk.device, walk.dtype)
        if self.kept:
            assert self.kept[0].input is not None
            self.transfers.write(self.kept[0].input, slice(None), hidden_TD)
        for index, layer in enumerate(self.decoder.layers):
            walk.load(layer)
            following = self.kept[index + 1].input if index + 1 < len(self.kept) else None
            walk.forward(hidden_TD, self.kept[index] if self.kept else None, following)
        walk.finish()
        hidden_PD = hidden_TD[self.positions_P - 1]
        del walk, hidden_TD
        logp_P, self.unit_grad_PD = head_logprobs(
            hidden_PD, self.decoder.norm, self.head_weight, self.input_ids_T[self.positions_P],
            chunk_positions=self.chunk_positions, with_grad=self.pool is not None,
        )  # fmt: skip
        return logp_P

    def backward(self, grad_P: Tensor) -> dict[int, Tensor]:
        """LoRA gradients by id of their parameter, given d(loss)/d(logp_P). Frees what forward kept."""
        if self.unit_grad_PD is None or self.pool is None:
            raise RuntimeError("backward ran already (retain_graph is not covered), or forward ran without gradients")
        walk = LayerBackward(*self._workspace())
        walk.prepare()
        grad_TX = torch.zeros(walk.n_tokens, walk.grad_width, dtype=walk.dtype, device=walk.device)
        scaled_PD = (self.unit_grad_PD * grad_P[:, None]).to(walk.dtype)
        grad_TX[:, : walk.hidden_size].index_add_(0, self.positions_P - 1, scaled_PD)
        self.unit_grad_PD = None
        grads: dict[int, Tensor] = {}
        inputs = [kept.input for kept in self.kept]
        for index in reversed(range(len(self.kept))):
            kept = self.kept[index]
            if inputs[index] is None:
                self._restore_inputs(walk, inputs, index)
            source = inputs[index]
            assert source is not None
            walk.load(self.decoder.layers[index])
            recompute_attention = not kept.attention
            if recompute_attention:
                self._restore_attention(walk, source, kept)
            below = (inputs[index - 1], self.kept[index - 1]) if index > 0 else None
            grads |= walk.backward(grad_TX, source, kept, below, qkv_filled=recompute_attention)
            if self.plan.layers[index].attention == "recompute":
                self.scratch.attention += kept.attention
                self.scratch.lse += kept.lse
            self.kept[index], inputs[index] = LayerActivations(), None
        self.kept, self.scratch, self.scratch_inputs = [], LayerActivations(), []
        self.pool.release_owner()
        return grads

    def _restore_inputs(self, walk: LayerBackward, inputs: list[Kept | None], index: int) -> None:
        """Fill the dropped inputs up to layer `index` from the nearest one kept before it."""
        start = max(i for i in range(index) if inputs[i] is not None)
        for layer in range(start, index):
            walk.load(self.decoder.layers[layer])
            source, output = inputs[layer], self.scratch_inputs[layer - start]
            assert source is not None
            if not self.kept[layer].attention:
                self._restore_attention(walk, source, self.kept[layer])
            walk.restore_output(source, self.kept[layer], output)
            inputs[layer + 1] = output

    def _restore_attention(self, walk: LayerBackward, source: Kept, kept: LayerActivations) -> None:
        """Compute a layer's attention again, into a free scratch slot."""
        n_groups = self.plan.head_groups
        kept.attention, self.scratch.attention = self.scratch.attention[:n_groups], self.scratch.attention[n_groups:]
        kept.lse, self.scratch.lse = self.scratch.lse[:n_groups], self.scratch.lse[n_groups:]
        walk.restore_attention(source, kept)


class _WalkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: _BranchWalk, *parameters: nn.Parameter) -> Tensor:
        ctx.walk, ctx.keys = walk, [id(parameter) for parameter in parameters]
        return walk.forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = ctx.walk.backward(grad_outputs[0])
        return (None, *(grads.get(key) for key in ctx.keys))


class LongContextScorer:
    """A scorer (see `engine.scores`) for long branches: `plan_for(n_tokens)` says what is kept where.

    Rows of a batch are walked one after another, without their padding. One host buffer serves all calls; a second
    branch whose backward is still due gets a buffer of its own.
    """

    def __init__(self, plan_for: Callable[[int], MemoryPlan], *, chunk_positions: int = 256) -> None:
        self._plan_for, self._chunk_positions = plan_for, chunk_positions
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

    def _free_pool(self, device: torch.device) -> HostPool:
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
            self.backend, self.probe_s = choose_backend(
                device, compute_dtype(attn.q_proj), n_tokens=n_tokens, head_size=attn.head_dim,
                n_heads=config.num_attention_heads, n_key_heads=config.num_key_value_heads,
            )  # fmt: skip
        return self.backend

    def _row(self, model: nn.Module, input_ids_T: Tensor, positions_P: Tensor) -> Tensor:
        n_tokens, device = input_ids_T.numel(), input_ids_T.device
        check_model(model, n_tokens)
        parameters = _trained_parameters(model) if torch.is_grad_enabled() else []
        pool = self._free_pool(device) if parameters else None
        backend = self.choose_backend(model, n_tokens, device)
        walk = _BranchWalk(
            model, input_ids_T, positions_P, self._plan_for(n_tokens), backend, pool,
            self._chunk_positions,
        )  # fmt: skip
        if pool is None:
            with torch.no_grad():
                return walk.forward()
        pool.lend(walk)
        return _WalkFunction.apply(walk, *parameters)  # type: ignore[return-value]

    def __call__(
        self, model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, rows_P: Tensor, positions_P: Tensor
    ) -> Tensor:
        """logp_P in nats; errors as `engine.scores.token_logprobs`, UserError for models the walk does not cover."""
        check_positions(input_ids_BT, rows_P, positions_P)
        pieces, order = [], []
        for row in rows_P.unique().tolist():
            kept_T = attention_mask_BT[row].bool()
            chosen = (rows_P == row).nonzero().flatten()
            place_T = kept_T.cumsum(0) - 1
            pieces.append(self._row(model, input_ids_BT[row][kept_T], place_T[positions_P[chosen]]))
            order.append(chosen)
        return torch.cat(pieces)[torch.cat(order).argsort()]
