"""Model folders with something wrong: one line says what and where, before anything is trained on random tensors."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import file_size_limit
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from artifacts.store import Store
from engine.loading import load_base, new_adapter, save_adapter
from schemas.config import LoraConfig, ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import ORIGIN_FILE, Ref
from tasks.model import load_tokenizer, prepare_model

pytest_plugins = ("render_fixtures",)

Damage = Callable[[Path], Any]
WEIGHTS = "model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"


def configured(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def reweighted(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def without(*names: str) -> Damage:
    return reweighted(lambda weights: [weights.pop(name) for name in names])


def added(**sizes: int) -> Damage:
    return reweighted(lambda weights: weights.update({name: torch.ones(size) for name, size in sizes.items()}))


def written(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def sharded(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-{1 + ('layers' in name)}-of-2.safetensors" for name in weights}
    for shard in set(places.values()):
        save_file({n: weights[n] for n in weights if places[n] == shard}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def shard_lost(folder: Path) -> None:
    sharded(folder)
    (folder / "model-2-of-2.safetensors").unlink()


def index_damaged(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def rows(n_rows: int) -> Damage:
    def damage(folder: Path) -> None:
        reweighted(lambda weights: weights.update({EMBEDDINGS: weights[EMBEDDINGS][:n_rows].clone()}))(folder)
        configured(vocab_size=n_rows, pad_token_id=0, eos_token_id=1)(folder)

    return damage


def image_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)


def only_pickled_nonsense(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"nonsense")


NOT_OF_ONE_MODEL = {
    "tensor lost": (without("model.norm.weight"), r": the weights lack model\.norm\.weight \(download"),
    "tensors lost": (
        without("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_norm.weight"),
        r": the weights lack 2 tensors, first model\.layers\.0\.mlp\.down_proj\.weight",
    ),
    "tied tensor lost": (without(EMBEDDINGS), r"the weights lack 2 tensors, first lm_head\.weight"),
    "head not tied": (configured(tie_word_embeddings=False), r"the weights lack lm_head\.weight"),
    "no tensors": (written(WEIGHTS, b"\2\0\0\0\0\0\0\0{}"), "the weights lack 25 tensors, first lm_head"),
    "narrower": (
        configured(hidden_size=64),
        r"differ in 20 tensors, first model\.embed_tokens\.weight: \[4096, 64\] and \[4096, 128\] \(give the config",
    ),
    "other architecture": (
        configured(model_type="llama", architectures=["LlamaForCausalLM"]),
        r"a llama model, as config\.json has it, has no place for 4 tensors, first model\.layers\.0\.self_attn\.k_norm",
    ),
    "biases": (
        added(**{"model.layers.1.self_attn.q_proj.bias": 64}),
        r"has no place for model\.layers\.1\.self_attn\.q_proj\.bias",
    ),
}
DAMAGED = {
    **NOT_OF_ONE_MODEL,
    "layer types": (
        configured(num_hidden_layers=3),
        r"config\.json describes no usable model: .*num_hidden_layers` \(3\) must be equal",
    ),
    "size as text": (configured(hidden_size="wide"), r"'hidden_size' expected int, got str"),
    "no heads": (configured(num_attention_heads=0), "not a loadable model: ZeroDivisionError"),
    "no heads and no size of one": (
        configured(num_attention_heads=0, head_dim=None, model_type="llama"),
        "no usable model: ZeroDivisionError",
    ),
    "linear layers": (
        configured(layer_types=["full_attention", "linear_attention"]),
        r"config\.json: no engine computes layer_types of linear_attention",
    ),
    "no window": (
        configured(layer_types=["full_attention", "sliding_attention"]),
        "no engine computes layer_types of sliding_attention without a sliding_window",
    ),
    "turned backwards": (
        configured(rope_scaling={"rope_type": "linear", "factor": -2.0}),
        r"no engine computes rotary embeddings whose factor is -2\.0",
    ),
    "negative size": (configured(hidden_size=-1), "not a loadable model: .*negative dimension"),
    "unknown activation": (configured(hidden_act="nope"), "not a loadable model: KeyError: 'nope'"),
    "unknown architecture": (configured(model_type="nope"), "has model type `nope`"),
    "config a list": (written("config.json", b"[]"), r"config\.json: the file is damaged: a JSON object expected"),
    "config broken": (written("config.json", b"{"), r"config\.json: the file is damaged: Expecting property name"),
    "config binary": (written("config.json", b"\xff\xfe\0"), r"config\.json: the file is damaged: "),
    "config deep": (written("config.json", b"[" * 100_000), r"config\.json: the file is damaged: maximum recursion"),
    "generation a list": (written("generation_config.json", b"[]"), "not a loadable model: TypeError"),
    "cut in half": (cut, r"model\.safetensors: the file has \d+ bytes of \d+ \(download"),
    "no header length": (written(WEIGHTS, b"\1"), r"model\.safetensors: not a safetensors file: "),
    "header of 2**64": (
        written(WEIGHTS, b"\xff" * 8 + b"{}"),
        "not a safetensors file: a header of 1844674407370955161",
    ),
    "header a list": (written(WEIGHTS, b"\2\0\0\0\0\0\0\0[]"), r"not a safetensors file: "),
    "text for weights": (written(WEIGHTS, b"nonsense"), "not a safetensors file: a header of "),
    "pickled nonsense": (only_pickled_nonsense, r"pytorch_model\.bin: the file is damaged: "),
    "shard lost": (shard_lost, r"1 of 2 files of weights are missing, first model-2-of-2\.safetensors"),
    "index damaged": (index_damaged, r"index\.json: the file is damaged: "),
    "few rows": (rows(1000), "the model has 1000 tokens, 3096 of the tokenizer's are none of them, first "),
    "no row for a thought's end": (rows(4095), "1 of the tokenizer's are none of them, first '</think>'"),
    "tokenizer broken": (written("tokenizer.json", b"{"), r"tokenizer\.json: the file is damaged: Expecting"),
    "tokenizer empty": (
        written("tokenizer.json", b'{"version": "1.0"}'),
        r"tokenizer\.json: the file is damaged: Model",
    ),
    "tokenizer a list": (written("tokenizer.json", b"[]"), r"tokenizer\.json: the file is damaged: a JSON object"),
    "tokenizer settings": (written("tokenizer_config.json", b"[]"), r"tokenizer_config\.json: the file is damaged: "),
}


@pytest.fixture
def folder(model: Ref, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model.path, tmp_path / "mine"))


def base_of(folder: Path, **config: Any) -> Any:
    ref = Ref(kind="model", path=str(folder), sha256="0" * 64, n_bytes=0)
    return load_base(ref, ModelConfig(name=str(folder), **config), torch.device("cpu"), 64)


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_one_line_before_any_stage(damage: Damage, message: str, folder: Path, store: Store) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as raised:
        prepare_model(ModelConfig(name=str(folder)), store)
    assert str(raised.value).startswith(str(folder))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("damage", "message"), NOT_OF_ONE_MODEL.values(), ids=NOT_OF_ONE_MODEL)
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_no_random_tensor_is_trained_on(quantization: str, damage: Damage, message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        base_of(folder, quantization=quantization)


@pytest.mark.parametrize("damage", [cut, shard_lost, configured(num_hidden_layers=3), written("config.json", b"[]")])
def test_damaged_folder_is_a_users_error_to_the_engine_too(damage: Damage, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UserError, match=str(folder)):
        base_of(folder)


@pytest.mark.parametrize(
    ("change", "unused"),
    [
        (sharded, ""),
        (image_token, ""),
        (reweighted(lambda weights: weights.update({"lm_head.weight": weights[EMBEDDINGS].clone()})), ""),
        (added(**{"model.layers.0.self_attn.rotary_emb.inv_freq": 16}), ""),
        (added(**{"model.layers.0.self_attn.masked_bias": 1}), "1 stored tensors have no place"),
        (added(**{"mtp.layers.0.mlp.up_proj.weight": 8}), "1 stored tensors have no place"),
        (added(**{"score.weight": 8, "visual.blocks.0.attn.qkv.weight": 8}), "2 stored tensors have no place"),
        (configured(num_hidden_layers=1, layer_types=["full_attention"]), "11 stored tensors have no place"),
    ],
)
def test_what_is_merely_unused_is_said(
    change: Damage, unused: str, folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    prepare_model(ModelConfig(name=str(folder)), store)
    base_of(folder)
    out = capsys.readouterr().out
    assert unused in out if unused else not out


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_model_that_was_saved_quantised_loads(quantization: str, folder: Path, store: Store, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    base_of(folder, quantization=quantization).save_pretrained(saved)
    load_tokenizer(folder).save_pretrained(saved)
    prepare_model(ModelConfig(name=str(saved)), store)
    assert any(getattr(weight, "dtype", None) in (torch.uint8, torch.int8) for weight in base_of(saved).parameters())
    without("model.norm.weight")(saved)
    with pytest.raises(UserError, match=r"the weights lack model\.norm\.weight"):
        base_of(saved)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("foo", "no layer named foo"),
        ("self_attn.q_proj", "no layer named self_attn.q_proj"),
        ("input_layernorm", "peft makes no adapter: Target module Qwen3RMSNorm"),
        ("mlp", "peft makes no adapter: Target module Qwen3MLP"),
    ],
)
def test_a_layer_that_takes_no_adapter_is_one_line(folder: Path, target: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"lora.target_modules: .*{expected}") as error:
        new_adapter(base_of(folder), LoraConfig(target_modules=("q_proj", target)), 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", ["embed_in", "lm_head"])
def test_lora_on_the_embedding_or_head_of_any_family_is_told(target: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", num_attention_heads=2, **sizes))
    with pytest.raises(UserError, match=f"{target} is the model's embedding or head"):
        new_adapter(model, LoraConfig(target_modules=("query_key_value", target)), 0)


def test_full_disk_leaves_no_torn_adapter(folder: Path, tmp_path: Path) -> None:
    adapter = new_adapter(base_of(folder), LoraConfig(r=64), 0)
    with (
        file_size_limit(100_000),
        pytest.raises(StageError, match=r"File too large.* Raise the limit .* or free some space at .* start again"),
    ):
        save_adapter(adapter, tmp_path / "adapter", base_name="tiny", model_sha256="0" * 64, stage="sft")
    assert not (tmp_path / "adapter").exists()


def test_adapter_is_on_the_disk_when_it_is_saved(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = new_adapter(base_of(folder), LoraConfig(r=4), 0)
    synced: dict[tuple[int, int], int] = {}

    def fsync(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        synced[stat.st_dev, stat.st_ino] = stat.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    saved = tmp_path / "adapter"
    save_adapter(adapter, saved, base_name="tiny", model_sha256="0" * 64, stage="sft")
    files = [saved / name for name in ("adapter_model.safetensors", "adapter_config.json", ORIGIN_FILE)]
    assert sorted(saved.iterdir()) == sorted(files)
    for path in [*files, saved, tmp_path]:
        stat = path.stat()
        assert synced.get((stat.st_dev, stat.st_ino)) == stat.st_size, path
