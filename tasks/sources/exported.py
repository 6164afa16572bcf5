"""Reading back what `traceforge export` wrote: the plain reading of a row, corrected by what is recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from schemas.trajectory import Trajectory
from tasks.sources.base import METADATA_KEY, digest, json_text
from tasks.sources.document import SourceError
from tasks.sources.draft import Message, Run, from_trajectory

SHOWN_KEY = "shown"
"""Where the digest of what others see of an export stands."""


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = {key: _shown(value[key]) for key in sorted(value) if key != METADATA_KEY}
        return {key: item for key, item in found.items() if item is not None and item != {}}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def shown_digest(value: Mapping[str, Any]) -> str:
    """Of an exported row or document without our own entry, and without empty ones, which tools add and drop."""
    return digest(json_text(_shown(value)))


def restored(value: Mapping[str, Any], messages: Sequence[Message], metadata: Any) -> Run | None:
    """The run that was exported as `value`, whose plain reading `messages` are; None when it is no export of ours.

    Raises:
        SourceError: it was edited since: the record of who said what no longer fits.
    """
    if not isinstance(metadata, dict) or not isinstance(metadata.get("messages"), list):
        return None
    fields = {key: item for key, item in metadata.items() if key not in ("messages", "whole", SHOWN_KEY)}
    changes, is_whole = metadata["messages"], metadata.get("whole") is True
    is_edited = SHOWN_KEY in metadata and metadata[SHOWN_KEY] != shown_digest(value)
    if is_edited or not (is_whole or len(changes) == len(messages)):
        raise SourceError(f"an export that was edited since: without its {METADATA_KEY!r} entry it is read as it is")
    if is_whole:
        fields["messages"] = changes
    else:
        fields["messages"] = [
            {**to_builtins(message), **change} for message, change in zip(messages, changes, strict=True)
        ]
    return from_trajectory(Trajectory.model_validate(fields))
