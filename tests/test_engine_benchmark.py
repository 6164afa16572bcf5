"""The engine benchmark on a CPU: its cases, its deadline, and that every part of it runs."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import engine_longcontext
from benchmarks.engine_case import Case, case_of
from benchmarks.engine_cases import BackwardStoppedError, Bench, first_token_check, run_case, setup_of, stop_after
from benchmarks.engine_common import config_dict, warm, with_lora
from benchmarks.engine_floor import floor_s
from benchmarks.engine_run import TINY, Run
from engine.attention import BACKENDS


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = config_dict() | TINY | {"vocab_size": 200}
    kind: Any = AutoConfig
    model = with_lora(AutoModelForCausalLM.from_config(kind.for_model(**config)))
    return Bench(model, config, setup_of(dry=True), torch.device("cpu"), 2**30)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_case_is_read_from_its_text() -> None:
    text = "65536@23.5,steps=4,groups=2,stride=2,staged=1,place=device,plan_gib=20,profile=1,layers=3"
    assert case_of(text) == Case(65_536, 23.5, text, 4, 2, 2, True, "device", 20.0, True, 3)
    assert case_of("4096@11,shorter=64,attention=flash") == Case(
        4096, 11.0, "4096@11,shorter=64,attention=flash", shorter=64, attention="flash"
    )
    assert case_of("4096@11") == Case(4096, 11.0, "4096@11")
    with pytest.raises(argparse.ArgumentTypeError, match="no option tile"):
        case_of("4096@11,tile=3")


def test_options_change_the_plan_as_they_say(bench: Bench) -> None:
    plain = bench.plan(case_of("300@4"))
    assert {layer.input for layer in plain.layers} == {"host"}
    moved = bench.plan(case_of("300@4,place=device"))
    assert {layer.input for layer in moved.layers} == {layer.attention for layer in moved.layers} == {"device"}
    assert bench.plan(case_of("300@4,groups=1")).head_groups == 1
    staged = bench.plan(case_of("300@4,staged=1"))
    assert staged.staged_qkv
    assert "device" not in {layer.qkv for layer in staged.layers}
    strided = bench.plan(case_of("300@4,stride=2"))
    assert [layer.gate_up for layer in strided.layers][::2] == ["host"] * 2


def test_a_backward_of_some_layers_only(bench: Bench) -> None:
    """Fewer attention backwards than layers, and the next case is a whole one again."""
    part = run_case(bench, case_of("200@4,steps=1,layers=2"))
    assert part["what"] == "forward, and backward of the last 2 layers"
    assert run_case(bench, case_of("200@4,steps=1"))["what"] == "walk"
    q, k, v = (torch.rand(5, 2, 8) for _ in range(3))
    stopping = stop_after(BACKENDS["math"], 2)
    out, lse = stopping.forward(q, k, v, 1.0, True)
    for _ in range(2):
        assert stopping.backward(q, q, k, v, out, lse, 1.0, True)[0].shape == q.shape
    with pytest.raises(BackwardStoppedError):
        stopping.backward(q, q, k, v, out, lse, 1.0, True)


def test_steps_of_lengths_that_no_cache_knows(bench: Bench) -> None:
    """Each under a plan for its own length; the kernel that was asked for is the case's only."""
    found = run_case(bench, case_of("200@4,steps=3,shorter=16,attention=math"))
    assert found["lengths"] == [200, 184, 168]
    assert found["attention"] == "math only"
    assert {184, 168} <= bench.plans.keys()
    assert len(set(found["grad_norms"])) == 3
    assert "lengths" not in run_case(bench, case_of("200@4,steps=1"))
    with pytest.raises(KeyError):
        run_case(bench, case_of("200@4,steps=1,attention=none"))
    assert bench.scorer.backend == BACKENDS["math"]


def test_the_host_buffer_of_a_run_is_the_one_that_was_pinned_for_it(bench: Bench) -> None:
    bench.scorer.reserve_host(2**26, bench.device)
    assert run_case(bench, case_of("150@4,steps=2"))["finite"]
    assert bench.scorer.host_bytes == 2**26


def test_the_floor_is_the_sum_of_matmuls_and_attention_at_their_peaks() -> None:
    """Qwen3-8B at 65,536 tokens: 6.95e9 weights of linears in 36 layers, 32 heads of 128."""
    n, peaks = 65_536, {"matmul": 800.0, "cudnn_forward": 600.0, "cudnn_backward": 500.0}
    peaks |= {"flash_forward": 350.0, "flash_backward": 320.0}
    weights = 36 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12_288)
    pairs = n * n / 2
    want = 4 * n * weights / 800e12 + 36 * 4 * pairs * 4096 * (1 / 600e12 + 2.5 / 500e12)
    assert floor_s(config_dict(), n, peaks) == pytest.approx(want, rel=1e-12)


def test_only_long_series_leave_out_their_first_step() -> None:
    assert warm([9.0, 1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert warm([9.0, 1.0, 1.0]) == [9.0, 1.0, 1.0]


def test_the_first_token_reaches_the_last_score(bench: Bench) -> None:
    found = first_token_check(bench, 200, 4.0)
    assert found["last_position"] == 199
    assert found["change_when_repeated"] == 0
    assert abs(found["change_of_last_by_first_token"]) > 1e-4


def test_what_would_pass_the_deadline_is_skipped_and_what_fails_is_noted(tmp_path: Path) -> None:
    run = Run(tmp_path / "out.jsonl", time.monotonic() + 10)

    def fails() -> dict[str, Any]:
        raise RuntimeError("CUDA out of memory")

    run.attempt("long", 11.0, lambda: {"what": "walk"})
    run.attempt("broken", 1.0, fails)
    run.attempt("short", 1.0, lambda: {"what": "walk"})
    skipped, failed, done = lines_of(tmp_path / "out.jsonl")
    assert (skipped["what"], skipped["case"]) == ("skipped", "long")
    assert (failed["what"], failed["error"]) == ("failed", "RuntimeError: CUDA out of memory")
    assert (done["what"], done["case"]) == ("walk", "short")
    assert 0 < done["left_s"] <= failed["left_s"] <= 10


def command_lines(text: str) -> list[list[str]]:
    """The words of every call of the benchmark in a text, without the interpreter and the module."""
    call = "python -m benchmarks.engine_longcontext "
    return [
        line.split(call)[1].split("#")[0].split() for line in text.replace("\\\n", " ").splitlines() if call in line
    ]  # fmt: skip


def test_every_call_in_the_documentation_runs(tmp_path: Path) -> None:
    """Each with `--dry`: nothing fails or is skipped, every case has its row, and the rows are in the call's order."""
    page = (REPOSITORY / "docs" / "ENGINE.md").read_text()
    assert engine_longcontext.__doc__
    calls = command_lines(engine_longcontext.__doc__) + command_lines(page)
    assert len(calls) >= 5
    seen: set[str] = set()
    for number, (_, *words) in enumerate(calls):
        out = tmp_path / f"{number}.jsonl"
        engine_longcontext.main([str(out), *words, "--dry"])
        lines, asked = lines_of(out), engine_longcontext.arguments_of([str(out), *words])
        assert not [line for line in lines if line["what"] in ("failed", "skipped")], words
        cases = [line["case"] for line in lines if line["what"] == "walk" or line["what"].startswith("forward, and")]
        assert cases == [case.text for case in (*asked.cases, *asked.last)]
        assert [line["peer"] for line in lines if line["what"] == "peer"] == [name for name, _ in asked.peers]
        assert ("first token" in {line["what"] for line in lines}) == bool(asked.first_token)
        assert all(line["finite"] for line in lines if line["what"] == "walk")
        assert lines[-1]["what"] == "end"
        seen |= {option.split("=")[0] for case in (*asked.cases, *asked.last) for option in case.text.split(",")[1:]}
    assert seen >= {"steps", "profile", "staged", "stride", "place", "plan_gib", "layers"}


def test_a_run_goes_on_after_a_case_that_fails_and_says_what_its_time_left_out(tmp_path: Path) -> None:
    """51,200 tokens, divided by 512, are too many for 0.1 MiB; a deadline that has passed leaves no case to try."""
    engine_longcontext.main([str(tmp_path / "1"), "51200@0.0001", "51200@4,steps=1", "--dry"])
    rows = [line for line in lines_of(tmp_path / "1") if line.get("case", "").startswith("51200")]
    assert [row["what"] for row in rows] == ["failed", "walk"]
    assert "does not fit" in rows[0]["error"]
    words = ["51200@4", "--unsloth", "32768,3", "--first-token", "51200", "--peers", "trl:51200", "--deadline-s", "0"]
    engine_longcontext.main([str(tmp_path / "2"), *words, "--dry"])
    skipped = [line["case"] for line in lines_of(tmp_path / "2") if line["what"] == "skipped"]
    assert skipped == ["pin", "51200@4", "unsloth", "first token 51200", "trl 51200"]


def test_a_wrong_case_is_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine_longcontext.main([str(tmp_path / "out.jsonl"), "300@4", "--last", "300@4,tiles=2", "--dry"])
    assert "no option tiles" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_unsloth_comes_after_the_cases_and_gets_the_host_memory(bench: Bench) -> None:
    bench.scorer.reserve_host(2**22, bench.device)
    bench.scorer.release_host()
    assert bench.scorer.host_bytes == 0
    assert run_case(bench, case_of("150@4,steps=1"))["finite"]
