"""Several nodes: `torch.distributed.run`, started on each with its own flags, by hand."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from rank_faults import CONFIG, prepare
from training_inputs import simpo_spec

from tasks.launch import environment_of, launch


def start_nodes(specs: list[Path], timeout_s: float = 120) -> list[tuple[int, str]]:
    """Status and output of an agent with one rank for each of the specs, which meet at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents: list[subprocess.Popen[str]] = []
    for number, path in enumerate(specs):
        flags = [f"--nnodes={len(specs)}", f"--node-rank={number}", "--nproc-per-node=1"]
        meeting = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, *meeting, "-m", "engine.train", str(path)]
        agents.append(
            subprocess.Popen(
                command, cwd=REPOSITORY, env=environment_of(os.environ, len(specs)), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )
        )  # fmt: skip
    try:
        said = [agent.communicate(timeout=timeout_s)[0] for agent in agents]
    finally:
        for agent in agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*psutil.Process(agent.pid).children(), agent):
                    process.kill()
    return [(agent.returncode, output) for agent, output in zip(agents, said, strict=True)]


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_two_nodes_train_what_two_ranks_of_one_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """To the last bit; the second start of nodes with a folder each finds that only the first has a checkpoint."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = simpo_spec(tmp_path / "inputs", CONFIG)
    adapter = Path("adapter") / "adapter_model.safetensors"
    here = prepare(tmp_path / "here", spec)
    launch(here, n_processes=2)
    first = prepare(tmp_path / "first", spec)
    second = first if shared else prepare(tmp_path / "second", spec)
    for status, output in start_nodes([first, second]):
        assert status == 0, output
    assert (first.parent / adapter).read_bytes() == (here.parent / adapter).read_bytes()
    if not shared:
        shutil.rmtree(first.parent / "adapter")
        (first.parent / "finished.json").unlink()
        ended = start_nodes([first, second])
        assert [status for status, _ in ended] == [1, 1]
        assert "rank 1 from no checkpoint (let all nodes share one, or copy" in ended[0][1]
