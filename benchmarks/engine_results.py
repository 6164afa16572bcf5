"""Puts the lines of one run of `benchmarks.engine_longcontext` into the committed results, under a letter of its own.

python -m benchmarks.engine_results OUT.jsonl C
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "engine_h200.json"
LISTS = {"walk": "cases", "unsloth": "unsloth", "peer": "peers", "first token": "checks", "idle": "checks"}


def merged(results: dict[str, Any], lines: list[dict[str, Any]], run: str) -> dict[str, Any]:
    """The results with this run's lines in place of what they had of a run of that name."""
    facts: dict[str, Any] = {}
    found = {
        name: [row for row in results.get(name, []) if row["run"] != run] for name in dict.fromkeys(LISTS.values())
    }
    for line in lines:
        row = {key: value for key, value in line.items() if key != "left_s"}
        kind = "walk" if row["what"].startswith("forward, and backward") else row["what"].removesuffix(" failed")
        if kind in LISTS:
            found[LISTS[kind]].append(row | {"run": run})
        elif kind == "machine":
            facts |= {key: value for key, value in row.items() if key != "what"}
        elif kind == "peaks_tflops":
            facts["peaks_tflops"] = {key: value for key, value in row.items() if key != "what"}
        elif kind in ("pinned", "model"):
            facts[f"{kind}_s"] = row["took_s"]
        elif kind in ("skipped", "failed"):
            facts.setdefault("not_done", []).append(row)
    return results | {"runs": results["runs"] | {run: facts}} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("run")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.lines.read_text().splitlines() if line.startswith("{")]
    results = merged(json.loads(RESULTS.read_text()), lines, arguments.run)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
