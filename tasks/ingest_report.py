"""What ingestion says about itself: counts over the catalog, and the list of everything left out."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from schemas.config import SourceConfig
from schemas.reports import LISTED, Dropped, IngestReport
from tasks.catalog import Catalog

_REASONS_COUNTED = 20
_PARTICULAR = re.compile(r"\d+|(?<=repeats ).*", re.DOTALL)


@dataclass
class _LeftOut:
    """What is not in the table: the first of each kind, how many of each kind, how many for each reason."""

    first: dict[str, list[Dropped]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def _left_out(catalog: Catalog, repeats: list[Dropped], path: Path) -> _LeftOut:
    """Counts everything that is not in the table, and writes it to `path`, a JSON line each."""

    def entries() -> Iterator[tuple[str, Dropped]]:
        for notes in catalog.notes():
            for kind, found in (("quarantined", notes.quarantined), ("damaged", notes.damaged)):
                yield from ((kind, Dropped(what=what, reason=reason)) for what, reason in found)
        yield from (("duplicates", dropped) for dropped in repeats)

    left = _LeftOut()
    with path.open("wb") as file:
        for kind, dropped in entries():
            file.write(orjson.dumps({"kind": kind, **dropped.model_dump()}) + b"\n")
            left.counts[kind] += 1
            left.reasons[_PARTICULAR.sub("…", dropped.reason)] += 1
            if left.counts[kind] <= LISTED:
                left.first[kind].append(dropped)
    return left


def ingest_report(
    catalog: Catalog, config: SourceConfig, n_files: int, n_reused: int, repeats: list[Dropped], left_out: Path
) -> IngestReport:
    """What became of the files that were asked for; writes the list of what was left out to `left_out`."""
    totals = catalog.totals()
    lengths = Counter[int]()
    for n_chars, n_runs in catalog.counts("n_chars").items():
        lengths[1 << max(10, (int(n_chars) - 1).bit_length())] += n_runs
    left = _left_out(catalog, repeats, left_out)
    n_side = n_replaced = 0
    redactions = Counter[str]()
    for notes in catalog.notes():
        n_side += bool(notes.facts)
        n_replaced += notes.n_replaced
        redactions.update(notes.redactions)
    return IngestReport(
        n_files=n_files,
        n_files_reused=n_reused,
        n_side_files=n_side,
        n_trajectories=totals["n_runs"],
        n_turns=totals["n_turns"],
        n_calls=totals["n_calls"],
        n_observations=totals["n_observations"],
        n_unpaired_results=totals["n_unpaired"],
        by_format=dict(sorted(catalog.counts("source_format").items())),
        by_outcome=dict(sorted(catalog.counts("status").items())),
        by_exit_status=dict(sorted(catalog.counts("exit_status").items())),
        length_chars={str(n_chars): n_runs for n_chars, n_runs in sorted(lengths.items())},
        redactions=dict(sorted(redactions.items())),
        redact=config.redact,
        n_replaced_characters=n_replaced,
        quarantined=tuple(left.first["quarantined"]),
        damaged=tuple(left.first["damaged"]),
        duplicates=tuple(left.first["duplicates"]),
        n_quarantined=left.counts["quarantined"],
        n_damaged=left.counts["damaged"],
        n_duplicates=left.counts["duplicates"],
        left_out_by_reason=dict(left.reasons.most_common(_REASONS_COUNTED)),
    )
