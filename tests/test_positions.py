"""Branches beyond the positions that a model was trained on are trained on, and never silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from render_inputs import turn, user
from test_plan import planned
from test_render import rendered, trajectory

from artifacts.cards import card
from artifacts.store import Store
from artifacts.summaries import summary
from schemas.refs import Ref
from tasks.positions import folder_positions, trained_positions

pytest_plugins = ("render_fixtures",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 40_960}, 40_960),
        ({"max_position_embeddings": 40_960, "rope_scaling": None}, 40_960),
        ({"max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, 40_960),
        # Qwen3-8B as its card extends it, and Llama 3.1 as published: the extended length, the original and a factor
        (
            {
                "max_position_embeddings": 40_960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131_072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "factor": None}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": "yarn"}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 1e308}}, 4096),
        ({"max_position_embeddings": 10**400}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": True}, None),
    ],
)
def test_positions_by_what_a_config_says(fields: dict[str, Any], expected: int | None) -> None:
    assert trained_positions(fields) == expected


def test_of_a_folder_the_text_model_counts(tmp_path: Path) -> None:
    assert folder_positions(tmp_path) is None
    (tmp_path / "config.json").write_text(
        '{"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 2}}'
    )
    assert folder_positions(tmp_path) == 2


def test_a_plan_says_so_beyond_and_only_there() -> None:
    said = "the model was trained on 40,960 positions"
    assert said not in planned(tokens=40_960).text()
    assert said in planned(tokens=40_961).text()


def test_rendering_counts_the_branches_it_keeps(store: Store, model: Ref) -> None:
    folder = Path(model.path)
    runs = [trajectory(user(), turn("Short.")), trajectory(user("word " * 200), turn("Long."), trajectory_id="other")]
    (folder / "config.json").write_text('{"max_position_embeddings": 150}')
    found = rendered(runs, store, model)
    assert found.report.length_tokens["min"] <= 150 < found.report.length_tokens["max"]
    assert (found.report.trained_positions, found.report.n_beyond_positions) == (150, 1)
    assert summary(found).endswith("; 1 beyond the model's 150 positions")
    assert "**Branches beyond the 150 positions that the model was trained on: 1.**" in card(found).markdown
    inside = rendered(runs, store, model, max_tokens=150)
    assert inside.report.n_beyond_positions == 0
    assert "positions" not in summary(inside) + card(inside).markdown
