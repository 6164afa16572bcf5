"""The shape of a model: what its config.json says about sizes, checked before anything is computed from it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import PydanticCustomError

from engine.budget import LONG_CONTEXT_FAMILIES, window_of
from engine.model_config import config_problem, rope_problem
from engine.model_folder import with_defaults
from schemas.base import first_problem
from schemas.errors import UserError

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "tiny-qwen3": {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Shapes that can be planned for before their weights are here, or made."""

FIX: Final = "compare it with the one that was published"
OTHER_FAMILY: Final = f"plan for a model of one of these: {', '.join(LONG_CONTEXT_FAMILIES)}"


def _covered(family: str) -> str:
    if family not in LONG_CONTEXT_FAMILIES:
        said = "the long-context engine, whose memory alone is predicted, does not cover {family}"
        raise PydanticCustomError("other_family", said, {"family": family[:40]})
    return family


Heads = Annotated[int, Field(ge=1, le=1024)]
Features = Annotated[int, Field(ge=1, le=2**20)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


class ModelShape(BaseModel):
    """The fields of a config.json that the ledger and the choice of an engine go by; all others are left alone.

    The upper bounds are beyond the largest models of these families (126 layers), and keep planning within a minute.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    model_type: Annotated[str, AfterValidator(_covered)]
    vocab_size: int = Field(ge=1, le=2**24)
    hidden_size: Features
    intermediate_size: Features
    num_hidden_layers: int = Field(ge=1, le=128)
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    use_sliding_window: bool = False
    max_window_layers: int = Field(default=0, ge=0)
    layer_types: tuple[str, ...] | None = None
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    rms_norm_eps: float = Field(default=1e-6, ge=0, lt=1)
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_scaling: dict[str, JsonValue] | None = None
    rope_parameters: dict[str, JsonValue] | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    quantization_config: dict[str, JsonValue] | None = None

    def config(self) -> dict[str, Any]:
        """As a config.json has it: with the fields that were given."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def window_tokens(self) -> int | None:
        """Within which some layer attends; None: every layer sees all."""
        return window_of(self)

    @property
    def rope_type(self) -> str:
        rope = self.rope_parameters or self.rope_scaling or {}
        return str(rope.get("rope_type", rope.get("type", "default")))


def _reason(error: Exception) -> str:
    """What transformers found wrong, as a short line without its wrapping."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    text = " ".join(text.rpartition("Error: ")[2].partition(". Errors: ")[0].split())
    text = text.replace("got NoneType (value: None)", "got null")
    return text if len(text) <= 200 else f"{text[:120]} … {text[-70:]}"


def _not_given(problem: str, raw: Mapping[str, Any]) -> str:
    """Which fields that a problem names are not in the file."""
    absent = [name for name in ModelShape.model_fields if re.search(rf"\b{name}\b", problem) and raw.get(name) is None]
    return f"; the file has no {' and no '.join(absent)}: that is the family's default" if absent else ""


def read_shape(model: str) -> tuple[str, ModelShape]:
    """(name, shape) of one of `SHAPES`, a config.json, or the folder it lies in. Reads that file and writes nothing.

    Raises:
        UserError: no such model, or a shape that no model of a family with a ledger has.
    """
    if model.lower() in SHAPES:
        return model.lower(), ModelShape.model_validate(SHAPES[model.lower()])
    path = Path(model) if model.endswith(".json") else Path(model) / "config.json"
    try:
        path = path.expanduser()
        name = path.resolve().parent.name
        if path.exists() and not path.is_file():
            raise UserError("not a file", where=path, fix="give a model's folder")
        text = path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user as in ~user
        reason = error.strerror if isinstance(error, OSError) else error
        fix = f"give --model a folder, or one of {', '.join(SHAPES)}, which need none"
        raise UserError(f"no readable model config ({reason})", where=path, fix=fix) from error
    try:
        given = ModelShape.model_validate_json(text)  # first: a wrong type is told by field
        raw = json.loads(text)
        problem = rope_problem(given.rope_scaling or given.rope_parameters or {})
        shape = given if problem else ModelShape.model_validate_json(json.dumps(with_defaults(raw)))
    except ValidationError as error:
        fix = OTHER_FAMILY if error.errors()[0]["type"] == "other_family" else FIX
        raise UserError(first_problem(error), where=path, fix=fix) from error
    except Exception as error:  # transformers has no base of its own for what it finds wrong
        raise UserError(f"transformers does not take it: {_reason(error)}", where=path, fix=FIX) from error
    if problem := problem or config_problem(shape):
        raise UserError(f"no model can be trained with {problem}{_not_given(problem, raw)}", where=path, fix=FIX)
    return name, shape
