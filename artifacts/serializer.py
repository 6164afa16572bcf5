"""How Prefect stores a stage's result: as small JSON, and trusted only while its payloads are what it says.

Prefect looks a cache key up by deserialising the record, and takes any exception for "not there". So verifying the
payloads here makes a deleted or altered file a cache miss, and the stage runs again.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect.serializers import Serializer
from pydantic import Field

import schemas.runs  # noqa: F401  (fills the registry, so that every kind of record can be read)
from artifacts.store import verify
from schemas.errors import StageError, UserError
from schemas.refs import STORE, Ref
from schemas.reports import StageResult

_Stamp = tuple[tuple[int, int, int], ...]
_verified: dict[tuple[str, str], _Stamp] = {}
_store: ContextVar[Path | None] = ContextVar("store", default=None)


@contextmanager
def results_of(store: Path) -> Iterator[None]:
    """Results that are read inside are this store's: its payloads are looked for in it, wherever it was when they were
    stored."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def _stamp(path: Path) -> _Stamp:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.exists()]
    return tuple((stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in stats)


def verify_once(ref: Ref) -> None:
    """Verifies a payload, reading it again only if its files were touched since this process last did.

    Prefect reads a record two or three times per look-up, and a base model may hold many gigabytes.

    Raises:
        ArtifactError: it is gone, or its digest differs.
    """
    stamp = _stamp(Path(ref.path))
    if not stamp or _verified.get((ref.path, ref.sha256)) != stamp:
        verify(ref)
        _verified[ref.path, ref.sha256] = stamp


class ArtifactSerializer(Serializer):
    """Writes stage results and failures, and refuses anything else."""

    type: str = Field(default="traceforge-artifact", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        match obj:
            case UserError():
                record = {"user_error": {"what": obj.what, "where": obj.where, "fix": obj.fix}}
            case BaseException():
                record = {"error": f"{type(obj).__name__}: {obj}"}
            case StageResult():
                record = {"kind": type(obj).__name__, "data": obj.model_dump(mode="json")}
            case _:
                raise TypeError(f"a stage must return a StageResult, not {type(obj).__name__}")
        return json.dumps(record).encode()

    def loads(self, blob: bytes) -> Any:
        """The result, or the failure as an exception object.

        Raises:
            ArtifactError: a payload is gone or altered.
            KeyError, pydantic.ValidationError: the record is of a kind or shape that this version does not know.
        """
        record = json.loads(blob)
        if "user_error" in record:
            return UserError(**record["user_error"])
        if "error" in record:
            return StageError(record["error"])
        result = StageResult.registry[record["kind"]].model_validate(record["data"], context={STORE: _store.get()})
        for ref in result.refs():
            verify_once(ref)
        return result
