"""How rows lie in one packed sequence, and which keys each of its queries attends to. Pure arithmetic, no torch.

A *segment* is a stretch of tokens that attends causally to itself and fully to the ranges it `sees`. One branch is one
segment; short rows packed into one walk are segments that see nothing else; of two branches with a common prefix, the
second one's tail is a segment that sees the prefix. Positions are those a token has in its own branch.

All attention is then a list of blocks of two kinds only, a rectangle (every query sees every key) and a square on the
diagonal (causal), which are merged exactly by their log-sum-exp (`engine.block_attention`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

WINDOW_GAP_TOKENS = 128
"""Windows of scored rows with a smaller gap are one: a window's fixed work is about that of so many rows."""
WINDOWS_SHARE = 0.5
"""Windows that cover more of a sequence than this are not worth having."""


class Segment(NamedTuple):
    """Tokens [start, stop) of the packed sequence, the first at `first_position` of its branch."""

    start: int
    stop: int
    first_position: int = 0
    sees: tuple[tuple[int, int], ...] = ()


class KeyBlock(NamedTuple):
    """Keys [start, stop); causal: they are the queries' own tokens, and a query sees those up to itself."""

    start: int
    stop: int
    causal: bool


class QueryBlock(NamedTuple):
    """Queries of tokens [start, stop), whose results are rows [row, row + stop - start) of the output."""

    start: int
    stop: int
    row: int
    keys: tuple[KeyBlock, ...]


class Queries(NamedTuple):
    """The rows that a layer computes beyond keys and values: all tokens (windows None), or those of some windows."""

    n_rows: int
    blocks: tuple[QueryBlock, ...]
    windows: tuple[tuple[int, int], ...] | None = None


class Layout(NamedTuple):
    """The segments of one packed sequence, in order and without gaps."""

    segments: tuple[Segment, ...]

    @property
    def n_tokens(self) -> int:
        return self.segments[-1].stop

    @property
    def is_one_row(self) -> bool:
        return len(self.segments) == 1


def one_row(n_tokens: int) -> Layout:
    return Layout((Segment(0, n_tokens),))


def packed_rows(lengths: Sequence[int]) -> Layout:
    """Rows one after another, none of which sees another."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, start + length))
        start += length
    return Layout(tuple(segments))


def shared_prefix(n_prefix: int, n_first: int, n_second: int) -> Layout:
    """A branch of n_first tokens, then what one of n_second tokens has behind their n_prefix common ones."""
    if not n_prefix:
        return packed_rows([n_first, n_second])
    if n_second == n_prefix:
        return one_row(n_first)
    tail = Segment(n_first, n_first + n_second - n_prefix, n_prefix, ((0, n_prefix),))
    return Layout((Segment(0, n_first), tail))


def _query_block(segment: Segment, start: int, stop: int, row: int) -> QueryBlock:
    keys = [KeyBlock(*seen, causal=False) for seen in segment.sees]
    if start > segment.start:
        keys.append(KeyBlock(segment.start, start, causal=False))
    keys.append(KeyBlock(start, stop, causal=True))
    return QueryBlock(start, stop, row, tuple(keys))


def all_queries(layout: Layout) -> Queries:
    """Every token is a query."""
    blocks = tuple(_query_block(s, s.start, s.stop, s.start) for s in layout.segments)
    return Queries(layout.n_tokens, blocks)


def query_windows(layout: Layout, rows: Iterable[int], gap_tokens: int) -> list[tuple[int, int]]:
    """Stretches that cover `rows`, apart by more than gap_tokens tokens or by the end of a segment."""
    ends = iter(segment.stop for segment in layout.segments)
    windows: list[tuple[int, int]] = []
    end = 0
    for row in sorted(set(rows)):
        same_segment = row < end
        while row >= end:
            end = next(ends)
        if same_segment and row - windows[-1][1] <= gap_tokens:
            windows[-1] = windows[-1][0], row + 1
        else:
            windows.append((row, row + 1))
    return windows


def scored_queries(layout: Layout, rows: Iterable[int], gap_tokens: int = WINDOW_GAP_TOKENS) -> Queries:
    """Windows around the rows whose output is wanted, or all queries where these are too many to gain anything."""
    windows = query_windows(layout, rows, gap_tokens)
    n_rows = sum(stop - start for start, stop in windows)
    if n_rows > WINDOWS_SHARE * layout.n_tokens:
        return all_queries(layout)
    blocks, row, segments = [], 0, iter(layout.segments)
    segment = next(segments)
    for start, stop in windows:
        while start >= segment.stop:
            segment = next(segments)
        blocks.append(_query_block(segment, start, stop, row))
        row += stop - start
    return Queries(n_rows, tuple(blocks), tuple(windows))
