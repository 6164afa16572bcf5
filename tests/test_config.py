"""Every configuration loads, and a wrong key is one line that says which, where and what else there is."""

from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from schemas.config import RunConfig
from schemas.errors import UserError
from schemas.load import ConfigError, load_config, parse_override
from schemas.training import SimpoConfig

CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))
DEMO = REPOSITORY / "configs" / "demo.toml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_loads(path: Path) -> None:
    assert isinstance(load_config(path), RunConfig)


def test_configs_are_there() -> None:
    assert {"demo.toml", "smollm2.toml", "qwen3-8b-2x24g.toml"} <= {path.name for path in CONFIGS}


def test_overrides_are_toml_values_on_top_of_the_file() -> None:
    config = load_config(
        DEMO,
        ['source.paths=["a", "b"]', "sft.epochs=2", "simpo.optimizer.learning_rate=1e-6", "model.name=models/qwen3-8b"],
    )
    assert config.source.paths == ("a", "b")
    assert config.sft.epochs == 2
    assert config.simpo.optimizer.learning_rate == 1e-6
    assert config.model.name == "models/qwen3-8b"
    assert config.lora == load_config(DEMO).lora


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", (("a", "b"), 1)),
        ("a=true", (("a",), True)),
        ("a=[1, 2]", (("a",), [1, 2])),
        ("a=~/runs/*.json", (("a",), "~/runs/*.json")),
        ("a='x=y'", (("a",), "x=y")),
    ],
)
def test_parse_override(text: str, expected: object) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["a", "=1", "a.=1", "a=[1", "a=two words", f"a={'[' * 5000}"])
def test_unreadable_override_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sft.epoch=3", "sft.epoch: unknown key; did you mean epochs?"),
        ("learning_rate=3", "learning_rate: unknown key; did you mean sft.optimizer.learning_rate?"),
        ("sft.optimizer.zzz=1", "sft.optimizer.zzz: unknown key; known here: learning_rate, lr_scheduler"),
        ("sft.epochs=-1", "sft.epochs: input should be greater than 0 and at most 100000, got -1"),
        ("simpo.beta=1e308", "simpo.beta: input should be less than or equal to 1000 and at least 1e-06, got 1e+308"),
        ("simpo.gamma=1e308", "simpo.gamma: input should be less than or equal to 1000 and at least 0, got 1e+308"),
        ("lora.alpha=1e308", "lora.alpha: input should be less than or equal to 10000 and at least 0.001, got 1e+308"),
        ("lora.dropout=0.999999999999", "lora.dropout: input should be less than or equal to 0.9 and at least 0, got"),
        ("sft.optimizer.learning_rate=1e-320", "equal to 0.000000000001 and at most 1, got 1e-320"),
        ("simpo.seed=-1", "simpo.seed: input should be greater than or equal to 0, got -1"),
        ("sft.epochs=[1]", "sft.epochs: input should be a valid number; expected a number, got [1]"),
        ('simpo.beta="2"', "simpo.beta: input should be a valid number; expected a number, got '2'"),
        ("simpo.epochs=true", "simpo.epochs: input should be a valid number; expected a number, got True"),
        ("sft.seed=2.0", "sft.seed: input should be a valid integer; expected a whole number, got 2.0"),
        ("source.redact='no'", "source.redact: input should be a valid boolean; expected true or false, got 'no'"),
        ("pairs.max_length_ratio='3'", "pairs.max_length_ratio: input should be a valid number; expected a number"),
        ("evaluate.length_buckets=[true]", "evaluate.length_buckets[0]: input should be a valid integer, got True"),
        ("render.kind_weights.action='1'", "render.kind_weights.action: input should be a valid number, got '1'"),
        ("render.loss_on=['actions']", "render.loss_on[0]: 'actions' is not one of 'reasoning', 'thought', 'action'"),
        ("source.paths=runs", "source.paths: input should be a valid tuple; expected a list of text, got 'runs'"),
        ("model.dtype=float16", "'float16' is not one of 'float32', 'bfloat16' or 'float64'; did you mean bfloat16?"),
        ("model={dtype='float64', quantization='nf4'}", "model: nf4 weights are made of float32 or bfloat16, not of"),
        ("simpo={gamma=1, gamma_beta_ratio=1}", "simpo: give gamma or gamma_beta_ratio, not both"),
        ("lora.target_modules=['q_proj', 'q_proj']", "lora.target_modules: q_proj is named more than once"),
        ("lora.target_modules=['q_proj', 'lm_head']", "lora: target_modules names linears of the layers, and lm_head"),
        ("lora.target_modules=['embed_tokens']", "lora: target_modules names linears of the layers, and embed_tokens"),
        ("sft=1", "sft: input should be a valid dictionary"),
        (f"sft.seed.{'a.' * 5000}a=1", "got a value that is nested too deeply"),
        (f"sft.seed={'9' * 5000}", f"got '{'9' * 199}..."),
    ],
)
def test_wrong_override_is_one_clear_line(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(DEMO, [override])
    (problem,) = error.value.problems
    assert problem.startswith("--set: ")
    assert expected in problem
    assert "\n" not in problem


def test_wrong_keys_of_a_file_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'name = "x"\nstor = "y"\n[source]\npaths = ["r"]\n[sft]\nepochs = 0\n[sft.optimizer]\nlr = 1\n[loraa]\nr = 4\n'
    )
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert set(error.value.problems) == {
        f"{path}:2: stor: unknown key; did you mean store?",
        f"{path}:6: sft.epochs: input should be greater than 0 and at most 100000, got 0",
        f"{path}:8: sft.optimizer.lr: unknown key; known here: learning_rate, lr_scheduler, max_grad_norm, optimizer, "
        "warmup_share, weight_decay",
        f"{path}:9: loraa: unknown key; did you mean lora?",
    }


def test_missing_key_is_named_with_its_meaning(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('name = "x"\n[source]\n')
    with pytest.raises(ConfigError, match=r"source.paths: required, and not given \(files, folders, globs or archives"):
        load_config(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + DEMO.read_bytes())
    assert load_config(path) == load_config(DEMO)


def test_a_path_that_no_file_can_have_is_a_user_error() -> None:
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        load_config(Path("a" * 5000))


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe\x00", b"a = " + b"[" * 5000, b"a = " + b"1" * 5000, None])
def test_unreadable_file_is_a_user_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "beta"),
    [({}, 2.0), ({"loss": "simpo"}, 2.0), ({"loss": "dpo"}, 0.1), ({"loss": "ipo", "beta": 2.0}, 2.0)],
)
def test_beta_that_is_not_given_is_that_of_the_loss(given: dict[str, Any], beta: float) -> None:
    config = SimpoConfig(**given)
    assert config.beta == beta
    assert SimpoConfig.model_validate_json(config.model_dump_json()) == config
