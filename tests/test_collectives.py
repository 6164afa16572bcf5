"""What ranks tell each other before they are a process group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine import collectives
from engine.collectives import Group, Launch, join, least
from schemas.errors import StageError


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """Three ranks, and the store that their launcher hosts."""
    collectives._store.cache_clear()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [Launch(rank, 3, rank, store.host, store.port, store_is_hosted=True) for rank in range(3)]
    collectives._store.cache_clear()
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


def test_a_rank_without_a_gpu_among_ranks_with_one_is_told_to_all(launches: list[Launch]) -> None:
    """They could not even meet: one would wait for NCCL, the other for gloo."""
    kinds = [torch.device("cuda"), torch.device("cpu"), torch.device("cuda")]

    def meet(launch: Launch) -> str:
        with pytest.raises(StageError) as error:
            join(Group(launch.rank, 3, "gloo", kinds[launch.rank], launch))
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(meet, launches)) == {
            "all ranks need a GPU, or none may have one (rank 0: cuda, rank 1: cpu, rank 2: cuda)"
        }
