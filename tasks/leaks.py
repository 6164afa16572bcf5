"""Leaks between the two sides of the split: equal or nearly equal task texts, and equal or nearly equal scored text.

A split by task keeps one task on one side; it cannot know that two names mean one task, or that two runs are copies.
Nearly equal is an estimated Jaccard index of at least `dedupe.THRESHOLD` over runs of eight words or tokens (MinHash).
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from datasketch import LeanMinHash, MinHash, MinHashLSH

from schemas.reports import Leak, LeakText
from schemas.trajectory import Message
from tasks.branch_rows import task_message
from tasks.dedupe import THRESHOLD, signature
from tasks.renderer import LabelledRun
from tasks.sources.base import issue_text

_NGRAM_TOKENS: Final = 8
_PERMUTATIONS: Final = 128

MIN_SCORED_TOKENS: Final = 64
"""Shorter scored text ("done", a single `ls`) is equal in unrelated runs and tells nothing."""

COLUMNS: Final = ("task_sha256", "task_minhash", "scored_sha256", "scored_minhash")
"""Columns of a row that a leak is found by, bytes or None: a SHA-256, or a MinHash as `LeanMinHash` writes it."""


def _packed(minhash: MinHash) -> bytes:
    lean = LeanMinHash(minhash)
    buffer = bytearray(lean.bytesize())
    lean.serialize(buffer)
    return bytes(buffer)


def _task_text(messages: Sequence[Message]) -> str | None:
    """The issue where the prompt marks it, else the whole first message: an agent's instructions are no task."""
    task = task_message(messages)
    if task is None:
        return None
    return " ".join((issue_text(task.content) or task.content).split()) or None


def fingerprints(messages: Sequence[Message], run: LabelledRun) -> dict[str, bytes | None]:
    """What is compared of one run, by `COLUMNS`; None where there is nothing to compare."""
    found: dict[str, bytes | None] = dict.fromkeys(COLUMNS)
    text = _task_text(messages)
    if text is not None:
        found["task_sha256"] = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        found["task_minhash"] = _packed(signature([{"content": text, "tool_calls": ()}]))
    scored = [
        run.token_ids[span.start : span.end] for span, weight in zip(run.spans, run.weights, strict=True) if weight > 0
    ]
    ids = np.concatenate(scored) if scored else run.token_ids[:0]
    if len(ids) >= MIN_SCORED_TOKENS:
        minhash = MinHash(num_perm=_PERMUTATIONS, seed=1)
        windows = np.lib.stride_tricks.sliding_window_view(ids, _NGRAM_TOKENS)
        minhash.update_batch({window.tobytes() for window in windows})
        found["scored_sha256"] = hashlib.sha256(ids.tobytes()).digest()
        found["scored_minhash"] = _packed(minhash)
    return found


class HeldOut:
    """The fingerprints of the held-out runs, equal ones once; about 4 KB each."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        """Rows hold `name` and `COLUMNS`."""
        self._equal: dict[tuple[LeakText, bytes], str] = {}
        self._minhash: dict[LeakText, dict[str, LeanMinHash]] = {"task": {}, "scored": {}}
        self._index = {text: MinHashLSH(threshold=THRESHOLD, num_perm=_PERMUTATIONS) for text in self._minhash}
        for row in rows:
            for text, known in self._minhash.items():
                digest, packed = row[f"{text}_sha256"], row[f"{text}_minhash"]
                if digest is not None and (text, digest) not in self._equal and row["name"] not in known:
                    self._equal[text, digest] = row["name"]
                    known[row["name"]] = LeanMinHash.deserialize(packed)
                    self._index[text].insert(row["name"], known[row["name"]])

    def leak(self, row: dict[str, Any]) -> Leak | None:
        """The first way in which a training run is known on the held-out side; None when it is not."""
        for text in ("task", "scored"):
            name = self._equal.get((text, row[f"{text}_sha256"]))
            if name is not None:
                return Leak(kind="equal", text=text, train=row["name"], heldout=name, similarity=1)
        for text, known in self._minhash.items():
            if row[f"{text}_minhash"] is None:
                continue
            minhash = LeanMinHash.deserialize(row[f"{text}_minhash"])
            near = [(minhash.jaccard(known[str(key)]), str(key)) for key in self._index[text].query(minhash)]
            similarity, name = max(near, default=(0.0, ""))
            if similarity >= THRESHOLD:
                return Leak(kind="similar", text=text, train=row["name"], heldout=name, similarity=similarity)
        return None
