"""engine.train whose rank 1 runs out of memory at its tenth score; the same arguments."""

from __future__ import annotations

import os
from typing import Any

import torch

from engine import scorers, train
from engine.scores import token_logprobs

SCORES = 10


def main() -> None:
    rank, calls = os.environ["RANK"], 0

    def scorer(model: Any, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += model.training
        if rank == "1" and calls == SCORES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.17 GiB")
        return token_logprobs(model, *arguments)

    scorers.token_logprobs = scorer
    train.main()


if __name__ == "__main__":
    main()
