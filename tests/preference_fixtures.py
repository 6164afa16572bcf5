"""What the tests of preference training ask for; a pytest plugin, which they name in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from preference_runs import CONFIG, train_here, with_plan
from training_inputs import float64_norm, simpo_spec
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from schemas.reports import TrainReport
from schemas.spec import TrainSpec


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    """One thread, and norms in float64: two ways to the same gradient then agree to 1e-15."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3RMSNorm, "forward", float64_norm)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    """8 pairs to train on, of which half share a prefix."""
    return simpo_spec(tmp_path_factory.mktemp("inputs"), CONFIG, shared_prefix=True)


@pytest.fixture(scope="module")
def sequential(
    exact: None, spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], TrainReport]:
    """Adapter and report of one process that trained on one branch after the other."""
    return train_here(with_plan(spec, "sequential"), tmp_path_factory.mktemp("sequential"))
