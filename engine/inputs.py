"""Whether a stage's inputs are what its spec says of them, and what their schemas and the stages before promise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from artifacts.store import verify
from artifacts.tables import open_table
from schemas.errors import ArtifactError, UserError
from schemas.refs import Ref
from schemas.spec import TrainSpec

AGAIN = "write the table again with the stage that it comes from"


def verify_inputs(spec: TrainSpec) -> None:
    """Compares every input with the digest in its reference: tables and adapters by content, the model by the kind of
    digest that its reference has.

    Raises:
        UserError: one is gone, cannot be read, or was altered since the spec was written.
    """
    pairs = [spec.pairs] if spec.pairs else []
    for ref in (*spec.branches, *pairs, *spec.adapters.values(), spec.model):
        fix = f"put back the {ref.kind} that the spec names, or start again from the stage before"
        try:
            verify(ref)
        except ArtifactError as error:
            what = "gone" if str(error).endswith(": gone") else "altered since the spec was written"
            raise UserError(what, where=ref.path, fix=fix) from error
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=ref.path, fix=fix) from error


def _has_null(values: pa.Array) -> bool:
    if values.null_count:
        return True
    if pa.types.is_list(values.type):
        return _has_null(values.flatten())
    return pa.types.is_struct(values.type) and any(map(_has_null, values.flatten()))


def open_input(ref: Ref, columns: Sequence[str]) -> pa.Table:
    """A table whose `columns` hold a value everywhere, also within lists.

    Raises:
        UserError: they do not, or the table is missing, damaged or another one.
    """
    try:
        table = open_table(ref)
    except ArtifactError as error:
        raise UserError(str(error).removeprefix(f"{ref.path}: "), where=ref.path, fix=AGAIN) from error
    for name in columns:
        if any(map(_has_null, table[name].chunks)):
            raise UserError(f"column {name} lacks values", where=ref.path, fix=AGAIN)
    return table


def branch_fault(
    token_ids_T: np.ndarray, spans: np.ndarray, weights: np.ndarray, n_tokens: int, n_scored: int
) -> str | None:
    """What keeps a branch from being scored as its table says; spans: [2, spans], starts and ends."""
    if len(token_ids_T) != n_tokens:
        return f"n_tokens is {n_tokens}, but it has {len(token_ids_T)} tokens"
    if n_tokens == 0:
        return "it has no tokens"
    if token_ids_T[place := int(token_ids_T.argmin())] < 0:
        return f"its token {place} is {token_ids_T[place]}"
    starts, ends = spans

    def shown(index: int) -> str:
        return f"span [{starts[index]}, {ends[index]})"

    if (outside := (starts < 0) | (ends > n_tokens) | (starts > ends)).any():
        return f"{shown(int(outside.argmax()))} is not within its {n_tokens} tokens"
    if (early := starts[1:] < ends[:-1]).any():
        place = int(early.argmax())
        return f"{shown(place + 1)} begins before {shown(place)} ends"
    if (unfit := ~(np.isfinite(weights) & (weights >= 0))).any():
        place = int(unfit.argmax())
        return f"{shown(place)} has weight {weights[place]:g}; expected a finite one, 0 or above"
    if (found := int((ends - starts)[weights > 0].sum())) != n_scored:
        return f"n_scored is {n_scored}, but spans with a weight hold {found} tokens"
    return None
