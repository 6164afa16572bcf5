"""Inputs of a training stage with something wrong: one line says what and where, and nothing is trained on them."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from training_inputs import VOCABULARY, simpo_spec

from engine import evaluate, preference
from engine.data import BranchTable, read_pairs
from engine.group import Group
from engine.inputs import verify_inputs
from engine.loading import load_adapter, load_base
from engine.session import Stop
from schemas.config import EvaluateConfig
from schemas.errors import UserError
from schemas.refs import ORIGIN_FILE
from schemas.spec import TrainSpec, read_spec
from schemas.training import SimpoConfig

Rows = list[dict[str, Any]]
Edit = Callable[[Rows], Any]
TENSOR = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    folder = tmp_path_factory.mktemp("whole")
    return simpo_spec(folder, SimpoConfig(plan="sequential"), n_pairs=2, n_heldout=1)


@pytest.fixture
def spec(whole: TrainSpec, tmp_path: Path) -> TrainSpec:
    """A copy that a test may damage; the model is shared."""
    source = Path(whole.branches[0].path).parent
    for name in ("branches.arrow", "pairs.arrow", "start"):
        path = source / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    assert whole.pairs is not None
    return whole.model_copy(
        update={
            "branches": (whole.branches[0].model_copy(update={"path": str(tmp_path / "branches.arrow")}),),
            "pairs": whole.pairs.model_copy(update={"path": str(tmp_path / "pairs.arrow")}),
            "adapters": {"start": whole.adapters["start"].model_copy(update={"path": str(tmp_path / "start")})},
        }
    )


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pa.OSFile(str(path)) as source:
        table = change(pa.ipc.open_stream(source).read_all())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def edit_rows(path: Path, edit: Edit) -> None:
    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        edit(rows)
        return pa.Table.from_pylist(rows, schema=table.schema)

    rewrite(path, change)


def fails(pattern: str) -> Any:
    """Expects a UserError of one line."""
    return pytest.raises(UserError, match=rf"\A(?-s:.)*{pattern}(?-s:.)*\Z")


def first(**values: Any) -> Edit:
    return lambda rows: rows[0].update(values)


def token(place: int, value: int | None) -> Edit:
    return lambda rows: rows[0]["token_ids"].__setitem__(place, value)


def span(index: int, **values: Any) -> Edit:
    return lambda rows: rows[0]["spans"][index].update(values)


BAD_BRANCHES: dict[str, tuple[Edit, str]] = {
    "n_tokens": (first(n_tokens=5), "good-0: n_tokens is 5, but it has 11 tokens"),
    "n_scored": (first(n_scored=5), "good-0: n_scored is 5, but spans with a weight hold 3 tokens"),
    "no tokens": (first(token_ids=[], n_tokens=0, spans=[]), "good-0: it has no tokens"),
    "nothing scored": (first(spans=[], n_scored=0), "good-0: it has no scored token"),
    "negative token": (token(4, -3), "good-0: its token 4 is -3"),
    "token of no row": (token(4, VOCABULARY), f"good-0: its token 4 is {VOCABULARY}, and the model has {VOCABULARY}"),
    "span past the end": (span(-1, end=10_000), r"good-0: span \[10, 10000\) is not within its 11 tokens"),
    "span before the start": (span(0, start=-5), r"good-0: span \[-5, 5\) is not within its 11 tokens"),
    "span backwards": (span(1, start=7, end=6), r"good-0: span \[7, 6\) is not within"),
    "spans overlap": (span(1, start=4), r"good-0: span \[4, \d+\) begins before span \[0, 5\) ends"),
    "negative weight": (span(2, weight=-1.0), r"good-0: span \[\d+, \d+\) has weight -1; expected"),
    "weight nan": (span(2, weight=math.nan), r"good-0: span \[\d+, \d+\) has weight nan"),
    "weight inf": (span(2, weight=math.inf), r"good-0: span \[\d+, \d+\) has weight inf"),
    "id twice": (lambda rows: rows[1].update(branch_id="good-0"), "branch good-0: the branch_id occurs twice"),
    "null token": (token(4, None), "column token_ids lacks values"),
    "null in a span": (span(2, weight=None), "column spans lacks values"),
    "null count": (first(n_tokens=None), "column n_tokens lacks values"),
}


def check_tables(spec: TrainSpec) -> None:
    assert spec.pairs is not None
    branches = BranchTable(spec.branches)
    pairs = read_pairs(spec.pairs, "train", branches)
    branches.check([name for pair in pairs for name in (pair.chosen, pair.rejected)], VOCABULARY)


def test_a_whole_input_passes(spec: TrainSpec) -> None:
    check_tables(spec)
    verify_inputs(spec)


@pytest.mark.parametrize(("edit", "message"), BAD_BRANCHES.values(), ids=BAD_BRANCHES)
def test_bad_branch_is_named(spec: TrainSpec, edit: Edit, message: str) -> None:
    edit_rows(Path(spec.branches[0].path), edit)
    with fails(rf"branches\.arrow.*{message}"):
        check_tables(spec)


BAD_PAIRS: dict[str, tuple[Edit, str]] = {
    "negative weight": (first(weight=-1.0), "pair pair-0: its weight is -1; expected"),
    "weight nan": (first(weight=math.nan), "pair pair-0: its weight is nan"),
    "weight inf": (first(weight=math.inf), "pair pair-0: its weight is inf"),
    "null weight": (first(weight=None), "column weight lacks values"),
    "one branch": (first(rejected_branch_id="good-0"), "pair pair-0: branch good-0 is on both sides"),
    "no such branch": (first(chosen_branch_id="gone"), "pair pair-0: its branch gone is in no branch table"),
}


@pytest.mark.parametrize(("edit", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_bad_pair_is_named(spec: TrainSpec, edit: Edit, message: str) -> None:
    assert spec.pairs is not None
    edit_rows(Path(spec.pairs.path), edit)
    with fails(rf"pairs\.arrow.*{message}"):
        check_tables(spec)


def test_branches_of_a_pair_differ(spec: TrainSpec) -> None:
    edit_rows(
        Path(spec.branches[0].path),
        lambda rows: rows[1].update({name: rows[0][name] for name in ("token_ids", "spans", "n_tokens", "n_scored")}),
    )
    with fails("pair pair-0: its branches good-0 and bad-0 hold the same tokens"):
        check_tables(spec)


def test_weight_zero_and_an_empty_span_are_no_mistake(spec: TrainSpec) -> None:
    assert spec.pairs is not None
    edit_rows(Path(spec.pairs.path), first(weight=0.0))
    edit_rows(Path(spec.branches[0].path), lambda rows: rows[0]["spans"].append(rows[0]["spans"][-1] | {"start": 11}))
    check_tables(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["weight"]), r"\(found 'pairs': no column weight\)"),
        (lambda table: table.append_column("more", table["weight"]), r"\(found 'pairs': unknown column more\)"),
        (
            lambda table: table.set_column(11, "weight", table["weight"].cast("float64")),
            r"\(found 'pairs': column weight is double, expected float\)",
        ),
        (lambda table: table.select(table.column_names[::-1]), "its columns are in another order"),
        (lambda table: table.replace_schema_metadata({"traceforge.table": "pairs"}), "its metadata is"),
    ],
)
def test_table_of_another_schema_says_what_differs(spec: TrainSpec, change: Any, message: str) -> None:
    assert spec.pairs is not None
    rewrite(Path(spec.pairs.path), change)
    with fails(rf"pairs\.arrow: not a table that this version of traceforge writes .*{message}"):
        check_tables(spec)


def test_table_of_another_kind(spec: TrainSpec) -> None:
    assert spec.pairs is not None
    with fails(r"pairs\.arrow: a table of pairs, expected one of branches"):
        BranchTable([spec.pairs.model_copy(update={"kind": "branches"})])


def rename(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if ".layers.0." in name]:
        weights[name.replace(".layers.0.", ".layers.7.")] = weights.pop(name)


def reweighted(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return damage


def configured(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        stored = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(stored | values))

    return damage


def written(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


BAD_ADAPTERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensor lost": (reweighted(lambda weights: weights.pop(TENSOR)), f"{WEIGHTS}: the adapter lacks {TENSOR}"),
    "other names": (reweighted(rename), f"{WEIGHTS}: the adapter lacks 14 tensors, first {TENSOR}"),
    "no tensors": (reweighted(dict.clear), f"{WEIGHTS}: the adapter lacks 28 tensors, first {TENSOR}"),
    "tensor too many": (
        reweighted(lambda weights: weights.update({TENSOR.replace("s.0.", "s.2."): weights[TENSOR].clone()})),
        f"{WEIGHTS}: the model has no place for {TENSOR.replace('s.0.', 's.2.')}",
    ),
    "shape": (
        reweighted(lambda weights: weights.update({TENSOR: weights[TENSOR][:2].clone()})),
        rf"{CONFIG} and weights differ in {TENSOR}: \[4, 64\] and \[2, 64\]",
    ),
    "rank": (configured(r=8), rf"{CONFIG} and weights differ in 28 tensors, first {TENSOR}: \[8, 64\] and \[4, 64\]"),
    "fewer targets": (configured(target_modules=["q_proj"]), f"the model has no place for 24 tensors, first {TENSOR}"),
    "unknown targets": (configured(target_modules=["nope"]), "not an adapter for this model: Target modules"),
    "targets by pattern": (configured(target_modules="all-linear"), f"{CONFIG}: .* not that of a LoRA on named"),
    "another method": (
        configured(peft_type="IA3"),
        f"{CONFIG}: .*: not that of a LoRA on named",
    ),
    "biases": (configured(bias="all"), f"{CONFIG}: .*: it trains biases, which stay when the adapter is taken off"),
    "rank 0": (configured(r=0), f"{CONFIG}: it describes no adapter that can be used: r: "),
    "not a number": (reweighted(lambda weights: weights[TENSOR].fill_(math.nan)), f"{WEIGHTS}: not finite: {TENSOR}"),
    "infinite": (reweighted(lambda weights: weights[TENSOR][0, 0].fill_(math.inf)), f"{WEIGHTS}: not finite: {TENSOR}"),
    "cut": (lambda folder: os.truncate(folder / WEIGHTS, 5000), f"{WEIGHTS}: the file is damaged: "),
    "weights lost": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS}: the file is missing"),
    "config lost": (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG}: the file is missing"),
    "config broken": (written(CONFIG, '{"r":'), f"{CONFIG}: it describes no adapter that can be used: Expecting value"),
    "config a list": (written(CONFIG, "[]"), f"{CONFIG}: it describes no adapter that can be used: TypeError"),
    "config empty": (
        written(CONFIG, "{}"),
        f"{CONFIG}: it describes no adapter that can be used: KeyError: 'peft_type'",
    ),
    "origin lost": (lambda folder: (folder / ORIGIN_FILE).unlink(), f"not an adapter of traceforge: no {ORIGIN_FILE}"),
    "origin broken": (written(ORIGIN_FILE, "{"), f"{ORIGIN_FILE}: the file is damaged: Expecting"),
    "origin empty": (written(ORIGIN_FILE, "{}"), f"{ORIGIN_FILE}: it does not say which model"),
    "origin a list": (written(ORIGIN_FILE, "[]"), f"{ORIGIN_FILE}: it does not say which model"),
}


@pytest.fixture
def base(whole: TrainSpec) -> Any:
    return load_base(whole.model, whole.base, torch.device("cpu"), 4096)


@pytest.mark.parametrize(("damage", "message"), BAD_ADAPTERS.values(), ids=BAD_ADAPTERS)
def test_no_random_adapter_is_trained_on(spec: TrainSpec, base: Any, damage: Any, message: str) -> None:
    adapter = spec.adapters["start"]
    damage(Path(adapter.path))
    with fails(message) as raised:
        load_adapter(base, adapter, spec.model, trainable=True)
    assert str(raised.value).startswith(adapter.path)


def test_the_weight_that_peft_stores_beside_an_adapter_of_the_head_is_no_foreign_one(
    whole: TrainSpec, base: Any, tmp_path: Path
) -> None:
    made = get_peft_model(base, PeftLoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    made.save_pretrained(str(tmp_path))
    (tmp_path / ORIGIN_FILE).write_text((Path(whole.adapters["start"].path) / ORIGIN_FILE).read_text())
    stored = load_file(tmp_path / WEIGHTS)
    assert any(".base_layer." in name for name in stored)
    adapter = whole.adapters["start"].model_copy(update={"path": str(tmp_path)})
    again = load_base(whole.model, whole.base, torch.device("cpu"), 4096)
    loaded = load_adapter(again, adapter, whole.model, trainable=False)
    own = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert all(torch.equal(own[name], stored[name].to(own[name].dtype)) for name in own)


def test_every_adapter_beside_the_first_is_compared_too(spec: TrainSpec, whole: TrainSpec, base: Any) -> None:
    reweighted(lambda weights: weights.pop(TENSOR))(Path(spec.adapters["start"].path))
    both = load_adapter(base, whole.adapters["start"], whole.model, trainable=False, name="sft")
    with fails(f"the adapter lacks {TENSOR}"):
        load_adapter(both, spec.adapters["start"], spec.model, trainable=False, name="simpo")


def test_stages_say_it_before_a_model_is_loaded(spec: TrainSpec, tmp_path: Path, monkeypatch: Any) -> None:
    """The checks above, where a stage meets them: a token of no row, and a config that the engine is chosen by."""
    for stage in (preference, evaluate):
        monkeypatch.setattr(stage, "load_base", None)
    config = SimpoConfig(plan="sequential")
    path, edit = Path(spec.branches[0].path), token(4, VOCABULARY)
    edit_rows(path, edit)
    with fails(f"and the model has {VOCABULARY}"):
        preference.train(spec, config, Group(), tmp_path, Stop())
    edit_rows(path, lambda rows: edit(rows[-1:]))
    with fails(f"bad-2: its token 4 is {VOCABULARY}, and the model has {VOCABULARY}"):
        evaluate.evaluate(spec, EvaluateConfig(), Group())
    edit_rows(path, lambda rows: [row["token_ids"].__setitem__(4, 5) for row in rows])
    (Path(spec.adapters["start"].path) / CONFIG).unlink()
    with fails(f"{CONFIG}: the file is missing"):
        preference.train(spec, config, Group(), tmp_path, Stop())


@pytest.mark.parametrize("name", ["branches.arrow", "pairs.arrow", "start"])
def test_input_altered_after_the_spec_was_written(spec: TrainSpec, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.is_dir():
        reweighted(lambda weights: weights[TENSOR].add_(1))(path)
    else:
        rewrite(path, lambda table: table.slice(0, 1))
    with fails(f"{path}: altered since the spec was written"):
        verify_inputs(spec)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with fails(f"{path}: gone"):
        verify_inputs(spec)


def test_model_altered_after_the_spec_was_written(spec: TrainSpec, tmp_path: Path) -> None:
    model = spec.model.model_copy(update={"path": str(shutil.copytree(spec.model.path, tmp_path / "model"))})
    moved = spec.model_copy(update={"model": model})
    verify_inputs(moved)
    (tmp_path / "model" / "config.json").write_text("{}")
    with fails("model: altered since the spec was written"):
        verify_inputs(moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapters": {}}, "stage simpo begins with an adapter, and adapters.start is not given"),
        ({"pairs": None}, "stage simpo trains on pairs, and pairs is not given"),
        ({"stage": "dpo"}, "stage: Input should be"),
        ({"unknown": 1}, "unknown: Extra inputs are not permitted"),
        ({"log_folder": ""}, "log_folder: not a path: it is empty, or holds a NUL"),
        ({"reference_folder": ""}, "reference_folder: not a path: it is empty, or holds a NUL"),
        ({"log_folder": "a\0b"}, "log_folder: not a path: it is empty, or holds a NUL"),
        ({"reference_folder": "\0"}, "reference_folder: not a path: it is empty, or holds a NUL"),
    ],
)
def test_spec_without_its_inputs(spec: TrainSpec, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.model_dump(mode="json") | change))
    with fails(f"{path}: not a spec of this version: {message}"):
        read_spec(path)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"adapters": {"start": "adapter", "other": "adapter"}}, "adapters.other: stage simpo takes adapters start"),
        ({"stage": "sft"}, "adapters.start: stage sft takes no adapter"),
        (
            {"stage": "evaluate", "adapters": {"v3": "adapter"}},
            "adapters.v3: stage evaluate takes adapters sft, simpo, incumbent",
        ),
        ({"stage": "evaluate", "adapters": {"base": "adapter"}}, "adapters.base: stage evaluate takes adapters"),
        ({"adapters": {"start": "model"}}, "adapters.start: kind adapter is read there, and this is of kind model"),
        ({"model": "adapter"}, "model: kind model is read there, and this is of kind adapter"),
        ({"pairs": "branches"}, "pairs: kind pairs is read there, and this is of kind branches"),
        ({"branches": ["branches", "pairs"]}, "branches.1: kind branches is read there, and this is of kind pairs"),
    ],
)
def test_spec_of_other_inputs_is_refused_before_anything_is_read(
    spec: TrainSpec, tmp_path: Path, change: dict[str, Any], refusal: str
) -> None:
    """An evaluation whose adapter goes by another name once failed when all of them had been scored."""
    path = tmp_path / "spec.json"

    def of_kind(value: Any) -> Any:
        if isinstance(value, str):
            return spec.model.model_copy(update={"kind": value}).model_dump()
        if isinstance(value, dict):
            return {key: of_kind(item) for key, item in value.items()}
        return [of_kind(item) for item in value] if isinstance(value, list) else value

    changed = {key: value if key == "stage" else of_kind(value) for key, value in change.items()}
    path.write_text(json.dumps(spec.model_dump(mode="json") | changed))
    with fails(f"{path}: not a spec of this version: {refusal}"):
        read_spec(path)


def test_spec_reads_back(spec: TrainSpec, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    assert read_spec(path) == spec
    path.write_text("{")
    with fails(f"{path}: not a spec of this version: Invalid JSON: EOF while parsing"):
        read_spec(path)
    with fails("cannot be read: No such file"):
        read_spec(tmp_path / "none.json")
