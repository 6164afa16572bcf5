"""Which tasks are held out: by a hash of the task's (or repository's) name alone.

A task stays on its side whatever else arrives, night after night. The share is therefore met only on average, and with
few tasks a side can be empty; nothing is moved to fill it.
"""

import hashlib
from typing import Literal

from schemas.config import SplitConfig

Side = Literal["train", "heldout"]


def side(task_id: str, repo: str | None, config: SplitConfig) -> Side:
    """`train` or `heldout`. Splitting by repository, a task without one is split by its own name."""
    key = repo if config.by == "repo" and repo else task_id
    digest = hashlib.sha256(f"{config.salt}\0{key}".encode()).digest()
    uniform = int.from_bytes(digest[:8]) / 2**64
    return "heldout" if uniform < config.heldout_share else "train"
