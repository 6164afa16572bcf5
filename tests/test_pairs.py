"""Pairs: the rules, the guards, the caps, and the natural groups of the shared runs."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_inputs import pairs_of, run
from render_inputs import result, system, turn, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import PairsConfig, RenderConfig, SourceConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.trajectory import Message, Trajectory
from tasks.ingest import ingest
from tasks.pair_rules import Branch, Candidate, in_order, n_shared_prefix
from tasks.pairs import build_pairs
from tasks.render import render
from tasks.renderer import Renderer

pytest_plugins = ("render_fixtures",)


def test_resolved_over_failed_and_unknown_on_no_side(store: Store, model: Ref) -> None:
    made = pairs_of(
        [
            run("good", "resolved", turn("yes")),
            run("bad", "failed", turn("no")),
            run("who", "unknown", turn("maybe")),
            run("other", "failed", turn("no"), task="another task"),
        ],
        store,
        model,
    )
    assert made.sides() == [("good", "bad")]
    (row,) = made.rows
    chosen, rejected = made.branches["good"], made.branches["bad"]
    shared = next(i for i, (a, b) in enumerate(zip(chosen["token_ids"], rejected["token_ids"], strict=False)) if a != b)
    assert row["n_shared_prefix"] == shared > 10
    assert (row["chosen_n_tokens"], row["rejected_n_scored"]) == (chosen["n_tokens"], rejected["n_scored"])
    assert made.paired.report.shared_prefix_histogram["0-255"] == 1


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ([turn("same")], [turn("same")], "equal_sides"),
        ([turn("a", reasoning="hm")], [turn("b")], "reasoning_on_one_side"),
        ([system("X"), user(), turn("a")], [system("Y"), user(), turn("b")], "different_opening"),
        ([system(), user("X"), turn("a")], [system(), user("Y"), turn("b")], "different_opening"),
        ([turn("a")], [turn("b " * 200)], "length_ratio"),
    ],
)
def test_guards_refuse_and_count(
    good: list[Message], bad: list[Message], reason: str, store: Store, model: Ref
) -> None:
    runs = [run("good", "resolved", *good), run("bad", "failed", *bad)]
    with pytest.raises(UserError, match=f"no pair found.*{reason} 1"):
        pairs_of(runs, store, model, max_length_ratio=3.0)


def test_a_simulated_user_may_open_otherwise(store: Store, model: Ref) -> None:
    sides = [
        run(name, status, system(), user(name, "simulated_user"), turn(name))
        for name, status in (("good", "resolved"), ("bad", "failed"))
    ]
    assert pairs_of(sides, store, model).sides() == [("good", "bad")]


def test_no_pair_says_why_with_counts(store: Store, model: Ref) -> None:
    runs = [run("a", "resolved", turn("a")), run("b", "unknown", turn("b"), task="u")]
    with pytest.raises(
        UserError, match=r"tasks 2, tasks with a single run 2, tasks with both outcomes 0, runs of unknown outcome 1"
    ):
        pairs_of(runs, store, model)


def test_single_turns_are_refused(store: Store, model: Ref) -> None:
    runs = [run("a", "resolved", turn("a"), user(), turn("b")), run("b", "failed", turn("c"))]
    with pytest.raises(UserError, match="single turns"):
        pairs_of(runs, store, model, render={"mode": "turn"})


WORDS = ("alpha", "beta", "gamma", "delta", "kappa", "sigma")


def many() -> list[Trajectory]:
    return [
        run(f"{status}{index}", status, turn(" ".join([word, status, str(index)] * 6)))
        for status in ("resolved", "failed")
        for index, word in enumerate(WORDS[:3])
    ]


def test_the_cap_holds_and_balance_uses_every_run(store: Store, model: Ref) -> None:
    made = pairs_of(many(), store, model, max_pairs_per_task=3)
    assert len(made.rows) == 3
    assert made.paired.report.rejected_by_reason["over_cap"] == 6
    assert len({side for pair in made.sides() for side in pair}) == 6
    assert made.sides() == pairs_of(list(reversed(many())), store, model, max_pairs_per_task=3).sides()


def least_used_first(candidates: list[Candidate], config: PairsConfig) -> list[Candidate]:
    """The balanced order by its definition: look through all that remain, every time."""
    drawn = {
        pair: hashlib.sha256(
            f"{config.seed}\0{pair.rule}\0{pair.chosen.branch_id}\0{pair.rejected.branch_id}".encode()
        ).digest()
        for pair in candidates
    }
    remaining, used, ordered = list(candidates), Counter(), []
    while remaining:
        pair = min(remaining, key=lambda pair: (used[pair.chosen.row] + used[pair.rejected.row], drawn[pair]))
        remaining.remove(pair)
        ordered.append(pair)
        used.update((pair.chosen.row, pair.rejected.row))
    return ordered


def branch(row: int) -> Branch:
    return Branch(row, f"b{row}", "", "task", "train", "resolved", None, 10, 5, False, "")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda e: e[0] != e[1]), unique=True, max_size=40),
    st.integers(0, 3),
)
def test_the_balanced_order_is_least_used_first(edges: list[tuple[int, int]], seed: int) -> None:
    candidates = [Candidate("outcome", branch(chosen), branch(rejected)) for chosen, rejected in edges]
    config = PairsConfig(seed=seed)
    expected = least_used_first(candidates, config)
    assert list(in_order(candidates, config, lambda _: 0)) == expected
    assert list(in_order(candidates[::-1], config, lambda _: 0)) == expected


def test_hardest_first_takes_the_longest_shared_history(store: Store, model: Ref) -> None:
    call = ("bash", '{"command": "ls"}')
    runs = [
        run("good", "resolved", turn("", call), result("a"), turn("right")),
        run("near", "failed", turn("", call), result("a"), turn("wrong")),
        run("far", "failed", turn("nothing to do")),
    ]
    made = pairs_of(runs, store, model, order="hardest_first", max_pairs_per_task=1)
    assert made.sides() == [("good", "near")]


def test_near_duplicates_are_removed(store: Store, model: Ref) -> None:
    text = " ".join(f"word{index}" for index in range(120))
    runs = [
        run("good", "resolved", turn("short")),
        run("bad1", "failed", turn(text)),
        run("bad2", "failed", turn(text + " end")),
    ]
    made = pairs_of(runs, store, model, render={"max_scored_share": 1.0})
    assert len(made.rows) == 1
    assert made.paired.report.rejected_by_reason == {"near_duplicate": 1}


def test_efficiency_needs_the_margin(store: Store, model: Ref) -> None:
    runs = [run(name, "resolved", turn(f"{name} word " * n)) for name, n in (("a", 20), ("b", 24), ("c", 200))]
    made = pairs_of(runs, store, model, rules=("efficiency",), render={"max_scored_share": 1.0})
    assert sorted(made.sides()) == [("a", "c"), ("b", "c")]


def test_scores_can_rank(store: Store, model: Ref) -> None:
    runs = [run(name, "unknown", turn(name), score=score) for name, score in (("a", 0.9), ("b", 0.85), ("c", 0.2))]
    made = pairs_of(runs, store, model, rank_by="score", min_score_gap=0.1)
    assert sorted(made.sides()) == [("a", "c"), ("b", "c")]


def test_step_compares_the_first_turn_that_differs(store: Store, model: Ref, renderer: Renderer) -> None:
    look, edit = ("bash", '{"command": "ls"}'), ("bash", '{"command": "sed"}')
    runs = [
        run("good", "resolved", turn("", look), result("a.py"), turn("", edit), result("ok"), turn("fixed")),
        run("bad", "failed", turn("", look), result("a.py"), turn("give up")),
    ]
    made = pairs_of(runs, store, model, rules=("step",), render={"loss_on": ("action", "turn_end")})
    assert made.sides() == [("good-step-m4", "bad-step-m4")]
    chosen, rejected = (made.branches[name] for name in made.sides()[0])
    (row,) = made.rows
    assert chosen["token_ids"][: row["n_shared_prefix"]] == rejected["token_ids"][: row["n_shared_prefix"]]
    assert made.scored("good-step-m4", renderer).startswith(
        '<tool_call>\n{"name": "bash", "arguments": {"command": "sed'
    )
    assert made.scored("bad-step-m4", renderer) == "give up<|im_end|>"
    assert chosen["n_tokens"] == chosen["spans"][-1]["end"] == len(chosen["token_ids"])


def test_step_needs_a_shared_turn_and_the_same_observations(store: Store, model: Ref) -> None:
    look = ("bash", '{"command": "ls"}')
    apart = [run("good", "resolved", turn("a")), run("bad", "failed", turn("b"))]
    with pytest.raises(UserError, match="no pair found"):
        pairs_of(apart, store, model, rules=("step",))
    assert pairs_of(apart, store, model, rules=("step",), step_min_shared_turns=0).rows
    observed = [
        run(name, status, turn("", look), result(name), turn(name))
        for name, status in (("good", "resolved"), ("bad", "failed"))
    ]
    with pytest.raises(UserError, match="no pair found"):
        pairs_of(observed, store, model, rules=("step",))


def test_repair_puts_the_fix_in_the_failed_turns_place(store: Store, model: Ref, renderer: Renderer) -> None:
    wrong, right = '{"command": "python -m pytset tests"}', '{"command": "python -m pytest tests"}'
    one = run(
        "r",
        "unknown",
        turn("I test.", ("bash", wrong)),
        result("No module named pytset", failed=True),
        turn("", ("bash", '{"command": "git status"}')),
        result("clean", failed=False),
        turn("A typo.", ("bash", right)),
        result("1 passed", failed=False),
        turn("done"),
    )
    # failed turns are left out of SFT here, and still are the rejected side
    made = pairs_of([one], store, model, rules=("repair",), render={"score_failed_turns": False})
    assert made.sides() == [("r-repair-m2-fix-m6", "r-repair-m2")]
    assert right in made.scored("r-repair-m2-fix-m6", renderer)
    assert wrong in made.scored("r-repair-m2", renderer)
    fixed = run("f", "unknown", turn("A typo.", ("bash", right)))
    alone = pairs_of([fixed, run("x", "resolved", turn("x")), run("y", "failed", turn("y"))], store, model)
    token_ids = made.branches["r-repair-m2-fix-m6"]["token_ids"]
    assert token_ids == alone.branches["f"]["token_ids"][: len(token_ids)]  # as if the model had said so at once


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_n_shared_prefix(a: list[int], b: list[int]) -> None:
    shared = n_shared_prefix(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


NATURAL = {
    # folder: (task, chosen file, rejected file), read off the folders' reports and rewards by hand
    "mini-swe-agent": {
        ("pylint-dev__astroid-1196", "deepseek_chat_dev", "deepseek_lite_dev_noparallel"),
        ("pylint-dev__astroid-1866", "deepseek_chat_dev", "deepseek_lite_dev_noparallel"),
        ("sqlfluff__sqlfluff-1733", "deepseek_chat_dev", "deepseek_chat_dev_rerun"),
    },
    "openai-chat-tau-bench": {
        ("tau-bench/airline/21", "airline_task21_trial1.json", "airline_task21_trial0.json"),
        ("tau-bench/airline/37", "airline_task37_trial3.json", "airline_task37_trial0.json"),
        ("tau-bench/airline/43", "airline_task43_trial0.json", "airline_task43_trial2.json"),
        ("tau-bench/airline/44", "airline_task44_trial0.json", "airline_task44_trial3.json"),
    },
}


@pytest.mark.parametrize("folder", NATURAL)
def test_the_natural_groups_of_the_shared_runs(folder: str, shared_dir: Path, store: Store, model: Ref) -> None:
    runs = ingest(SourceConfig(paths=(str(shared_dir / folder),)), store).trajectories
    split = SplitConfig(heldout_share=0)
    branches = render(runs, model, RenderConfig(), split, store).branches
    paired = build_pairs(branches, runs, PairsConfig(), store)
    paths = {row["trajectory_id"]: Path(row["source_path"]) for row in open_table(runs).to_pylist()}

    def shown(branch_id: str) -> str:
        path = paths[branch_id]
        return path.parent.name if folder == "mini-swe-agent" else path.name

    rows = open_table(paired.pairs).to_pylist()
    assert {
        (row["task_id"], shown(row["chosen_branch_id"]), shown(row["rejected_branch_id"])) for row in rows
    } == NATURAL[folder]
    assert len(rows) == len(NATURAL[folder])
    assert all(row["chosen_n_scored"] > 0 and row["rejected_n_scored"] > 0 for row in rows)  # tau-21 and tau-44 too


def test_the_verifiers_prompt(shared_dir: Path, store: Store, model: Ref) -> None:
    runs = ingest(SourceConfig(paths=(str(shared_dir / "verifiers"),)), store).trajectories
    branches = render(runs, model, RenderConfig(), SplitConfig(heldout_share=0), store).branches
    rows = open_table(build_pairs(branches, runs, PairsConfig(), store).pairs).to_pylist()
    scores = {row["branch_id"]: row["score"] for row in open_table(branches).to_pylist()}
    assert [(scores[row["chosen_branch_id"]], scores[row["rejected_branch_id"]]) for row in rows] == [(1, 0), (1, 0)]
    assert len({row["task_id"] for row in rows}) == len({row["rejected_branch_id"] for row in rows}) == 1
    assert len({row["chosen_branch_id"] for row in rows}) == 2
