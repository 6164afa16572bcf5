"""engine.train with the fault that the variable FAULT names; the same arguments."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from engine import checkpoints, scorers, train
from engine.scores import token_logprobs

SAVE_S = 3.0


def out_of_memory(rank: int) -> None:
    """Rank 1 runs out of memory at its tenth score."""
    calls = 0

    def scorer(model: Any, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += model.training
        if rank == 1 and calls == 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.17 GiB")
        return token_logprobs(model, *arguments)

    scorers.token_logprobs = scorer


def slow_save(rank: int) -> None:
    """The store takes SAVE_S for the digest of a checkpoint."""
    digest = checkpoints.payload_digest

    def slow(path: Any) -> Any:
        time.sleep(SAVE_S)
        return digest(path)

    checkpoints.payload_digest = slow


def killed_when_trained(rank: int) -> None:
    """Rank 1 is killed as it scores for the last time, after the last step."""
    trained = False

    def scorer(model: Any, *arguments: Any) -> torch.Tensor:
        nonlocal trained
        trained = trained or model.training
        if rank == 1 and trained and not model.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return token_logprobs(model, *arguments)

    scorers.token_logprobs = scorer


FAULTS = {"out of memory": out_of_memory, "slow save": slow_save, "killed when trained": killed_when_trained}


def main() -> None:
    FAULTS[os.environ["FAULT"]](int(os.environ["RANK"]))
    train.main()


if __name__ == "__main__":
    main()
