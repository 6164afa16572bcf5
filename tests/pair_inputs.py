"""Runs, rendered and paired: what the tests of pairs share."""

from collections.abc import Sequence
from typing import Any

from render_inputs import decode, stored, system, trajectory, user

from artifacts.store import Store
from artifacts.tables import open_table
from schemas.config import PairsConfig, RenderConfig, SplitConfig
from schemas.refs import Ref
from schemas.reports import Paired, Rendered
from schemas.trajectory import Message, Outcome, Trajectory
from tasks.pairs import build_pairs
from tasks.render import render
from tasks.renderer import Renderer


def run(name: str, status: Any, *messages: Message, score: float | None = None, task: str = "task") -> Trajectory:
    outcome = Outcome(status=status, source="reward", score=score)
    opening = () if messages and messages[0].role == "system" else (system(), user())
    return trajectory(*opening, *messages, trajectory_id=name, task_id=task, outcome=outcome)


class Made:
    """Runs, rendered and paired; every task in training unless a split says otherwise."""

    def __init__(self, runs: Sequence[Trajectory], store: Store, model: Ref, render_config: Any, config: Any) -> None:
        self.trajectories = stored(runs, store)
        split = SplitConfig(heldout_share=0)
        self.rendered: Rendered = render(self.trajectories, model, RenderConfig(**render_config), split, store)
        self.paired: Paired = build_pairs(self.rendered.branches, self.trajectories, PairsConfig(**config), store)
        self.rows = open_table(self.paired.pairs).to_pylist()
        self.branches = {row["branch_id"]: row for row in open_table(self.rendered.branches).to_pylist()}
        if self.paired.derived_branches:
            self.branches |= {row["branch_id"]: row for row in open_table(self.paired.derived_branches).to_pylist()}

    def sides(self) -> list[tuple[str, str]]:
        return [(row["chosen_branch_id"], row["rejected_branch_id"]) for row in self.rows]

    def scored(self, branch_id: str, renderer: Renderer) -> str:
        row = self.branches[branch_id]
        return "".join(
            decode(row["token_ids"][span["start"] : span["end"]], renderer)
            for span in row["spans"]
            if span["weight"] > 0
        )


def pairs_of(runs: Sequence[Trajectory], store: Store, model: Ref, **config: Any) -> Made:
    return Made(runs, store, model, config.pop("render", {}), config)
