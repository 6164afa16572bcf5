"""The adapter in charge, as far as a new candidate can be compared with it."""

import json
from pathlib import Path
from typing import Final

from artifacts.store import Store
from schemas.refs import Ref
from tasks.promote import current

ORIGIN_FILE: Final = "traceforge.json"


def comparable_incumbent(store: Store, model: Ref, candidate: Ref) -> Ref | None:
    """The adapter that `current` names, unless it is the candidate itself, is gone, or was trained on another model."""
    incumbent = current(store)
    if incumbent is None or incumbent.sha256 == candidate.sha256:
        return None
    origin = Path(incumbent.path) / ORIGIN_FILE
    if not origin.is_file() or json.loads(origin.read_text(encoding="utf-8"))["model_sha256"] != model.sha256:
        return None
    return incumbent
