"""Memory of the host: its limits, what it refuses to hand out or to pin, and that a stage says so."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from training_inputs import simpo_spec

from engine.budget import Budget, host_budget
from engine.data import BranchTable
from engine.group import Group
from engine.host_memory import HostLimit, HostMemoryError, host_limits, tightest
from engine.memory import GIB
from engine.offload import HostPool, numbered, pin
from engine.out_of_memory import memory_advice
from engine.scorers import open_engine
from schemas.errors import StageError, UserError
from schemas.training import OptimizerConfig, SimpoConfig

ALLOCATIONS = """
import torch
from engine.offload import HostPool
from engine.out_of_memory import side_of
for allocate in (
    lambda: torch.empty(8 << 30, dtype=torch.uint8),
    lambda: bytearray(8 << 30),
    lambda: HostPool(torch.device("cpu")).reserve(8 << 30),
):
    try:
        allocate()
    except Exception as error:
        print(type(error).__name__, side_of(error))
"""


def test_a_limit_of_the_process_is_the_hosts_memory() -> None:
    """The errors that really come of a limit (RLIMIT_AS) of 6 GiB, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip
    assert result.stdout.splitlines() == ["RuntimeError host", "MemoryError host", "HostMemoryError host"]


class RefusingRuntime:
    """torch.cuda.cudart() of a driver that refuses to register host memory."""

    def cudaHostRegister(self, pointer: int, n_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert (pointer != 0, n_bytes, flags) == (True, 64, 0)
        return 2

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802 - CUDA's name
        return {2: "out of memory"}[status]


def test_refused_pinning_names_what_was_asked_and_the_limit_of_locked_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, hard))
    try:
        with pytest.raises(HostMemoryError, match=r"refused to pin 0\.0 GiB \(out of memory\); ulimit -l allows 1 MiB"):
            pin(torch.zeros(64, dtype=torch.uint8), RefusingRuntime())
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_a_refused_host_ends_the_stage_before_step_one(tmp_path: Path) -> None:
    """The long-context engine keeps activations on the host: reserving them is the first thing that can fail."""
    config = SimpoConfig(optimizer=OptimizerConfig(), plan="sequential")
    spec = simpo_spec(tmp_path / "inputs", config, n_pairs=2, n_heldout=0)
    run = spec.model_copy(update={"base": spec.base.model_copy(update={"engine": "long_context"})})
    budget = Budget(device_bytes=GIB, host_bytes=GIB)
    engine = open_engine(
        run, BranchTable(run.branches), ["good-1", "bad-1"], Group(), optimizer=OptimizerConfig(), accumulating=True,
        budget=budget,
    )  # fmt: skip
    assert engine.ledger is not None
    assert engine.host_bytes >= engine.ledger.host_bytes > 0
    engine.pin_host(torch.device("cpu"))
    assert engine.scorer.host_bytes == engine.host_bytes  # type: ignore[attr-defined]
    with (
        pytest.raises(StageError, match=r"out of memory on the host .* refused to pin"),
        memory_advice(engine, Group()),
    ):
        pin(torch.zeros(64, dtype=torch.uint8), RefusingRuntime())


def test_a_pool_that_was_refused_holds_nothing() -> None:
    pool = HostPool(torch.device("cpu"))
    with pytest.raises(HostMemoryError, match=r"the host refused [\d.]+ GiB"):
        pool.reserve(1 << 60)
    assert pool.capacity_bytes == 0
    pool.reserve(4096)
    assert pool.capacity_bytes == 4096


def test_a_pool_is_found_by_the_device_as_its_tensors_name_it() -> None:
    """A buffer pinned for "cuda" that a tensor on "cuda:0" does not find would be pinned twice."""
    assert numbered(torch.device("cuda"), lambda: 1) == torch.device("cuda", 1)
    assert numbered(torch.device("cuda", 0), lambda: 1) == torch.device("cuda", 0)
    assert numbered(torch.device("cpu")) == torch.device("cpu")


# --- limits


def group_files(root: Path, folder: str, limit: str, used: int, cache: int, *, v1: bool = False) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit_name, usage_name, cache_name = names if v1 else ("memory.max", "memory.current", "inactive_file")
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / limit_name).write_text(f"{limit}\n")
    (place / usage_name).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\n{cache_name} {cache}\n")


def own_groups(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_every_control_group_above_a_process_counts(tmp_path: Path) -> None:
    own_groups(tmp_path, "0::/jobs/train\n")
    group_files(tmp_path, "jobs/train", "max", 7, 0)
    group_files(tmp_path, "jobs", str(10 << 20), 4 << 20, 1 << 20)
    found = host_limits(tmp_path)
    assert [limit.by for limit in found] == ["the machine", f"the control group {tmp_path}/sys/fs/cgroup/jobs"]
    assert tightest(found).available_bytes == 7 << 20  # 10 allowed, 4 used, of which 1 is page cache


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    own_groups(tmp_path, "5:cpu:/other\n4:memory:/box\n0::/\n")
    group_files(tmp_path, "memory", str(9 << 20), 2 << 20, 0, v1=True)  # in a container: its own group is the top
    assert tightest(host_limits(tmp_path)).available_bytes == 7 << 20


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert [limit.by for limit in host_limits(tmp_path)] == ["the machine"]


def test_host_memory_beyond_a_control_group_is_refused() -> None:
    limits = [HostLimit(31 * GIB, "the machine"), HostLimit(20 * GIB, "the control group /x")]
    assert host_budget(None, limits) == int(18 * GIB)
    assert host_budget(16.0, limits) == 16 * GIB
    assert host_budget(110.0, limits[:1]) == 110 * GIB  # a virtual machine shows what was used so far
    with pytest.raises(UserError, match=r"110 GiB .* the control group /x leaves 20\.0"):
        host_budget(110.0, limits)
