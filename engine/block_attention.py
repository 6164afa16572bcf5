"""Attention over blocks of queries and keys, merged exactly; one causal block goes to its backend as it is.

Shapes: T tokens, Q query rows (T, or those of some windows), N rows of one block, M keys of one block, H query heads,
K key-value heads, E head size.

A query's output over several key blocks is the sum of each block's output, weighted by exp(its log-sum-exp minus that
of all blocks together) (Dao et al. 2022, section 3.1). Backward needs no merging: a flash backward makes the weights
exp(score - lse) and rowsum(out * grad_out) from the lse and out that it is given, so with those of all blocks together
each block yields its exact part of dq, dk and dv; the parts are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import BACKENDS, AttentionBackend
from engine.kernels import wide
from engine.moments import SUM_ROWS
from engine.segments import Queries, QueryBlock

LARGE_BLOCK = 2**26
"""Query-key pairs from which on cuDNN's faster kernels are worth the graph it builds for each new shape, which branches
and tails nearly always have: a step of an 8B model saves 0.02 s by them on 4,096 tokens, 0.09 on 8,192, a graph takes
0.12 or more (docs/ENGINE.md).
"""


class BlockBackends(NamedTuple):
    """Backends for large and for small blocks."""

    large: AttentionBackend
    small: AttentionBackend

    def of(self, n_queries: int, n_keys: int) -> AttentionBackend:
        return self.large if n_queries * n_keys >= LARGE_BLOCK else self.small

    @property
    def names(self) -> str:
        """For reports."""
        if self.large == self.small:
            return self.large.name
        return f"{self.large.name}, {self.small.name} under {math.isqrt(LARGE_BLOCK):,} x {math.isqrt(LARGE_BLOCK):,}"


def block_backends(chosen: AttentionBackend, probe_s: Mapping[str, float] | None = None) -> BlockBackends:
    """Where cuDNN was chosen, which compiles for every new pair of lengths, small blocks go to PyTorch's flash.

    Args:
        probe_s: seconds that each backend took here, if known (`engine.attention.probe_backends`); flash may refuse.
    """
    flash_s = (probe_s or {}).get("flash", 0.0)
    return BlockBackends(chosen, BACKENDS["flash"] if chosen.name == "cudnn" and flash_s < math.inf else chosen)


def _rows(block: QueryBlock) -> slice:
    """Where its results are."""
    return slice(block.row, block.row + block.stop - block.start)


def _is_one_block(queries: Queries) -> bool:
    return len(queries.blocks) == 1 and len(queries.blocks[0].keys) == 1 and queries.windows is None


def _sum(terms_NHE: list[Tensor], weights_PNH1: Tensor | None) -> Tensor:
    """In float32 (float64)."""
    if weights_PNH1 is None:
        return sum(map(wide, terms_NHE[1:]), wide(terms_NHE[0]))
    total_NHE = wide(terms_NHE[0]) * weights_PNH1[0]
    for term_NHE, weight_NH1 in zip(terms_NHE[1:], weights_PNH1[1:], strict=True):
        total_NHE.addcmul_(wide(term_NHE), weight_NH1)
    return total_NHE


def _add(out_NHE: Tensor, parts_NHE: list[Tensor], weights_PNH1: Tensor | None = None) -> None:
    """out becomes the sum of out and parts (times weights, out's first), a few rows at a time (`SUM_ROWS`)."""
    for start in range(0, out_NHE.shape[0], SUM_ROWS):
        rows = slice(start, start + SUM_ROWS)
        weights = None if weights_PNH1 is None else weights_PNH1[:, rows]
        out_NHE[rows] = _sum([x_NHE[rows] for x_NHE in (out_NHE, *parts_NHE)], weights)


def _merge(out_NHE: Tensor, lse_HN: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Results over some keys become those over these and the parts' keys, in place."""
    lse_PHN = torch.stack([lse_HN, *(lse_HN for _, lse_HN in parts)])
    torch.logsumexp(lse_PHN, 0, out=lse_HN)
    weights_PNH1 = lse_PHN.sub_(lse_HN).exp_().transpose(1, 2)[..., None]
    _add(out_NHE, [part_NHE for part_NHE, _ in parts], weights_PNH1)


def forward(
    backends: BlockBackends, queries: Queries, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_QHE, lse_HQ) of the query rows."""
    if _is_one_block(queries):
        return backends.of(queries.n_rows, queries.n_rows).forward(q_THE, k_TKE, v_TKE, scale, True)
    n_heads = q_THE.shape[1]
    out_QHE = torch.empty(queries.n_rows, *q_THE.shape[1:], dtype=q_THE.dtype, device=q_THE.device)
    lse_HQ = torch.empty(n_heads, queries.n_rows, dtype=wide(q_THE[:0]).dtype, device=q_THE.device)
    for block in queries.blocks:
        q_NHE, rows, parts = q_THE[block.start : block.stop], _rows(block), []
        for index, keys in enumerate(block.keys):
            span = slice(keys.start, keys.stop)
            backend = backends.of(block.stop - block.start, keys.stop - keys.start)
            part = backend.forward(q_NHE, k_TKE[span], v_TKE[span], scale, keys.causal)
            if index == 0:
                out_QHE[rows], lse_HQ[:, rows] = part
            else:
                parts.append(part)
            del part  # or the first one would be held beside the second
        if parts:
            _merge(out_QHE[rows], lse_HQ[:, rows], parts)
    return out_QHE, lse_HQ


def backward(
    backends: BlockBackends,
    queries: Queries,
    grad_out_QHE: Tensor,
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    out_QHE: Tensor,
    lse_HQ: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_q_THE, grad_k_TKE, grad_v_TKE); zero for tokens that are no query. dk and dv may be float32."""
    if _is_one_block(queries):
        backend = backends.of(queries.n_rows, queries.n_rows)
        return backend.backward(grad_out_QHE, q_THE, k_TKE, v_TKE, out_QHE, lse_HQ, scale, True)
    grad_q_THE = torch.zeros(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    grad_k_TKE, grad_v_TKE = (
        torch.zeros(x.shape, dtype=wide(x[:0]).dtype, device=x.device) for x in (k_TKE, v_TKE)
    )  # fmt: skip
    for block in queries.blocks:
        rows, parts_NHE = _rows(block), []
        out_NHE, lse_HN = out_QHE[rows], lse_HQ[:, rows].contiguous()
        grad_q_NHE = grad_q_THE[block.start : block.stop]
        for index, keys in enumerate(block.keys):
            span = slice(keys.start, keys.stop)
            backend = backends.of(block.stop - block.start, keys.stop - keys.start)
            part_NHE, part_k_MKE, part_v_MKE = backend.backward(
                grad_out_QHE[rows], q_THE[block.start : block.stop], k_TKE[span], v_TKE[span], out_NHE, lse_HN, scale,
                keys.causal,
            )  # fmt: skip
            grad_k_TKE[span] += part_k_MKE
            grad_v_TKE[span] += part_v_MKE
            if index == 0:
                grad_q_NHE.copy_(part_NHE)
            else:
                parts_NHE.append(part_NHE)
            del part_NHE, part_k_MKE, part_v_MKE  # as in forward
        if parts_NHE:
            _add(grad_q_NHE, parts_NHE)
    return grad_q_THE, grad_k_TKE, grad_v_TKE
