"""From a rendered conversation to labelled characters, and from there to labelled tokens.

A span is `[start, end)`, a kind, the message it came from and, inside an action, which call it is. Spans cover the
whole conversation without gap or overlap. Between characters and tokens one rule holds: **a token belongs to the span
that its first character belongs to.**
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from schemas.tables import SPAN_KINDS
from schemas.trajectory import Message
from tasks.jinja import RenderError
from tasks.skeleton import Piece, Rendering
from tasks.templates import Template

PROMPT, OBSERVATION, REASONING, THOUGHT, ACTION, TURN_END = range(len(SPAN_KINDS))


class Span(NamedTuple):
    """Characters, or tokens, [start, end)."""

    start: int
    end: int
    kind: int  # index into SPAN_KINDS
    message: int  # index into the trajectory's messages; -1 before the first
    call: int = -1  # inside an action: the call's number; -1 for a text action and outside


class Tokens(NamedTuple):
    ids: np.ndarray  # [n_tokens] int32
    spans: tuple[Span, ...]  # in tokens, covering [0, n_tokens)


def label(rendering: Rendering, messages: Sequence[Message], template: Template) -> list[Span]:
    """Spans over the characters of a rendered conversation.

    Only turns of the policy model get the kinds reasoning, thought, action and turn_end; every other assistant turn
    is prompt.

    Raises:
        RenderError: a turn is not header, body, tail as the template was probed to print it.
    """
    by_message: dict[int, list[Piece]] = {}
    for piece in rendering.pieces:
        by_message.setdefault(piece.message, []).append(piece)
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if len(turns) != len(rendering.turns):
        raise RenderError(f"{len(turns)} assistant turns, but the template marks {len(rendering.turns)} as generated")

    labelled: list[Span] = []
    for index, marked in zip(turns, rendering.turns, strict=True):
        if messages[index].trainable:
            labelled += _turn(rendering.text, marked, index, messages[index], by_message.get(index, []), template)
        else:
            labelled.append(Span(*marked, PROMPT, index))
    in_turn = set(turns)
    for piece in rendering.pieces:
        if piece.message >= 0 and piece.message not in in_turn:
            observed = messages[piece.message].author == "environment"
            labelled.append(Span(piece.start, piece.end, OBSERVATION if observed else PROMPT, piece.message))
    return _cover(sorted(span for span in labelled if span.end > span.start), len(rendering.text))


def _cover(spans: list[Span], length: int) -> list[Span]:
    """Fills the gaps with prompt; a gap belongs to the message before it."""
    covered: list[Span] = []
    position, message = 0, -1
    for span in spans:
        if span.start < position:
            raise RenderError(f"spans overlap at character {span.start} (message {span.message})")
        if span.start > position:
            covered.append(Span(position, span.start, PROMPT, message))
        covered.append(span)
        position, message = span.end, span.message
    if position < length:
        covered.append(Span(position, length, PROMPT, message))
    return covered


def _turn(
    text: str, marked: tuple[int, int], index: int, message: Message, pieces: list[Piece], template: Template
) -> list[Span]:
    """Reasoning, thought, action and turn end of one policy turn."""
    parts = {(piece.part, piece.call): piece for piece in pieces}
    reasoning, content = parts.get(("reasoning", 0)), parts.get(("content", 0))
    start = template.body_start(text, marked, reasons=reasoning is not None)
    end = marked[1] - len(template.tail)
    if not text.startswith(template.tail, end) or end < start:
        raise RenderError(f"message {index} does not end with {template.stop_token!r}")
    stop_end = end + template.tail.index(template.stop_token) + len(template.stop_token)
    spans = [Span(end, stop_end, TURN_END, index), Span(stop_end, marked[1], PROMPT, index)]

    if reasoning is not None:
        opened = text.startswith(template.reasoning_open or "", start)
        reasoning_end = reasoning.end + len(template.reasoning_close)
        if not opened or not text.startswith(template.reasoning_close, reasoning.end) or reasoning_end > end:
            raise RenderError(f"the reasoning of message {index} is not printed as a block of its own")
        spans.append(Span(start, reasoning_end, REASONING, index))
        start = reasoning_end

    if message.tool_calls:
        call_open = template.call_open or ""
        # a line end between text and call goes with the text, so that a call's first token is its own
        text_end = parts["name", 0].start - len(call_open)
        if text_end < start or not text.startswith(call_open, text_end):
            raise RenderError(f"the first call of message {index} does not begin as the template's calls do")
        spans += _fenced(start, text_end, message, content, index)
        spans += _calls(text, text_end, end, len(message.tool_calls), parts, index)
    elif message.action_spans:
        spans += _fenced(start, end, message, content, index)
    else:
        spans.append(Span(start, end, ACTION, index))
    if any(not marked[0] <= piece.start <= piece.end <= end for piece in pieces):
        raise RenderError(f"the template prints parts of message {index} outside its turn")
    return spans


def _fenced(start: int, end: int, message: Message, content: Piece | None, index: int) -> list[Span]:
    """Text with calls written into it: the calls are action, the rest is thought."""
    spans, position = [], start
    if content is not None:
        for fence in sorted(message.action_spans, key=lambda span: span.start):
            fence_start, fence_end = (
                min(max(content.start + at - content.offset, position), content.end) for at in (fence.start, fence.end)
            )
            spans += [
                Span(position, fence_start, THOUGHT, index),
                Span(fence_start, fence_end, ACTION, index),
            ]
            position = fence_end
    return [*spans, Span(position, end, THOUGHT, index)]


def _calls(
    text: str, start: int, end: int, n_calls: int, parts: dict[tuple[str, int], Piece], index: int
) -> list[Span]:
    """One action span a call. A call's closing text is what follows its arguments, as the last call shows it."""
    closing = text[parts["arguments", n_calls - 1].end : end]
    edges = [start]
    for number in range(n_calls - 1):
        arguments_end, next_name = (
            parts["arguments", number].end,
            min(parts["name", number + 1].start, parts["arguments", number + 1].start),
        )
        edges.append(arguments_end + _n_equal(text[arguments_end:next_name], closing))
    return [Span(a, b, ACTION, index, number) for number, (a, b) in enumerate(pairwise([*edges, end]))]


def _n_equal(a: str, b: str) -> int:
    """How many leading characters are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class SpanTokenizer:
    """Tokenises renderings: the template's added tokens stay tokens, text that looks like one stays text.

    The conversation is cut at the added tokens that stand in the template's own text; what lies between is encoded
    by a copy of the tokenizer that knows no added tokens. For text without look-alikes this gives the ids that the
    tokenizer gives for the whole text (`agrees` says whether it does).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, special: re.Pattern[str]) -> None:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        settings |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._plain = Tokenizer.from_str(json.dumps(settings))
        self.whole = tokenizer
        self._special = special
        self._special_ids = tokenizer.get_added_vocab()

    def encode(self, rendering: Rendering, spans: Sequence[Span]) -> Tokens:
        """Token ids, and the spans with their ends in tokens; a span without a token of its own is left out."""
        starts = [span.start for span in spans]
        chunks, special_ids = self._cut(rendering)
        # one by one: the cores are kept busy by processes, and threads of the tokenizer would not survive a fork
        encodings = [self._plain.encode(rendering.text[a:b], add_special_tokens=False) for a, b in chunks]
        ids: list[int] = []
        edges: list[int] = []  # token index at which each span starts
        for number, ((start, end), encoding) in enumerate(zip(chunks, encodings, strict=True)):
            inside = starts[len(edges) : bisect_left(starts, end)]
            if inside:
                offsets = encoding.offsets if inside[-1] > start else []
                edges += [len(ids) + bisect_left(offsets, (at - start,)) for at in inside]
            ids += encoding.ids
            if number < len(special_ids):
                within = starts[len(edges) : bisect_left(starts, chunks[number + 1][0])]
                edges += [len(ids) + (at > end) for at in within]
                ids.append(special_ids[number])
        edges.append(len(ids))
        in_tokens = [
            span._replace(start=a, end=b) for span, (a, b) in zip(spans, pairwise(edges), strict=True) if b > a
        ]
        return Tokens(np.array(ids, np.int32), tuple(in_tokens))

    def _cut(self, rendering: Rendering) -> tuple[list[tuple[int, int]], list[int]]:
        """Character ranges between the template's added tokens, and the ids of those tokens."""
        chunks, special_ids, position, written = [], [], 0, 0
        for piece in (*rendering.pieces, None):
            scaffold_end = len(rendering.text) if piece is None else piece.start
            for match in self._special.finditer(rendering.text, written, scaffold_end):
                chunks.append((position, match.start()))
                special_ids.append(self._special_ids[match.group()])
                position = match.end()
            written = scaffold_end if piece is None else piece.end
        return [*chunks, (position, len(rendering.text))], special_ids

    def agrees(self, rendering: Rendering) -> bool:
        """Whether the tokenizer itself gives the same ids; True where the conversation holds look-alikes."""
        for piece in rendering.pieces:
            if self._special.search(rendering.text, piece.start, piece.end):
                return True
        whole = self.whole(rendering.text, add_special_tokens=False)["input_ids"]
        return whole == self.encode(rendering, [Span(0, len(rendering.text), PROMPT, -1)]).ids.tolist()
