"""Puts cases of `benchmarks.pairs_two_gpus` into the committed results.

python -m benchmarks.pairs_results OUT.jsonl --note "a card each, side by side" --shared CASE...

All cases of OUT.jsonl unless some are named; a case measured twice counts as measured last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "pairs_h200x2.json"
DIGITS = 5


def rounded(value: Any) -> Any:
    """The value, every float in it with 5 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def merged(
    results: dict[str, Any], lines: list[dict[str, Any]], names: list[str], note: str, alone: bool
) -> dict[str, Any]:
    """The results with these lines as one more run. ValueError where a named case is not among the lines."""
    machine = next(line for line in lines if line["what"] == "machine")
    by_name = {line["case"]: line for line in lines if line["what"] == "case"}
    if missing := sorted(set(names) - set(by_name)):
        raise ValueError(f"not measured: {', '.join(missing)}")
    kept = [{key: value for key, value in by_name[name].items() if key != "what"} for name in names or by_name]
    run = {"time": machine["time"], "commit": machine["commit"], "alone": alone, "note": note, "cases": kept}
    compared = {
        tuple(line["cases"]): {key: value for key, value in line.items() if key != "what"} | {"commit": run["commit"]}
        for line in lines
        if line["what"] == "comparison" and line["cases"][0] in {case["case"] for case in kept}
    }
    return results | {
        "runs": [*results["runs"], rounded(run)],
        "comparisons": [*results["comparisons"], *rounded(list(compared.values()))],
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--note", required=True, help="what a reader of the numbers has to know")
    parser.add_argument("--shared", action="store_true", help="the machine did something else at the same time")
    options = parser.parse_intermixed_args(words)  # cases may stand behind the options
    lines = [json.loads(line) for line in options.lines.read_text().splitlines() if line.startswith("{")]
    results = merged(json.loads(RESULTS.read_text()), lines, options.cases, options.note, not options.shared)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
