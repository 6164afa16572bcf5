"""What ranks tell each other before they are a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine import group as ranks
from engine.group import Group, Launch, check_devices, check_spec, least
from schemas.errors import UserError


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """Three ranks, and the store that their launcher hosts."""
    ranks._store.cache_clear()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [Launch(rank, 3, rank, store.host, store.port, store_is_hosted=True) for rank in range(3)]
    ranks._store.cache_clear()
    del store  # which closes it


def test_every_rank_learns_the_least_of_each_value(launches: list[Launch]) -> None:
    """As a card that others use too has less than its neighbours: all plan by what it has."""
    values = [(5 * 2**40, 7), (3 * 2**40, 9), (4 * 2**40, 8)]
    with ThreadPoolExecutor(3) as pool:
        told = pool.map(
            lambda launch: least(Group(launch.rank, 3, launch=launch), "memory", values[launch.rank]), launches
        )
        assert list(told) == [[3 * 2**40, 7]] * 3
    assert least(Group(), "memory", (1, 2)) == [1, 2]


def said_to(launches: list[Launch], check: Callable[[Group], None]) -> set[str | None]:
    """What the ranks are refused with, all at once; None: nothing."""

    def ask(launch: Launch) -> str | None:
        try:
            check(Group(launch.rank, 3, launch=launch))
        except UserError as error:
            return error.what
        return None

    with ThreadPoolExecutor(3) as pool:
        return set(pool.map(ask, launches))


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        (["GPU-1", "GPU-2", None], "3 processes on 2 GPUs: rank 2 has none of its own"),
        (["GPU-1", "GPU-1", "GPU-1"], "3 processes on 1 GPUs: rank 1, 2 has none of its own"),
        ([None, "GPU-1", None], "3 processes on 1 GPUs: rank 0, 2 has none of its own"),
        (["GPU-1", "GPU-2", "GPU-3"], None),
        ([None, None, None], None),
    ],
)
def test_ranks_without_a_gpu_of_their_own_are_told_to_all(
    launches: list[Launch], gpus: list[str | None], problem: str | None
) -> None:
    """They could not even meet: one would wait for NCCL, the other for gloo, half an hour."""
    assert said_to(launches, lambda group: check_devices(group, gpus[group.rank])) == {problem}


@pytest.mark.parametrize(
    ("asked", "nccl", "gpus", "problem"),
    [
        ("1", 23007, ["GPU-1", "GPU-1", "GPU-1"], None),
        ("1", 23007, ["GPU-1", "GPU-1", None], "3 processes on 1 GPUs: rank 2 has none of its own"),
        ("1", 22907, ["GPU-1", "GPU-1", "GPU-2"], "3 processes on 2 GPUs: rank 1 has none of its own"),
        ("0", 23007, ["GPU-1", "GPU-1", "GPU-2"], "3 processes on 2 GPUs: rank 1 has none of its own"),
    ],
)
def test_ranks_share_a_gpu_where_nccl_can_and_was_asked_to(
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    nccl: int,
    gpus: list[str | None],
    problem: str | None,
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked)
    monkeypatch.setattr(ranks, "_nccl_version", lambda: nccl)
    assert said_to(launches, lambda group: check_devices(group, gpus[group.rank])) == {problem}


@pytest.mark.parametrize(
    ("digests", "problem"),
    [
        ("aaa", None),
        ("aba", "rank 0 was given another spec than rank 1"),
        ("abc", "rank 0 was given another spec than rank 1, 2"),
    ],
)
def test_ranks_with_other_specs_are_told_before_anything_is_loaded(
    launches: list[Launch], digests: str, problem: str | None
) -> None:
    """Of other losses or pairs, they would meet in collectives of other sizes: an abort, or a wait of hours."""

    assert said_to(launches, lambda group: check_spec(group, digests[group.rank])) == {problem}
    check_spec(Group(), "a")
