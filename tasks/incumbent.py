"""The adapter in charge, as far as a new candidate can be compared with it."""

import json
from pathlib import Path

from artifacts.store import Store
from schemas.errors import UserError
from schemas.refs import ORIGIN_FILE, Ref
from tasks.promote import current


def comparable_incumbent(store: Store, model: Ref, candidate: Ref) -> Ref | None:
    """Whom a candidate is measured against: the adapter in charge, or none that was trained on this model.

    A candidate that is in charge already is measured against the one it replaced, as it was when it was decided on:
    the same comparison has the same cache key, so running again after a promotion evaluates nothing anew.

    Raises:
        UserError: the alias, or what its adapter says of itself, cannot be read.
    """
    in_charge = current(store)
    if in_charge is None:
        return None
    incumbent = in_charge.replaced if in_charge.adapter.sha256 == candidate.sha256 else in_charge.adapter
    if incumbent is None:
        return None
    origin = Path(incumbent.path) / ORIGIN_FILE
    if not origin.is_file():
        return None
    try:
        trained_on = json.loads(origin.read_text(encoding="utf-8"))["model_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the adapter in charge is damaged", where=origin, fix="restore it, or remove aliases/current.json"
        ) from error
    return incumbent if trained_on == model.sha256 else None
