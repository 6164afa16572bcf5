"""Rendering one run: text, labelled spans over characters and tokens, and a weight for each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from schemas.config import RenderConfig
from schemas.errors import UserError
from schemas.refs import Ref
from schemas.trajectory import Trajectory
from tasks.jinja import RenderError
from tasks.model import load_tokenizer
from tasks.scoring import span_weights
from tasks.skeleton import Rendering, render_conversation
from tasks.spans import Span, SpanTokenizer, label
from tasks.templates import Template, check_prefix, choose_source, probe_template


@dataclass(frozen=True)
class Renderer:
    """A model's template and tokenizer, ready for use."""

    template: Template
    tokens: SpanTokenizer


@dataclass(frozen=True)
class LabelledRun:
    """One rendered conversation: its text, and spans over characters and tokens with a weight for each."""

    rendering: Rendering
    char_spans: tuple[Span, ...]
    token_ids: np.ndarray  # [n_tokens] int32
    spans: tuple[Span, ...]  # in tokens
    weights: tuple[float, ...]  # one a token span; 0: not scored

    @property
    def n_scored(self) -> int:
        return sum(span.end - span.start for span, weight in zip(self.spans, self.weights, strict=True) if weight > 0)


def make_renderer(model: Ref | Path, chat_template: str = "auto") -> Renderer:
    """Loads the tokenizer and the template of a model.

    Args:
        chat_template: auto, stock, or a .jinja file, as `model.chat_template` of the config.

    Raises:
        UserError: the tokenizer does not load, or the template cannot be trained with.
    """
    tokenizer = load_tokenizer(model)
    return renderer_of(tokenizer, *choose_source(tokenizer, chat_template))


def renderer_of(tokenizer: PreTrainedTokenizerFast, name: str, source: str) -> Renderer:
    """A renderer with the template of that Jinja source; `name` is what reports call it.

    Raises:
        UserError: the template cannot be trained with.
    """
    template = probe_template(tokenizer, name, source)
    return Renderer(template, SpanTokenizer(tokenizer, template.special))


def render_run(trajectory: Trajectory, renderer: Renderer, config: RenderConfig) -> LabelledRun:
    """Renders, labels and weights one run.

    Raises:
        RenderError: the run cannot be rendered as it was written; the text is the reason in the report.
        UserError: the template cannot be used for this corpus at all.
    """
    template, messages = renderer.template, trajectory.messages
    if not messages:
        raise RenderError("the run holds no message")
    if template.call_open is None and any(message.tool_calls for message in messages):
        raise UserError(
            "the chat template leaves out tool calls, and the runs have some",
            where=template.name,
            fix="set model.chat_template to one that prints them",
        )
    rendering = render_conversation(
        template.jinja,
        messages,
        _tools(trajectory),
        with_reasoning=template.has_reasoning,
        special=template.special,
        check_prefix=lambda chat, tools: check_prefix(
            template.jinja, renderer.tokens.whole, chat, tools, f"{trajectory.source_path} ({trajectory.trajectory_id})"
        ),
    )
    char_spans = label(rendering, messages, template)
    tokens = renderer.tokens.encode(rendering, char_spans)
    weights = span_weights(tokens.spans, messages, config)
    return LabelledRun(rendering, tuple(char_spans), tokens.ids, tokens.spans, tuple(weights))


def _tools(trajectory: Trajectory) -> list[dict[str, Any]] | None:
    if not trajectory.tools_json:
        return None
    try:
        tools = json.loads(trajectory.tools_json)
    except ValueError as error:
        raise RenderError(f"the tool schemas are no JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RenderError("the tool schemas are no JSON array of objects")
    return tools or None
