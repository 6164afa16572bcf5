"""Leaks between training and held-out: equal and nearly equal task texts and scored texts, reported or dropped."""

from collections.abc import Sequence
from typing import Any

import pytest
from render_inputs import stored, system, trajectory, turn, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import RenderConfig, SplitConfig
from schemas.refs import Ref
from schemas.reports import Rendered
from schemas.trajectory import Message, Trajectory
from tasks.leaks import MIN_SCORED_TOKENS
from tasks.render import render
from tasks.splits import side

pytest_plugins = ("render_fixtures",)


SPLIT = SplitConfig(heldout_share=0.5)
TRAIN, HELDOUT = (
    [task for task in map(str, range(40)) if side(task, None, SPLIT) == wanted] for wanted in ("train", "heldout")
)


def run(name: str, task: str, *messages: Message) -> Trajectory:
    return trajectory(system(), *messages, trajectory_id=name, task_id=task)


def rendered(runs: Sequence[Trajectory], store: Store, model: Ref, split: Any = None, **config: Any) -> Rendered:
    return render(stored(runs, store), model, RenderConfig(max_scored_share=1.0, **config), split or SPLIT, store)


def found(result: Rendered) -> list[tuple[str, str, str, str]]:
    leaks = result.report.leaks
    return [(leak.kind, leak.text, leak.train.split("(")[1][:-1], leak.heldout.split("(")[1][:-1]) for leak in leaks]


def words(start: int, n: int) -> str:
    return " ".join(f"word{number}" for number in range(start, start + n))


def test_equal_and_similar_task_texts(store: Store, model: Ref) -> None:
    runs = [
        run("h", HELDOUT[0], user(words(0, 200)), turn("a")),
        run("same", TRAIN[0], user("  " + words(0, 200).replace(" ", "\n") + "\n"), turn("b")),  # blanks do not count
        run("near", TRAIN[1], user(words(0, 200) + " more"), turn("c")),
        run("half", TRAIN[2], user(words(100, 200)), turn("d")),
        run("other", TRAIN[3], user(words(1000, 200)), turn("e")),
        run("h2", HELDOUT[1], user(words(0, 200)), turn("f")),  # both held out: no leak
    ]
    result = rendered(runs, store, model)
    assert found(result) == [("equal", "task", "same", "h"), ("similar", "task", "near", "h")]
    assert [leak.similarity for leak in result.report.leaks] == [1.0, pytest.approx(193 / 194, abs=0.03)]
    assert result.report.n_leaks == {"equal task text": 1, "similar task text": 1}
    assert result.report.n_branches == 6  # reported, and still there


def test_an_agents_instructions_around_the_issue_are_no_leak(store: Store, model: Ref) -> None:
    def prompt(issue: str) -> Message:
        return user(f"<pr_description>\n{issue}\n</pr_description>\n{words(0, 600)}", "harness")

    runs = [
        run("h", HELDOUT[0], prompt("parsing of dates fails"), turn("a")),
        run("other", TRAIN[0], prompt("the cache is never emptied"), turn("b")),
        run("same", TRAIN[1], user(f"ISSUE:\nparsing of dates  fails\n\nINSTRUCTIONS:\n{words(900, 50)}"), turn("c")),
    ]
    assert found(rendered(runs, store, model)) == [("equal", "task", "same", "h")]


def test_equal_and_similar_scored_text(store: Store, model: Ref) -> None:
    runs = [
        run("h", HELDOUT[0], user("one"), turn(words(0, 100))),
        run("same", TRAIN[0], user("two"), turn(words(0, 100))),
        run("near", TRAIN[1], user("three"), turn(words(0, 100) + " end")),
        run("other", TRAIN[2], user("four"), turn(words(500, 100))),
        run("h-short", HELDOUT[1], user("five"), turn("done")),
        run("short", TRAIN[3], user("six"), turn("done")),
    ]
    result = rendered(runs, store, model)
    assert found(result) == [("equal", "scored", "same", "h"), ("similar", "scored", "near", "h")]
    assert rendered(runs[-2:], store, model).report.n_scored < MIN_SCORED_TOKENS  # why "done" tells nothing


def test_a_simulated_users_words_are_no_task(store: Store, model: Ref) -> None:
    runs = [
        run(name, task, user(words(0, 50), "simulated_user"), turn(name))
        for name, task in (("h", HELDOUT[0]), ("t", TRAIN[0]))
    ]
    assert found(rendered(runs, store, model)) == []


@pytest.mark.parametrize("mode", ["trajectory", "turn"])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_drop_takes_the_training_run_away(mode: str, num_proc: int, store: Store, model: Ref) -> None:
    runs = [
        run("leaking", TRAIN[0], user("the same"), turn("a"), user("go on"), turn("b")),  # before the held-out one
        run("h", HELDOUT[0], user("the same"), turn("a")),
        run("clean", TRAIN[1], user("another"), turn("b")),
    ]
    split = SPLIT.model_copy(update={"on_leak": "drop"})
    result = rendered(runs, store, model, split, mode=mode, num_proc=num_proc)
    assert set(open_table(result.branches)["trajectory_id"].to_pylist()) == {"h", "clean"}
    assert {dropped.reason for dropped in result.report.dropped} == {
        "leak: the same task text as held-out test.json (h)"
    }
    assert len(result.report.dropped) == (2 if mode == "turn" else 1)
    assert sum(result.report.n_leaks.values()) == 1  # a run counts once, however many rows it has
    assert result.report.by_split["train"] == 1
