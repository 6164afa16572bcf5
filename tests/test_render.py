"""The render stage: tables, gates, drops, row modes; and what `loss_on` does to a real run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from render_inputs import (
    result,
    run_of,
    scored_text,
    stock_template,
    stored,
    system,
    trajectory,
    turn,
    user,
)

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import RenderConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.reports import Rendered
from schemas.trajectory import Message, Trajectory
from tasks.branch_rows import opening_sha256
from tasks.render import render
from tasks.renderer import Renderer
from tasks.sources import parse

pytest_plugins = ("render_fixtures",)


def rendered(runs: Sequence[Trajectory], store: Store, model: Ref, **config: Any) -> Rendered:
    return render(stored(runs, store), model, RenderConfig(**config), SplitConfig(), store)


CALLED = (
    system(),
    user(),
    turn("I look.", ("bash", '{"command": "ls"}')),
    result("a.py"),
    turn("It is fixed."),
)


def test_a_table_row_says_what_the_run_was(store: Store, model: Ref, renderer: Renderer) -> None:
    result_ = rendered([trajectory(*CALLED)], store, model)
    (row,) = open_table(result_.branches).to_pylist()
    run = run_of(CALLED, renderer)
    assert row["token_ids"] == run.token_ids.tolist()
    assert row["n_tokens"] == len(run.token_ids)
    assert row["n_scored"] == run.n_scored == sum(s["end"] - s["start"] for s in row["spans"] if s["weight"] > 0)
    assert [row["spans"][0]["start"], row["spans"][-1]["end"]] == [0, row["n_tokens"]]
    assert (row["outcome"], row["task_id"], row["has_reasoning"]) == ("resolved", "task", False)
    report = result_.report
    assert (report.n_branches, report.n_tokens, report.n_scored) == (1, row["n_tokens"], row["n_scored"])
    assert sum(report.tokens_by_kind.values()) == row["n_tokens"]
    assert report.kept_at_limit == dict.fromkeys(("16K", "32K", "48K", "64K", "80K", "128K", "256K"), 1)


def test_too_long_is_dropped_listed_and_never_cut(store: Store, model: Ref) -> None:
    long = trajectory(system(), user("word " * 400), turn("done"), trajectory_id="long")
    result_ = rendered([trajectory(*CALLED), long], store, model, max_tokens=300)
    assert [row["branch_id"] for row in open_table(result_.branches).to_pylist()] == ["t0"]
    (dropped,) = result_.report.dropped
    assert "long" in dropped.what
    assert "more than max_tokens = 300" in dropped.reason
    assert result_.report.length_tokens["max"] > 400  # measured before the drop


@pytest.mark.parametrize(
    ("messages", "config", "reason"),
    [
        ((system(), user(), turn("done", author="demonstration")), {}, "no turn of the policy model"),
        ((system(), user(), turn("done")), {"loss_on": ("thought",)}, "no scored token"),
        ((user("a"), turn("word " * 200)), {}, "above max_scored_share"),
        ((), {}, "no message"),
    ],
)
def test_gates(messages: tuple[Message, ...], config: dict[str, Any], reason: str, store: Store, model: Ref) -> None:
    bad = trajectory(*messages, trajectory_id="bad")
    good = trajectory(system(), user(), turn("I look.", ("bash", "{}")))
    result_ = rendered([good, bad], store, model, **config)
    assert [dropped.reason for dropped in result_.report.dropped if reason in dropped.reason]
    with pytest.raises(UserError, match=reason):
        rendered([bad], store, model, **config)


def test_a_repeated_trajectory_id_is_dropped(store: Store, model: Ref) -> None:
    result_ = rendered([trajectory(*CALLED), trajectory(*CALLED)], store, model)
    assert (result_.report.n_branches, len(result_.report.dropped)) == (1, 1)


def test_turn_mode_scores_what_trajectory_mode_scores(store: Store, model: Ref) -> None:
    runs = [
        trajectory(*CALLED),
        trajectory(*CALLED, user("More."), turn("", ("bash", "{}"), reasoning="hm"), turn("end"), trajectory_id="t1"),
    ]
    config = {"loss_on": ("reasoning", "thought", "action", "turn_end")}
    whole = open_table(rendered(runs, store, model, **config).branches).to_pylist()
    turns = open_table(rendered(runs, store, model, mode="turn", **config).branches).to_pylist()
    for row in whole:
        rows = [other for other in turns if other["trajectory_id"] == row["trajectory_id"]]
        scored: dict[int, float] = {}
        for other in rows:
            assert other["token_ids"] == row["token_ids"][: other["n_tokens"]]  # the history is a prefix of the run
            last = other["spans"][-1]
            assert (last["kind"], last["end"]) == (5, other["n_tokens"])  # and ends with the turn's stop token
            for span in other["spans"]:
                for at in range(span["start"], span["end"]):
                    if span["weight"] > 0:
                        assert at not in scored  # once
                        scored[at] = span["weight"]
        expected = {
            at: span["weight"]
            for span in row["spans"]
            if span["weight"] > 0
            for at in range(span["start"], span["end"])
        }
        assert scored == expected
        assert len(rows) == len({span["message"] for span in row["spans"] if span["weight"] > 0})


def test_tool_arguments_keep_their_text(renderer: Renderer) -> None:
    arguments = '{"a":1,  "b" :[ 1,2 ], "c": "é\\u00e9 <|im_end|>"}'
    run = run_of((user(), turn("", ("bash", arguments))), renderer)
    assert (
        scored_text(run, renderer)
        == f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    )


def test_opening_leaves_out_simulated_users() -> None:
    def opening(*messages: Message) -> str:
        return opening_sha256(trajectory(*messages))

    assert opening(system(), user("a")) != opening(system(), user("b"))
    simulated = [user(text, "simulated_user") for text in "ab"]
    assert opening(system(), simulated[0]) == opening(system(), simulated[1])
    assert opening(system("x"), simulated[0]) != opening(system("y"), simulated[0])


def test_the_stock_qwen3_template_is_refused_with_the_token(store: Store, model: Ref, tmp_path: Path) -> None:
    path = tmp_path / "qwen3.jinja"
    path.write_text(stock_template("qwen3.jinja"), encoding="utf-8")
    runs = stored([trajectory(system(), user(), turn("a", reasoning="b"), user(), turn("c", reasoning="d"))], store)
    with pytest.raises(UserError, match=r"token \d+ is \d+ '<think>' alone and \d+ 'I' in the whole conversation"):
        render(runs, model, RenderConfig(), SplitConfig(), store, chat_template=str(path))


def test_a_template_that_fails_on_this_corpus_only_is_refused(store: Store, model: Ref, tmp_path: Path) -> None:
    source = stock_template("qwen3_training.jinja").replace(
        "{{- '<|im_start|>' + message.role + '\\n' + content",
        "{{- '<|im_start|>' + message.role + '\\n' + ('SHORT' if messages | length > 5 else '') + content",
    )
    path = tmp_path / "length.jinja"
    path.write_text(source, encoding="utf-8")
    short, long = trajectory(*CALLED), trajectory(*CALLED, user(), turn("x"), trajectory_id="long")
    render(stored([short], store), model, RenderConfig(), SplitConfig(), store, chat_template=str(path))
    with pytest.raises(UserError, match=r"test.json .long.*token 13 is \d+ 'The' alone and \d+ 'S'"):
        render(stored([long], store), model, RenderConfig(), SplitConfig(), store, chat_template=str(path))


GOLDEN_ACTION = (
    '<tool_call>\n{"name": "get_user_details", "arguments": {"user_id":"daiki_lee_6144"}}\n</tool_call><|im_end|>'
)
GOLDEN_THOUGHT = (
    "No problem, I can retrieve your reservation details using your user ID. Please hold on for a moment.\n"
)


@pytest.mark.parametrize(
    ("loss_on", "golden"),
    [
        (("action", "turn_end"), GOLDEN_ACTION),
        (("action",), GOLDEN_ACTION.removesuffix("<|im_end|>")),
        (("thought",), GOLDEN_THOUGHT),
        (("thought", "action", "turn_end"), GOLDEN_THOUGHT + GOLDEN_ACTION),
        (("turn_end",), "<|im_end|>"),
    ],
)
def test_loss_on_changes_what_is_scored_in_a_real_run(
    loss_on: tuple[str, ...], golden: str, shared_dir: Path, renderer: Renderer
) -> None:
    path = shared_dir / "openai-chat-tau-bench" / "airline_task21_trial0.json"
    (run,) = parse(path.read_bytes(), path.name)
    called = next(i for i, message in enumerate(run.messages) if message.tool_calls)
    labelled = run_of(run.messages, renderer, loss_on=loss_on)
    only_there = [
        weight if span.message == called else 0.0 for span, weight in zip(labelled.spans, labelled.weights, strict=True)
    ]
    one_turn = type(labelled)(
        labelled.rendering, labelled.char_spans, labelled.token_ids, labelled.spans, tuple(only_there)
    )
    assert scored_text(one_turn, renderer) == golden
    if loss_on == ("thought",):
        assert scored_text(labelled, renderer) == golden  # the run's only text beside a call
