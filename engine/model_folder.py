"""A model folder of the user's, looked at without loading it: its JSON files, and the headers of its weights.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from schemas.errors import StageError, UserError

WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What transformers looks for, in its order."""

AGAIN: Final = "download or save the model again"

_MAX_CAUSE_CHARS: Final = 300


def cause(error: BaseException) -> str:
    """An error of a library's as one line; with its type where that is Python's own: `KeyError: 'x'`, not `'x'`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    text = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    bare = type(error).__module__ == "builtins" and not isinstance(error, (OSError, ValueError, RuntimeError))
    kind = f"{type(error).__name__}: " if bare and type(error) is not Exception else ""
    return (kind + text)[:_MAX_CAUSE_CHARS]


@contextmanager
def reading(problem: str, where: object, fix: str = "") -> Iterator[None]:
    """Whatever a library raises over the user's files is a UserError.

    There is no list of what that may be: a wrong value in config.json alone raises KeyError, ZeroDivisionError,
    AssertionError or one of three validation errors that share no base, by the field it is in.
    """
    try:
        yield
    except (UserError, StageError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{problem}: {cause(error)}", where=where, fix=fix) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its warnings: what is wrong is said in one line."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the file is damaged: {cause(error)}", where=path, fix=AGAIN) from error
    if not isinstance(value, dict):
        raise UserError(f"the file is damaged: a JSON object expected, not {value!r:.20}", where=path, fix=AGAIN)
    return value


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with all fields: where it has none, what transformers takes, which differs between families."""
    from transformers import AutoConfig

    with quiet_transformers():
        return json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether the stored weights are those of a quantisation method, whose names and shapes only that method knows."""
    parts = [config, config.get("text_config")]
    return any(part.get("quantization_config") for part in parts if isinstance(part, dict))


def weight_files(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The files that transformers would read the weights from.

    Raises:
        UserError: there are none, or one that the index names is not there.
    """
    own = config.get("transformers_weights")
    names = [str(own)] if own else WEIGHTS
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise UserError(
            "a model folder without weights", where=folder, fix=f"expected one of {', '.join(names)}; GGUF is not read"
        )
    if found.suffix != ".json":
        return [found]
    with reading("the file is damaged", found, AGAIN):
        files = [folder / name for name in sorted(set(read_json(found)["weight_map"].values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        first = f", first {missing[0]}" if missing else ""
        raise UserError(f"{len(missing)} of {len(files)} files of weights are missing{first}", where=folder, fix=AGAIN)
    return files


def count_safetensors(path: Path) -> int:
    """Parameters by the header alone: 8 bytes of length, then JSON with a shape and a place per tensor.

    Raises:
        UserError: no such header, or a file that is shorter or longer than it says.
    """
    n_bytes = path.stat().st_size
    with reading("not a safetensors file", path, AGAIN), path.open("rb") as file:
        (n_header_bytes,) = struct.unpack("<Q", file.read(8))
        if n_header_bytes > n_bytes - 8:
            raise ValueError(f"a header of {n_header_bytes} bytes in a file of {n_bytes}")
        header = json.loads(file.read(n_header_bytes))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        n_parameters = sum(math.prod(tensor["shape"]) for tensor in tensors)
        expected_bytes = 8 + n_header_bytes + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if n_bytes != expected_bytes:
        raise UserError(f"the file has {n_bytes} bytes of {expected_bytes}", where=path, fix=AGAIN)
    return n_parameters
