"""Pairs of runs that share a history: forks, condensed runs; and outcomes that only the agent claims."""

from pathlib import Path
from typing import Any

import pytest
from pair_inputs import pairs_of, run
from render_inputs import result, system, turn, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import RenderConfig, SourceConfig, SplitConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.trajectory import Outcome, Trajectory
from tasks.ingest import ingest
from tasks.render import render
from tasks.renderer import Renderer

pytest_plugins = ("render_fixtures",)


LOOK = ("bash", '{"command": "ls"}')


def forked(better: Any, worse: Any) -> list[Trajectory]:
    """A run, and its fork: the turn that they share is the run's own, and copied context in the fork."""
    shared = turn("I look.", LOOK)
    return [
        run("main", better, shared, result("a.py"), turn("all of it is right")),
        run(
            "fork", worse, shared.model_copy(update={"author": "copied_context"}), result("a.py"), turn("all is wrong")
        ),
    ]


@pytest.mark.parametrize(("better", "worse"), [("resolved", "failed"), ("failed", "resolved")])
def test_two_sides_of_a_fork_score_the_same_region(
    better: str, worse: str, store: Store, model: Ref, renderer: Renderer
) -> None:
    made = pairs_of(forked(better, worse), store, model, render={"loss_on": ("thought", "action", "turn_end")})
    main, fork = "main-beside-fork", "fork-beside-main"
    assert made.sides() == [(main, fork) if better == "resolved" else (fork, main)]
    # "all" stands in the shared prefix, and is a decision of both
    assert made.scored(main, renderer) == "all of it is right<|im_end|>"
    assert made.scored(fork, renderer) == "all is wrong<|im_end|>"
    for row in (made.branches[main], made.branches[fork]):
        whole = made.branches[row["branch_id"].split("-")[0]]
        assert row["token_ids"] == whole["token_ids"]
        assert row["n_scored"] == sum(span["end"] - span["start"] for span in row["spans"] if span["weight"] > 0)
        edges = [(span["start"], span["end"]) for span in row["spans"]]
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == row["n_tokens"]
    (pair,) = made.rows
    assert pair["chosen_n_scored"] == made.branches[pair["chosen_branch_id"]]["n_scored"]


def test_a_side_that_only_copies_reasoning_has_none_to_compare(store: Store, model: Ref) -> None:
    main, fork = forked("resolved", "failed")
    sides = [
        item.model_copy(
            update={
                "messages": tuple(
                    message.model_copy(update={"reasoning": "hm"}) if message.tool_calls else message
                    for message in item.messages
                )
            }
        )
        for item in (main, fork)
    ]
    assert len(pairs_of(sides, store, model).rows) == 1  # the reasoning is in the shared history


def test_a_step_pair_of_a_fork(store: Store, model: Ref, renderer: Renderer) -> None:
    for better, worse in (("resolved", "failed"), ("failed", "resolved")):
        made = pairs_of(forked(better, worse), store, model, rules=("step",))
        assert {made.scored(name, renderer) for name in made.sides()[0]} == {
            "all of it is right<|im_end|>",
            "all is wrong<|im_end|>",
        }


def test_runs_that_share_their_turns_score_them_on_both_sides(store: Store, model: Ref) -> None:
    runs = [
        run(name, status, turn("", LOOK), result("a"), turn(name))
        for name, status in (("a", "resolved"), ("b", "failed"))
    ]
    made = pairs_of(runs, store, model)
    assert made.sides() == [("a", "b")]
    assert made.paired.derived_branches is None


def test_condensed_histories_are_compared_only_when_they_are_the_same(store: Store, model: Ref) -> None:
    def continued(name: str, status: Any, summary: str) -> Trajectory:
        carried = user(summary, "copied_context")
        return run(name, status, system(), user(), carried, turn(name)).model_copy(
            update={"parent_link": "continuation", "parent_id": "p"}
        )

    runs = [continued("a", "resolved", "read a.py"), continued("b", "failed", "read b.py")]
    with pytest.raises(UserError, match="different_opening 1"):
        pairs_of(runs, store, model)
    assert len(pairs_of([runs[0], continued("c", "failed", "read a.py")], store, model).rows) == 1


def test_an_agents_own_verdict_is_on_no_side(store: Store, model: Ref) -> None:
    def claimed(name: str, status: Any) -> Trajectory:
        outcome = Outcome(status=status, source="agent", score=float(status == "resolved"))
        return run(name, status, turn(name)).model_copy(update={"outcome": outcome})

    runs = [claimed("good", "resolved"), claimed("bad", "failed")]
    for config in ({}, {"rank_by": "score"}):
        with pytest.raises(UserError, match="runs of unknown outcome 2"):
            pairs_of(runs, store, model, **config)
        made = pairs_of(runs, store, model, render={"trust_agent_claims": True}, **config)
        assert made.sides() == [("good", "bad")]


@pytest.mark.parametrize(("trusted", "expected"), [(False, {"unknown"}), (True, {"resolved", "failed"})])
def test_verdicts_of_the_openhands_resolver(
    trusted: bool, expected: set[str], shared_dir: Path, store: Store, model: Ref
) -> None:
    path = shared_dir / "openhands" / "resolver_output.jsonl"
    runs = ingest(SourceConfig(paths=(str(path),)), store).trajectories
    claims = {(row["outcome"]["status"], row["outcome"]["source"]) for row in open_table(runs).to_pylist()}
    assert {source for _, source in claims} == {"agent"}
    branches = render(
        runs, model, RenderConfig(trust_agent_claims=trusted), SplitConfig(heldout_share=0), store
    ).branches
    assert set(open_table(branches)["outcome"].to_pylist()) <= expected
    if trusted:
        assert set(open_table(branches)["outcome"].to_pylist()) <= {status for status, _ in claims}
