"""Cards: what they say, that data cannot break them, and that their pictures are pictures."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import pytest

from artifacts import charts
from artifacts.cards import card, run_card
from artifacts.markdown import DROPPED_SHOWN, duration, table
from artifacts.summaries import summary
from schemas.refs import Ref
from schemas.reports import (
    Dropped,
    Ingested,
    IngestReport,
    Leak,
    Promoted,
    PromoteReport,
    Rendered,
    RenderReport,
    StageResult,
    Trained,
    TrainPoint,
    TrainReport,
)
from schemas.runs import RunReport, StageRun

REF = Ref(
    kind="trajectories", path="/store/trajectories/ab/trajectories.arrow", sha256="ab" * 32, n_bytes=2**20, n_rows=3
)


def ingested(**fields: object) -> Ingested:
    report = {
        "n_files": 4,
        "n_trajectories": 3,
        "n_turns": 9,
        "by_format": {"tau-bench": 3},
        "by_outcome": {"failed": 1, "resolved": 2},
    }
    return Ingested(trajectories=REF, report=IngestReport.model_validate(report | fields))


def picture(uri: str) -> ElementTree.Element:
    head, _, data = uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    return ElementTree.fromstring(base64.b64decode(data))


def words(svg: ElementTree.Element) -> set[str]:
    return {text.strip() for element in svg.iter() if (text := element.text) and text.strip()}


def test_bars_and_lines_are_svg_with_their_labels() -> None:
    assert {"16K", "32K", "12", "runs", "tokens"} <= words(
        picture(charts.bars({"16K": 7, "32K": 12}, x_label="tokens", y_label="runs"))
    )
    panels = {"loss": {"loss": [2.0, 1.0]}, "log-probability": {"chosen": [-1.0, None], "rejected": [-2.0, -3.0]}}
    assert {"loss", "log-probability", "chosen", "rejected", "step"} <= words(picture(charts.lines([1, 2], panels)))


def test_equal_data_draw_equal_bytes() -> None:
    assert charts.bars({"a": 1.5}, x_label="x", y_label="y") == charts.bars({"a": 1.5}, x_label="x", y_label="y")


def test_text_of_the_data_cannot_break_a_table() -> None:
    nasty = Dropped(what="a|b.json", reason="line one\nline two <script>alert(1)</script> *x* ![p](q) `c`")
    page = card(ingested(quarantined=(nasty,))).markdown
    (row,) = (line for line in page.splitlines() if "line one" in line)
    assert row == (r"| a\|b.json | line one line two &lt;script>alert(1)&lt;/script> \*x\* !\[p\](q) \`c\` |")


def test_columns_of_numbers_stand_to_the_right() -> None:
    rows = [("a", "1,024", "n/a", "9.5%", "2 to 3"), ("7", "-0.5", "+1e-05", "", "4")]
    assert table(("name", "n", "x", "share", "range"), rows).splitlines()[1] == "| --- | ---: | ---: | ---: | --- |"


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.34, "8.3 s"), (125.4, "2 min 5 s"), (3_599.6, "1 h 0 min"), (45_296.0, "12 h 34 min")]
)
def test_durations_are_said_as_a_person_would(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_long_lists_are_cut_and_say_so() -> None:
    many = tuple(Dropped(what=f"{n}.json", reason="not JSON") for n in range(1000))
    page = card(ingested(quarantined=many)).markdown
    assert page.count("not JSON") == DROPPED_SHOWN
    assert "980 more" in page
    assert "(1,000)" in page


def test_data_that_was_not_redacted_is_told_loudly() -> None:
    assert "Not redacted" in card(ingested(redact=False)).markdown
    assert "Not redacted" not in card(ingested()).markdown


def test_every_kind_of_result_has_a_card_and_a_summary() -> None:
    for kind in StageResult.registry.values():
        if kind is not RunReport:
            assert card.dispatch(kind) is not card.dispatch(object)
            assert summary.dispatch(kind) is not summary.dispatch(object)


def test_training_card_says_what_was_measured() -> None:
    report = TrainReport(
        stage="simpo",
        n_examples=8,
        n_steps=4,
        n_tokens_seen=1000,
        n_tokens_scored=100,
        padding_share=0.01,
        first_loss=1.5,
        last_loss=1.0,
        first_margin=-0.25,
        last_margin=0.5,
        wall_s=12.0,
        world_size=2,
        backend="gloo",
        plan="parallel",
        peak_memory_bytes=3 * 2**30,
        settings={"attention": "sdpa"},
    )
    result = Trained(adapter=REF, report=report)
    page = card(result)
    assert page.key == "simpo"
    shown = (
        "1.5000 → 1.0000",
        "-0.2500 → +0.5000 nats per token",
        "3.00 GiB of host memory",
        "| plan | parallel |",
        "| collectives | gloo |",
        "| attention | sdpa |",
    )
    for text in shown:
        assert text in page.markdown
    assert "stopped early" not in page.markdown
    assert "resumed" not in page.markdown
    early = report.model_copy(update={"stopped_early": "the margin stopped rising", "resumed_from_step": 2})
    again = card(Trained(adapter=REF, report=early)).markdown
    assert "| stopped early | the margin stopped rising |" in again
    assert "| resumed from step | 2 |" in again
    assert summary(result) == "loss 1.5000 → 1.0000 in 4 steps; margin -0.2500 → +0.5000"


@pytest.mark.parametrize("allocated_bytes", [None, 2**30])
def test_memory_of_a_gpu_is_a_curve(allocated_bytes: int | None) -> None:
    report = TrainReport(
        stage="sft",
        n_examples=1,
        n_steps=2,
        n_tokens_seen=10,
        n_tokens_scored=1,
        padding_share=0.0,
        first_loss=1.0,
        last_loss=1.0,
        wall_s=1.0,
        world_size=1,
        backend="none",
        plan="single",
        peak_memory_bytes=1,
        curve=tuple(
            TrainPoint(
                step=step,
                epoch=1.0,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1.0,
                tokens_per_s=1.0,
                allocated_bytes=allocated_bytes,
                reserved_bytes=allocated_bytes,
            )
            for step in (1, 2)
        ),
    )
    (uri,) = re.findall(r"!\[training curves\]\((\S+)\)", card(Trained(adapter=REF, report=report)).markdown)
    labels = {"GPU memory, peak of the step (GiB)", "allocated", "reserved"}
    assert words(picture(uri)) & labels == (labels if allocated_bytes else set())


@pytest.mark.parametrize(("promoted", "text"), [(True, "**Promoted**"), (False, "**Not promoted**")])
def test_promotion_card_gives_its_reasons(promoted: bool, text: str) -> None:
    report = PromoteReport(
        promoted=promoted, reasons=("few pairs", "worse"), candidate_sha256="a" * 64, incumbent_sha256=None
    )
    page = card(Promoted(report=report)).markdown
    assert text in page
    assert "- few pairs\n- worse" in page


def test_run_card_has_a_line_for_each_stage() -> None:
    report = RunReport(
        run_id="r",
        name="demo",
        store="/store",
        status="failed",
        message="pairs: no pair | found",
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=2.0,
        inputs_sha256="",
        stages=(StageRun(stage="ingest", outcome="cached", wall_s=0.1, summary="3 runs"),),
    )
    page = run_card(report).markdown
    assert "| ingest | cached | 0.1 s | 3 runs |" in page
    assert "no pair \\| found" in page


def test_leaks_between_the_sides_are_on_the_card_and_in_the_summary() -> None:
    report = RenderReport(
        n_branches=2,
        n_tokens=100,
        n_scored=10,
        tokens_by_kind={"action": 10},
        by_split={"train": 1, "heldout": 1},
        length_tokens={"max": 50},
        kept_at_limit={"16384": 2},
        template="qwen3",
    )
    clean = Rendered(branches=REF, report=report)
    leak = Leak(kind="similar", text="task", train="run-a", heldout="run-b", similarity=0.93)
    leaking = clean.model_copy(
        update={"report": report.model_copy(update={"n_leaks": {"similar task text": 1}, "leaks": (leak,)})}
    )
    assert "leak" not in summary(clean) + card(clean).markdown
    assert summary(leaking).endswith("1 training runs leak into the held-out side")
    assert "| run-a | run-b | similar task text | 0.93 |" in card(leaking).markdown
