"""Splits: by a hash of the name alone, so that nothing that arrives later moves a task."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import SplitConfig
from tasks.splits import side


def test_sides_are_fixed_for_ever() -> None:
    # written down when the split was made: a change here would move tasks between training and evaluation
    config = SplitConfig(heldout_share=0.25)
    assert {
        task: side(task, None, config) for task in ("a", "b", "c", "django__django-1", "tau-bench/airline/21")
    } == FIXED


FIXED = {
    "a": "train",
    "b": "heldout",
    "c": "train",
    "django__django-1": "heldout",
    "tau-bench/airline/21": "train",
}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_share_is_met_on_average(share: float) -> None:
    counts = Counter(side(f"task-{index}", None, SplitConfig(heldout_share=share)) for index in range(4000))
    assert counts["heldout"] / 4000 == pytest.approx(share, abs=0.03)  # 0, 0.101 and 0.499 when written


@given(st.text(), st.text(), st.floats(0, 0.99))
def test_by_repository_all_tasks_of_one_are_together(a: str, b: str, share: float) -> None:
    config = SplitConfig(by="repo", heldout_share=share)
    assert side(a, "repo", config) == side(b, "repo", config)
    assert side(a, None, config) == side(a, None, SplitConfig(heldout_share=share))


@given(st.text(), st.floats(0, 0.9))
def test_a_larger_share_only_adds(task: str, share: float) -> None:
    if side(task, None, SplitConfig(heldout_share=share)) == "heldout":
        assert side(task, None, SplitConfig(heldout_share=share + 0.09)) == "heldout"
