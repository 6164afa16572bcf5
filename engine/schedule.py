"""How much of the data `epochs` are, and which pairs make up each optimiser step. Imports no torch.

More pairs a step average more noise out while the model still moves fast; fewer at the end give more steps from the
same pairs. The windows depend on the config and the number of pairs only, never on ranks, plan or what was computed.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from schemas.training import SimpoConfig


def n_in_epochs(epochs: float, n: int) -> int:
    """How many that is of the `n` steps or pairs of one epoch; a part of one counts as one.

    Of the number as it is written: 1.1 times 50 is 55, while their product in binary is a little above that.
    """
    return math.ceil(Fraction(str(epochs)) * n)


def window_size(config: SimpoConfig, progress: float) -> int:
    """Pairs of the step that starts at `progress` (share of all pairs seen, in [0, 1)).

    Falls linearly from `accumulation_start` to `accumulation` over the first `accumulation_decay_share`.
    """
    start, end = config.accumulation_start or config.accumulation, config.accumulation
    return round(start + (end - start) * min(1.0, progress / config.accumulation_decay_share))


def training_windows(config: SimpoConfig, n_pairs: int) -> list[list[int]]:
    """Pair indices of every optimiser step. Each epoch is a permutation drawn from (seed, epoch).

    A window does not cross epochs, so the last one of an epoch may be shorter; a fractional last epoch ends early.
    """
    n_total = n_in_epochs(config.epochs, n_pairs)
    windows: list[list[int]] = []
    for epoch in range(math.ceil(config.epochs)):
        order = np.random.default_rng([config.seed, epoch]).permutation(n_pairs).tolist()
        order = order[: n_total - epoch * n_pairs]
        start = 0
        while start < len(order):
            size = window_size(config, (epoch * n_pairs + start) / n_total)
            windows.append(order[start : start + size])
            start += size
    return windows
