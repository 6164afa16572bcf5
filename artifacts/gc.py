"""What the artifact store holds, whether it is sound, and what of it nothing refers to any more.

A payload is kept while an alias, or the record of one of the newest runs, mentions its digest. Nothing is removed
while any run uses the store, so a payload cannot go between a run's look-up and its use of it.
"""

import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from artifacts.locks import nobody_uses
from artifacts.store import payload_digest
from schemas.base import Frozen
from schemas.errors import ArtifactError, UserError
from schemas.refs import Kind

KEEP_RUNS = 10
KEEP_WORK_S = 7 * 86_400.0
_DIGEST = re.compile(r"sha256\W+([0-9a-f]{64})")


class StoredPayload(Frozen):
    kind: Kind
    sha256_prefix: str = Field(description="first 16 hex digits")
    path: str
    n_bytes: int
    modified_s: float = Field(description="seconds since 1970")
    aliases: tuple[str, ...] = ()
    runs: tuple[str, ...] = Field(default=(), description="records of runs that mention it")
    state: Literal["unchecked", "sound", "altered"] = "unchecked"


class Inventory(Frozen):
    store: str
    payloads: tuple[StoredPayload, ...]
    n_bytes: int


class GcReport(Frozen):
    store: str
    removed: tuple[StoredPayload, ...]
    n_records_removed: int
    freed_bytes: int
    kept: int
    dry_run: bool


def _mentions(files: Iterable[Path]) -> dict[str, set[str]]:
    """First 16 digits of every digest that a file mentions -> names of these files."""
    found: dict[str, set[str]] = {}
    for file in files:
        for digest in _DIGEST.findall(file.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(digest[:16], set()).add(file.stem)
    return found


def _require_store(store: Path) -> None:
    if not (store / "staging").is_dir():
        raise UserError("no artifact store", where=store, fix="give --store, or run `traceforge demo` first")


def _require_readable(aliases: Path) -> None:
    """An alias that cannot be read may name anything, so nothing may be removed.

    Raises:
        UserError: an alias is no JSON object that names a digest.
    """
    for alias in sorted(aliases.glob("*.json")):
        try:
            json.loads(alias.read_text(encoding="utf-8"))["adapter"]["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "the alias cannot be read, so nothing was removed", where=alias, fix="restore it from history.jsonl"
            ) from error


def _n_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def inventory(store: Path) -> Inventory:
    """Every payload, oldest first, and what refers to it.

    Raises:
        UserError: there is no store.
    """
    _require_store(store)
    by_alias = _mentions((store / "aliases").glob("*.json"))
    by_run = _mentions((store / "runs").glob("*.json"))
    payloads = [
        StoredPayload(
            kind=kind,
            sha256_prefix=path.parent.name,
            path=str(path),
            n_bytes=_n_bytes(path),
            modified_s=path.stat().st_mtime,
            aliases=tuple(sorted(by_alias.get(path.parent.name, ()))),
            runs=tuple(sorted(by_run.get(path.parent.name, ()))),
        )
        for kind in get_args(Kind)
        for path in (store / kind).glob("*/*")
    ]
    payloads.sort(key=lambda payload: (payload.modified_s, payload.path))
    return Inventory(store=str(store), payloads=tuple(payloads), n_bytes=sum(payload.n_bytes for payload in payloads))


def check(store: Path) -> Inventory:
    """The inventory, every payload read and compared with the digest it is stored under."""
    found = inventory(store)
    checked = tuple(
        payload.model_copy(
            update={
                "state": "sound"
                if payload_digest(Path(payload.path))[0].startswith(payload.sha256_prefix)
                else "altered"
            }
        )
        for payload in found.payloads
    )
    return found.model_copy(update={"payloads": checked})


def require_sound(found: Inventory) -> None:
    """Raises:
    ArtifactError: a payload was altered; one line for each.
    """
    altered = [f"{payload.path}: altered" for payload in found.payloads if payload.state == "altered"]
    if altered:
        raise ArtifactError("\n".join(altered))


def find(store: Path, digest: str) -> StoredPayload:
    """The payload whose digest begins with `digest` (at most its first 16 digits are compared).

    Raises:
        UserError: there is none, or more than one.
    """
    payloads = inventory(store).payloads
    matches = [payload for payload in payloads if digest and payload.sha256_prefix.startswith(digest[:16])]
    if len(matches) != 1:
        raise UserError(
            f"{len(matches)} payloads whose digest begins with {digest!r}", where=store, fix="see: artifacts list"
        )
    return matches[0]


def _stale_work(store: Path) -> list[Path]:
    """Working folders of trainings that were interrupted, and that nobody has gone on with for a while."""
    oldest_s = time.time() - KEEP_WORK_S
    return [folder for folder in (store / "work").glob("*") if folder.stat().st_mtime < oldest_s]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def collect(store: Path, *, keep_runs: int = KEEP_RUNS, dry_run: bool = False) -> GcReport:
    """Removes the payloads that no alias and none of the `keep_runs` newest runs mention, and records of gone results.

    Raises:
        UserError: there is no store, a run is using it, or an alias cannot be read; nothing was removed.
    """
    _require_store(store)
    with nobody_uses(store) as free:
        if not free:
            raise UserError("a run is using the store", where=store, fix="try again when it has ended")
        found = inventory(store)
        _require_readable(store / "aliases")
        runs = sorted((store / "runs").glob("*.json"))
        old_runs = {path.stem for path in runs[: max(0, len(runs) - keep_runs)]}
        removed = tuple(
            payload for payload in found.payloads if not payload.aliases and not set(payload.runs) - old_runs
        )
        gone = {payload.sha256_prefix for payload in removed}
        records = [path for path in (store / "results").glob("*") if set(_mentions([path])) & gone]
        if not dry_run:
            for record in records:
                record.unlink()
            for payload in removed:
                _remove(Path(payload.path))
                Path(payload.path).parent.rmdir()
            for leftover in [*(store / "staging").iterdir(), *(store / "locks").glob("*.lock"), *_stale_work(store)]:
                _remove(leftover)
            for run in old_runs:
                (store / "runs" / f"{run}.json").unlink()
    return GcReport(
        store=str(store),
        removed=removed,
        n_records_removed=len(records),
        freed_bytes=sum(payload.n_bytes for payload in removed),
        kept=len(found.payloads) - len(removed),
        dry_run=dry_run,
    )
