"""The decision is a pure function; the alias moves whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from artifacts.store import Store
from schemas.config import PromoteConfig
from schemas.errors import UserError
from schemas.refs import ORIGIN_FILE, Ref
from schemas.reports import EvalReport, Evaluated, ModelScore
from tasks.incumbent import comparable_incumbent
from tasks.promote import current, decide, promote


def score(name: str, accuracy: float | None, nll: float | None = 1.0, n_pairs: int = 10) -> ModelScore:
    return ModelScore(
        name=name,  # type: ignore[arg-type]
        n_branches=5,
        n_pairs=n_pairs,
        nll_per_action_token=nll,
        pair_accuracy=accuracy,
        mean_margin=accuracy,
    )


def adapter(digit: str) -> Ref:
    return Ref(kind="adapter", path=f"/adapters/{digit}", sha256=digit * 64, n_bytes=1)


@pytest.mark.parametrize(
    ("candidate", "incumbent", "policy", "promoted", "because"),
    [
        (score("simpo", 0.8), score("incumbent", 0.7), PromoteConfig(), True, "gains +0.1000"),
        (score("simpo", 0.7), score("incumbent", 0.7), PromoteConfig(), False, "more than nothing"),
        (score("simpo", 0.6), score("incumbent", 0.7), PromoteConfig(), False, "gains -0.1000"),
        (score("simpo", 0.75), score("incumbent", 0.7), PromoteConfig(min_gain=0.1), False, "at least 0.1"),
        (score("simpo", 0.8), None, PromoteConfig(), True, "nothing to compare with"),
        (score("simpo", 0.8, n_pairs=2), None, PromoteConfig(min_pairs=3), False, "2 held-out pairs, 3 needed"),
        (score("simpo", None, n_pairs=0), None, PromoteConfig(min_pairs=0), False, "nothing was held out"),
        (score("simpo", 0.8, nll=2.0), score("incumbent", 0.7), PromoteConfig(), False, "rises by 1.0000 nats"),
        (score("simpo", 0.8, nll=None), score("incumbent", 0.7), PromoteConfig(), True, "gains"),
        (
            score("simpo", 0.8, nll=0.9),
            score("incumbent", 0.8),
            PromoteConfig(metric="nll_per_action_token"),
            True,
            "gains +0.1000",
        ),
    ],
)
def test_decide(
    candidate: ModelScore, incumbent: ModelScore | None, policy: PromoteConfig, promoted: bool, because: str
) -> None:
    decided, reasons = decide(candidate, incumbent, policy)
    assert decided is promoted
    assert any(because in reason for reason in reasons), reasons


def test_every_reason_against_is_given() -> None:
    _, reasons = decide(score("simpo", 0.5, nll=3.0, n_pairs=0), score("incumbent", 0.7), PromoteConfig())
    assert len(reasons) == 3


def evaluated(**accuracies: float) -> Evaluated:
    models = tuple(score(name, accuracy) for name, accuracy in accuracies.items())
    return Evaluated(report=EvalReport(models=models, n_heldout_tasks=3, wall_s=0.0))


def test_alias_moves_only_for_the_better(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert current(store) is None
    first = promote(evaluated(base=0.5, sft=0.6, simpo=0.7), adapter("a"), PromoteConfig(), store)
    assert first.report.promoted
    assert first.report.incumbent_sha256 is None
    assert current(store) == (adapter("a"), None)

    worse = promote(evaluated(base=0.5, simpo=0.6, incumbent=0.7), adapter("b"), PromoteConfig(), store)
    assert not worse.report.promoted
    assert worse.report.incumbent_sha256 == "a" * 64
    assert current(store) == (adapter("a"), None)

    again = promote(evaluated(base=0.5, simpo=0.7), adapter("a"), PromoteConfig(), store)
    assert again.report.reasons == ("the candidate already is the incumbent",)

    lines = [json.loads(line) for line in (tmp_path / "aliases" / "history.jsonl").read_text().splitlines()]
    assert [line["decision"]["promoted"] for line in lines] == [True, False, False]
    assert [line["adapter"]["sha256"][0] for line in lines] == ["a", "b", "a"]


def trained_on(folder: Path, name: str, model_sha256: str) -> Ref:
    path = folder / name
    path.mkdir()
    (path / ORIGIN_FILE).write_text(json.dumps({"model_sha256": model_sha256}))
    return adapter(name).model_copy(update={"path": str(path)})


def test_a_promoted_candidate_is_still_measured_against_the_one_it_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = Ref(kind="model", path="/model", sha256="c" * 64, n_bytes=1)
    first, second = (trained_on(tmp_path, name, model.sha256) for name in ("a", "b"))
    assert comparable_incumbent(store, model, first) is None
    promote(evaluated(base=0.5, simpo=0.6), first, PromoteConfig(), store)
    assert comparable_incumbent(store, model, first) is None
    assert comparable_incumbent(store, model, second) == first
    promote(evaluated(base=0.5, simpo=0.7, incumbent=0.6), second, PromoteConfig(), store)
    assert comparable_incumbent(store, model, second) == first
    assert comparable_incumbent(store, model.model_copy(update={"sha256": "d" * 64}), second) is None


def test_without_incumbent_the_base_model_is_the_one_to_beat(tmp_path: Path) -> None:
    store = Store(tmp_path)
    outcome = promote(evaluated(base=0.9, simpo=0.7), adapter("a"), PromoteConfig(), store)
    assert not outcome.report.promoted
    assert current(store) is None


def test_damaged_alias_is_a_user_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "aliases").mkdir()
    (tmp_path / "aliases" / "current.json").write_text('{"adapter": {"kind": ')
    with pytest.raises(UserError, match="cannot be read"):
        current(store)


def test_evaluation_without_a_candidate_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no score of the candidate"):
        promote(evaluated(base=0.9), adapter("a"), PromoteConfig(), Store(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_sha256"'])
def test_damaged_adapter_in_charge_is_a_user_error(content: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = Ref(kind="model", path="/model", sha256="c" * 64, n_bytes=1)
    in_charge = trained_on(tmp_path, "a", model.sha256)
    promote(evaluated(base=0.5, simpo=0.6), in_charge, PromoteConfig(), store)
    (Path(in_charge.path) / ORIGIN_FILE).write_text(content)
    with pytest.raises(UserError, match="the adapter in charge is damaged"):
        comparable_incumbent(store, model, adapter("b"))


def test_the_alias_of_a_store_that_was_copied_names_its_own_adapter(tmp_path: Path) -> None:
    store, copy = Store(tmp_path / "store"), tmp_path / "copy"
    with store.staging() as folder:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_bytes(b"rows")
        candidate = store.add(folder / "adapter", "adapter")
    promote(evaluated(base=0.5, simpo=0.8), candidate, PromoteConfig(), store)
    shutil.copytree(store.root, copy)
    in_charge = current(Store(copy))
    assert in_charge is not None
    assert Path(in_charge.adapter.path) == copy / Path(candidate.path).relative_to(store.root)
