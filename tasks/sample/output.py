"""The folder the runs go into: side files of a batch, and the guard against writing over something else."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import UserError
from tasks.sample.episode import Episode

MANIFEST_NAME = ".sample-manifest.json"  # hidden: it is not a run, and readers of runs pass it by
_GENERATOR = "traceforge sample"


def check_out_dir(out_dir: Path) -> None:
    """Refuse a folder that cannot be written, or that holds anything but an earlier output. Raises UserError."""
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError("not a folder", where=out_dir, fix="name a folder for the sample runs")
    if out_dir.is_dir():
        strangers = _strangers(out_dir)
        if strangers:
            raise UserError(
                f"the folder holds files that are not sample runs, such as {strangers[0]}",
                where=out_dir,
                fix="name a new or empty folder",
            )
    existing = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    try:
        # Asking the system beats os.access, which answers for the real user and not for read-only mounts.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror}", where=out_dir, fix="name a folder you may write to"
        ) from error


def write_run_files(folder: Path, episodes: Mapping[str, Episode]) -> None:
    """Write the side files of one batch, by instance id: report.json and exit_statuses.yaml."""
    by_status: dict[str, list[str]] = {}
    for instance_id, episode in sorted(episodes.items()):  # runs end in any order
        by_status.setdefault(episode.exit_status, []).append(instance_id)
    (folder / "report.json").write_text(json.dumps(batch_report(episodes), indent=4))
    (folder / "exit_statuses.yaml").write_text(yaml.safe_dump({"instances_by_exit_status": by_status}))


def batch_report(episodes: Mapping[str, Episode]) -> dict[str, Any]:
    """The report in the shape of the SWE-bench harness: an empty patch counts as neither completed nor unresolved."""
    ids = sorted(episodes)
    empty = [name for name in ids if not episodes[name].submission]
    completed = [name for name in ids if episodes[name].submission]
    resolved = [name for name in completed if episodes[name].resolved]
    unresolved = [name for name in completed if not episodes[name].resolved]
    return {
        "total_instances": len(ids),
        "submitted_instances": len(ids),
        "completed_instances": len(completed),
        "resolved_instances": len(resolved),
        "unresolved_instances": len(unresolved),
        "empty_patch_instances": len(empty),
        "error_instances": 0,
        "completed_ids": completed,
        "incomplete_ids": [],
        "empty_patch_ids": empty,
        "submitted_ids": ids,
        "resolved_ids": resolved,
        "unresolved_ids": unresolved,
        "error_ids": [],
        "schema_version": 2,
    }


def publish(staged: Path, out_dir: Path, run_names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Put the finished run folders into `out_dir`, in place of an earlier output. Raises UserError."""
    manifest = {"generator": _GENERATOR, "runs": list(run_names), "settings": dict(settings)}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in _manifest_runs(out_dir):
            if (out_dir / name).is_dir():
                shutil.rmtree(out_dir / name)
        # The manifest goes first: after a crash in between, the folder is still recognised as ours.
        (out_dir / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2))
        for name in run_names:
            shutil.move(staged / name, out_dir / name)
    except OSError as error:
        raise UserError(
            f"cannot write the runs: {error.strerror}", where=out_dir, fix="make room or name another folder"
        ) from error


def _strangers(out_dir: Path) -> list[str]:
    known = {MANIFEST_NAME, *_manifest_runs(out_dir)}
    return sorted(name for name in os.listdir(out_dir) if name not in known)


def _manifest_runs(out_dir: Path) -> list[str]:
    """Names of the run folders of an earlier output; empty when the folder holds none of ours."""
    try:
        manifest = json.loads((out_dir / MANIFEST_NAME).read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(manifest, dict) or manifest.get("generator") != _GENERATOR:
        return []
    # A name with a separator could point outside the folder.
    return [name for name in manifest.get("runs", []) if isinstance(name, str) and name == Path(name).name]
