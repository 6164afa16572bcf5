"""The benchmark of the stages on two GPUs, on a CPU: every case makes a valid run, and one is run and read back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pairs_results, pairs_two_gpus
from benchmarks.made_up import log_uniform, scored_spans
from benchmarks.pairs_cases import CASES, EVEN, seen_in_order
from engine.schedule import training_windows
from schemas.training import SimpoConfig


@pytest.mark.parametrize("name", CASES)
def test_case_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = pairs_two_gpus.config_of(tmp_path, case, dry=False)
    assert config.model.quantization == "nf4"
    assert config.model.gpu_gib == case.base.get("gpu_gib", 23.5)
    assert config.simpo.processes == case.n_processes
    assert config.simpo.optimizer.lr_scheduler == "cosine"  # the committed configuration's, not a default


def test_pairs_are_seen_in_the_order_given() -> None:
    table = seen_in_order(EVEN)
    assert [table[window[0]] for window in training_windows(SimpoConfig(), len(table))] == EVEN


def test_spans_do_not_overlap_and_end_with_the_branch() -> None:
    for n_tokens, _ in log_uniform(20, 64, 200_000):
        spans = scored_spans(n_tokens)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[0][0] >= 1
        assert spans[-1][1] == n_tokens


def test_one_case_from_made_up_weights_to_a_compared_gradient(tmp_path: Path) -> None:
    pairs_two_gpus.prepare(tmp_path, dry=True)
    results = tmp_path / "results.jsonl"
    pairs_two_gpus.run_case("fixed-one", tmp_path, results, timeout_s=120, dry=True)
    step, case = (json.loads(line) for line in results.read_text().splitlines())
    assert step["line"].startswith("step 1/1 loss")
    assert case["what"] == "case"
    assert case["steps"][0]["tokens"] == sum(sum(pair) for pair in case["lengths"])
    same = pairs_two_gpus.compare("fixed-one", "fixed-one", tmp_path)
    assert same["gradient_cosine"] == pytest.approx(1)
    assert same["largest_parameter_difference"] == 0
    assert same["largest_step"] == pytest.approx(5e-6, rel=1e-2)
    norm = float(pairs_two_gpus.first_gradient(tmp_path / "fixed-one").norm())
    assert norm == pytest.approx(min(1.0, case["steps"][0]["grad_norm"]), rel=1e-3)


def test_results_are_merged_as_one_run() -> None:
    """The case measured last counts, floats have 5 digits, a comparison goes with its first case."""
    old = {"machine": {}, "runs": [{"commit": "a"}], "comparisons": []}
    lines: list[dict[str, Any]] = [
        {"what": "machine", "time": "today", "commit": "b"},
        {"what": "case", "case": "one", "wall_s": 1.0},
        {"what": "step", "case": "one", "line": "step 1/1"},
        {"what": "comparison", "cases": ["two", "one"], "gradient_cosine": 0.123456789},
        {"what": "case", "case": "one", "steps": [{"loss": 0.123456789}], "plan": "auto"},
    ]
    found = pairs_results.merged(old, lines, ["one"], "a note", True)
    assert found["runs"] == [
        {"commit": "a"},
        {
            "time": "today", "commit": "b", "alone": True, "note": "a note",
            "cases": [{"case": "one", "steps": [{"loss": 0.12346}], "plan": "auto"}],
        },
    ]  # fmt: skip
    assert found["comparisons"] == []
    lines.append({"what": "case", "case": "two"})
    both = pairs_results.merged(old, lines, [], "", False)
    assert both["comparisons"] == [{"cases": ["two", "one"], "gradient_cosine": 0.12346, "commit": "b"}]
    with pytest.raises(ValueError, match="not measured: three"):
        pairs_results.merged(old, lines, ["one", "three"], "", True)


def test_cases_are_named_behind_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, results = tmp_path / "out.jsonl", tmp_path / "results.json"
    cases = [{"what": "case", "case": name} for name in ("one", "two")]
    rows = [{"what": "machine", "time": "t", "commit": "c"}, *cases]
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    results.write_text('{"runs": [], "comparisons": []}')
    monkeypatch.setattr(pairs_results, "RESULTS", results)
    pairs_results.main([str(lines), "--note", "a note", "--shared", "two"])
    (run,) = json.loads(results.read_text())["runs"]
    assert run["note"] == "a note"
    assert not run["alone"]
    assert run["cases"] == [{"case": "two"}]
