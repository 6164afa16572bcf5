"""Near-duplicate runs of one task, by MinHash over the words of what the policy wrote and saw.

Only runs with equal outcomes are compared: two nearly equal runs of which one failed are the best pair there is.
datasketch is imported when it is asked for: it brings SciPy, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasketch import MinHash

THRESHOLD = 0.9
"""Estimated Jaccard similarity from which on two runs count as one."""

_PERMUTATIONS = 128
_SHINGLE_WORDS = 8


def _shingles(messages: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    words: list[str] = []
    for message in messages:
        words += message["content"].split()
        for call in message["tool_calls"]:
            words += call["arguments"].split()
    for index in range(max(1, len(words) - _SHINGLE_WORDS + 1)):
        yield " ".join(words[index : index + _SHINGLE_WORDS]).encode("utf-8", "replace")


def signature(messages: Iterable[dict[str, Any]]) -> MinHash:
    """MinHash of a run's messages (table rows): sets of 8 consecutive words."""
    from datasketch import MinHash

    minhash = MinHash(num_perm=_PERMUTATIONS, seed=1)
    minhash.update_batch(set(_shingles(messages)))
    return minhash


def near_duplicates(signatures: Sequence[MinHash]) -> list[tuple[int, int]]:
    """(index of a repeat, index of the run that is kept): the first of each group stays.

    Similarity is estimated; at 128 permutations its standard error at 0.9 is 0.027.
    """
    from datasketch import MinHashLSH

    index = MinHashLSH(threshold=THRESHOLD, num_perm=_PERMUTATIONS)
    repeats = []
    for number, minhash in enumerate(signatures):
        near = (int(str(key)) for key in index.query(minhash))
        close = [other for other in near if signatures[other].jaccard(minhash) >= THRESHOLD]
        if close:
            repeats.append((number, min(close)))
        else:
            index.insert(str(number), minhash)
    return repeats
