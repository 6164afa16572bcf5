"""The record of each run, `runs/<run id>.json` in the store: what it used and made, kept up to date while it runs."""

from datetime import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from artifacts.store import write_atomically
from schemas.refs import STORE
from schemas.runs import RunReport


def run_id(name: str, started: datetime) -> str:
    """Run ids sort by their start, which is how "newest" is meant everywhere: to the microsecond, since runs of which
    all is cached begin within the same second."""
    return f"{started:%Y%m%dT%H%M%S%f}-{name}-{uuid4().hex[:6]}"


def write_run(report: RunReport) -> Path:
    """Writes or replaces a run's record."""
    path = Path(report.store) / "runs" / f"{report.run_id}.json"
    write_atomically(path, report.model_dump_json(indent=1))
    return path


def read_runs(store: Path) -> list[RunReport]:
    """All records, oldest first. A record that another version wrote in another shape is passed over."""
    reports = []
    for path in sorted((store / "runs").glob("*.json")):
        try:
            reports.append(RunReport.model_validate_json(path.read_bytes(), context={STORE: store}))
        except ValidationError:
            continue
    return reports
