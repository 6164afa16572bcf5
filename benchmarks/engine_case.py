"""A case of the engine benchmark as its command line names it: TOKENS@GIB and options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """TOKENS@GIB[,steps=N][,groups=N][,stride=N][,staged=1][,place=device][,plan_gib=G][,profile=1][,layers=N]
    [,shorter=N][,attention=NAME]

    steps: optimiser steps, each on data of its own. groups: groups of key-value heads, in place of the plan's. stride:
    the MLP's wide projections of every so many layers on the host. staged=1: q, k, v staged through the host, whether
    the plan needs that or not. place=device: what the plan keeps on the host is
    kept on the device. plan_gib: the plan is made for so much, while the allocator may use GIB. profile: the last step
    is profiled as well. layers: a forward, and the backward of so many layers only: the memory of a branch is at its
    peak from the first of them on. shorter: every step is so many tokens shorter than the one before, so each comes to
    a length that no cache knows, as a data set's branches do. attention: this kernel in place of the probe's choice.
    """

    n_tokens: int
    gib: float
    text: str = ""
    steps: int = 3
    groups: int | None = None
    stride: int | None = None
    staged: bool = False
    place: str = "host"
    plan_gib: float | None = None
    profile: bool = False
    layers: int | None = None
    shorter: int = 0
    attention: str | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each step's branch."""
        return [self.n_tokens - step * self.shorter for step in range(self.steps)]


def case_of(text: str) -> Case:
    head, *options = text.split(",")
    tokens, gib = head.split("@")
    given = dict(option.split("=", 1) for option in options)
    kinds: dict[str, Any] = dict.fromkeys(("steps", "groups", "stride", "layers", "shorter"), int)
    kinds |= {"place": str, "plan_gib": float, "attention": str}
    kinds |= dict.fromkeys(("profile", "staged"), lambda value: value == "1")
    if unknown := given.keys() - kinds.keys():
        raise argparse.ArgumentTypeError(f"no option {', '.join(sorted(unknown))}")
    return Case(int(tokens), float(gib), text, **{name: kinds[name](value) for name, value in given.items()})
