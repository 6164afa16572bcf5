"""Device bytes that attention takes beside its inputs and results. Imports no torch: the ledger counts with it.

Sizes: tokens are queries and keys of one causal block, heads those of one group.
"""

from __future__ import annotations

_MATH_ROWS = 512
_MATH_BLOCK_BYTES = 2**29


def attention_workspace_bytes(
    n_tokens: int, n_heads: int, n_key_heads: int, head_size: int, *, n_queries: int | None = None, ordered_on: int = 0
) -> int:
    """What attention's backward allocates: float32 sums of dq, two float32 a query row, and more for GQA.

    With grouped queries, dk and dv are first made per query head and then summed over the heads of a group. To add in a
    fixed order, flash gives each of its workers that share a head a sum of its own: as many as there are
    multiprocessors for a head (flash-attention's `mha_bwd`, a batch of one). n_queries: where they are not all tokens.
    """
    per_head_grads = 2 * head_size * 2 if n_key_heads != n_heads else 0
    sums = max(1, -(-ordered_on // n_heads))
    n_queries = n_tokens if n_queries is None else n_queries
    return n_heads * (n_queries * (sums * head_size + 2) * 4 + n_tokens * per_head_grads)


def math_rows(n_heads: int, n_keys: int, itemsize: int) -> int:
    """Query rows whose scores plain attention holds at once: fewer where keys are many, so that a block is bounded."""
    return max(1, min(_MATH_ROWS, _MATH_BLOCK_BYTES // (n_heads * n_keys * itemsize)))


def math_workspace_bytes(n_tokens: int, n_heads: int, head_size: int, itemsize: int, *, n_blocks: int) -> int:
    """What plain attention allocates beside its results: blocks of scores (one forward, two backward), per block and
    once more the block's rows of q, dout or a result, three numbers a row, and a mask of the block's own tokens.
    """
    rows = min(_MATH_ROWS, n_tokens)
    row_bytes = n_heads * n_tokens * itemsize
    block_bytes = max(row_bytes, min(rows * row_bytes, _MATH_BLOCK_BYTES))
    return n_blocks * block_bytes + rows * n_heads * ((n_blocks + 1) * head_size + 3) * itemsize + rows * rows
