"""Tokenizers made by us: the one of tiny-qwen3, trained on the spot, and SmolLM2's, out of its GGUF file."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE: Final = 4096

_CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKUP: Final = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MODULES: Final = (
    "argparse",
    "ast",
    "bdb",
    "collections/__init__",
    "configparser",
    "dataclasses",
    "difflib",
    "functools",
    "inspect",
    "json/decoder",
    "logging/__init__",
    "pathlib",
    "pdb",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "traceback",
    "unittest/case",
    "unittest/mock",
)
_MAX_MODULE_CHARS: Final = 60_000

_AGENT_TEXT: Final = """\
You are a helpful assistant that can interact with a computer to fix a bug in a Python package.
Your response must contain a tool call. Please solve this issue: the test fails with an AssertionError.
{"name": "bash", "arguments": {"command": "python -m pytest -x -q tests/test_module.py 2>&1 | tail -20"}}
{"command": "cd /testbed && sed -n '1,80p' src/package/module.py"} {"command": "grep -rn 'def ' --include=*.py ."}
============================= test session starts ==============================
platform linux -- Python 3.11, pytest-9.2, pluggy-1.6 collected 12 items
FAILED tests/test_module.py::test_add - AssertionError: assert 3 == 4
E       assert 3 == 4
Traceback (most recent call last):
  File "/testbed/src/package/module.py", line 42, in compute
    raise ValueError(f"unknown key {key!r}")
> /testbed/src/package/module.py(42)compute()
(Pdb) p value
(Pdb) where
(Pdb) continue
<returncode>0</returncode>
<output>
</output>
diff --git a/src/package/module.py b/src/package/module.py
--- a/src/package/module.py
+++ b/src/package/module.py
@@ -10,7 +10,7 @@ def compute(values):
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff --cached
Let me look at the failing test first, then run the debugger and set a breakpoint at the function.
"""


def _corpus() -> Iterator[str]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        for path in (stdlib / f"{module}.py", stdlib / module / "__init__.py"):
            if path.is_file():
                yield path.read_text(encoding="utf-8")[:_MAX_MODULE_CHARS]
                break
    yield _AGENT_TEXT * 20


def train_tiny_tokenizer(chat_template: str, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text has tokens, and decoding gives every text back.

    The same Python release gives the same tokenizer. Unlike Qwen's own it has no NFC normaliser, so that text in any
    normal form survives.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_CONTROL) - len(_MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        model_max_length=131_072,
        clean_up_tokenization_spaces=False,
    )


def smollm2_tokenizer(gguf_path: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from the vocabulary, merges and chat template that its GGUF file holds.

    Not through transformers' own reader of GGUF tokenizers, which takes a wrong end token, leaves out the splitting of
    digits, and decodes "▁" to a blank.
    """
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]  (extra `gguf`)

    fields = GGUFReader(gguf_path).fields

    def field(name: str) -> Any:
        return fields[name].contents()

    texts, control = field("tokenizer.ggml.tokens"), 3
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    specials = [text for text, kind in zip(texts, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=field("tokenizer.chat_template"),
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        **{key: texts[field(f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()},
    )
