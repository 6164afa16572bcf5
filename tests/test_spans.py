"""Spans and weights over tokens: a table of small conversations, and random ones."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import pytest
from conversations import CASES, WORDS, Case
from emitted import emitted, joined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_inputs import (
    FAMILIES,
    decode,
    family_tokenizer,
    fenced,
    make_renderer,
    result,
    run_of,
    scored_text,
    stock_template,
    system,
    turn,
    user,
    word_tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from schemas.tables import SPAN_KINDS
from schemas.trajectory import Message
from tasks.pair_rules import n_shared_prefix
from tasks.renderer import Renderer
from tasks.spans import ACTION, OBSERVATION, PROMPT, TURN_END


@pytest.fixture(scope="module")
def words() -> Renderer:
    return make_renderer(word_tokenizer(WORDS, stock_template("qwen3.jinja")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case, words: Renderer) -> None:
    run = run_of(case.messages, words, **case.config)
    expected = []
    for line in filter(None, map(str.strip, case.spans.splitlines())):
        head, ids = line.split(":")
        kind, message, weight = head.split()
        expected.append((kind, int(message), float(weight), [int(number) for number in ids.split()]))
    found = [
        (SPAN_KINDS[span.kind], span.message, weight, run.token_ids[span.start : span.end].tolist())
        for span, weight in zip(run.spans, run.weights, strict=True)
    ]
    assert found == expected
    assert len(run.token_ids) == sum(len(ids) for *_, ids in expected)
    assert run.n_scored == sum(len(ids) for _, _, weight, ids in expected if weight > 0)
    first = run_of(CASES[0].messages, words)
    assert n_shared_prefix(first.token_ids, run.token_ids) == case.n_shared


class Added(str):
    """An added token of the template's own."""


START, END = Added("<|im_start|>"), Added("<|im_end|>")


def by_hand(messages: Sequence[Message]) -> list[str]:
    """Qwen3's format, written down a second time: added tokens and the text between them, in turn."""
    parts: list[str] = []
    roles = [message.role for message in messages]
    for index, message in enumerate(messages):
        if message.role == "tool":
            first, last = roles[index - 1 : index] != ["tool"], roles[index + 1 : index + 2] != ["tool"]
            parts += [START, "user"] if first else []
            parts += [f"\n<tool_response>\n{message.content}\n</tool_response>"]
            parts += [END, "\n"] if last else []
            continue
        parts += [START, f"{message.role}\n"]
        if message.role == "assistant":
            reasoning = (message.reasoning or "").strip("\n")
            text = message.content.lstrip("\n")
            parts += [Added("<think>"), f"\n{reasoning}\n", Added("</think>"), f"\n\n{text}"]
            for number, call in enumerate(message.tool_calls):
                parts += ["\n" if text or number else "", Added("<tool_call>")]
                parts += [f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n', Added("</tool_call>")]
        else:
            parts += [message.content]
        parts += [END, "\n"]
    return parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table_once_more_without_our_code(case: Case, words: Renderer) -> None:
    """The ids of the table from the bare tokenizer model: only kinds and weights rest on reading alone."""
    backend, added = words.tokens.whole.backend_tokenizer, words.tokens.whole.get_added_vocab()
    ids: list[int] = []
    for is_added, parts in groupby(by_hand(case.messages), lambda part: isinstance(part, Added)):
        if is_added:
            ids += [added[part] for part in parts]
        else:
            for word, _ in backend.pre_tokenizer.pre_tokenize_str("".join(parts)):
                ids += [token.id for token in backend.model.tokenize(word)]
    written = [int(number) for line in case.spans.splitlines() if line.strip() for number in line.split(":")[1].split()]
    assert written == ids


def test_the_table_is_large_enough() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30


_LOOK_ALIKES = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<think>",
    "</think>\n\n",
    "</tool_call>",
    "[INST]",
    "</s>",
    "\ue000",
]
_text = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from([*_LOOK_ALIKES, "\n", "  ", "user", "assistant", "e\u0301", "👩‍💻", '"', "\\t", "\t"]),
    ),
    max_size=5,
).map("".join)
_name = st.text("abcdefg_", min_size=1, max_size=6)
_call = st.tuples(_name, st.one_of(st.just("{}"), _text.map(lambda text: f'{{"a":  "{text}"}}')))
_turn = st.builds(
    lambda text, calls, reasoning: turn(text, *calls, reasoning=reasoning),
    _text,
    st.lists(_call, max_size=3),
    st.none() | _text,
)
_fence = _text.map(lambda text: f"```sh\n{text}\n```")
_fenced = st.builds(lambda a, fence, b: fenced(f"{a}{fence}{b}", fence), _text, _fence, _text)
_conversation = st.lists(st.one_of(_text.map(user), _turn, _fenced, _text.map(result)), min_size=1, max_size=7).map(
    lambda messages: [system(), user(), *messages, turn("done")]
)


@pytest.fixture(scope="module")
def renderers() -> dict[str, Renderer]:
    return {family: make_renderer(family_tokenizer(family)) for family in FAMILIES}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=_conversation, family=st.sampled_from(FAMILIES))
def test_random_conversations(messages: list[Message], family: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[family]
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|im_end|></s><|eot_id|>"}}]
    run = run_of(messages, renderer, tools)
    ids, template = run.token_ids.tolist(), renderer.template

    assert decode(ids, renderer) == run.rendering.text
    assert [span.start for span in run.spans] == [0, *(span.end for span in run.spans[:-1])]
    assert run.spans[-1].end == len(ids)

    # as many stop tokens as turns: text that looks like one has not become one
    stop = renderer.tokens.whole.get_added_vocab()[template.stop_token]
    turns = [index for index, message in enumerate(messages) if message.trainable]
    ends = [span for span in run.spans if span.kind == TURN_END]
    assert [ids[span.start : span.end] for span in ends] == [[stop]] * len(turns)
    assert [span.message for span in ends] == turns
    if family in ("llama3.1", "mistral"):  # elsewhere the template itself ends other messages with the same token
        n_printed = len(turns) if family == "mistral" else len(messages)
        assert ids.count(stop) in (n_printed, n_printed + 1)  # and one for a system message that Llama adds

    for span in run.spans:
        if span.kind == ACTION and span.call >= 0:
            call = messages[span.message].tool_calls[span.call]
            assert call.arguments in decode(ids[span.start : span.end], renderer)
        if span.kind == OBSERVATION:
            assert messages[span.message].author == "environment"
        if span.kind != PROMPT and span.kind != OBSERVATION:
            assert messages[span.message].trainable


def token_starts(ids: list[int], renderer: Renderer) -> list[int]:
    """The character in which each token begins, counted from the bytes that the tokens stand for alone."""
    whole = renderer.tokens.whole
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    added = {number: text.encode() for text, number in whole.get_added_vocab().items()}
    pieces = [
        added[number] if number in added else bytes(byte_of[char] for char in whole.convert_ids_to_tokens(number))
        for number in ids
    ]
    character_of_byte = [at for at, char in enumerate(b"".join(pieces).decode()) for _ in char.encode()]
    return [character_of_byte[at] for at in accumulate(map(len, pieces), initial=0) if at < len(character_of_byte)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=_conversation, family=st.sampled_from(FAMILIES))
def test_what_the_turns_emitted_byte_for_byte(
    messages: list[Message], family: str, renderers: dict[str, Renderer]
) -> None:
    """Labelled text is what the turn emitted, exactly; and a token has the label of the character that it begins in."""
    renderer = renderers[family]
    run = run_of(messages, renderer, loss_on=("reasoning", "thought", "action", "turn_end"))
    own = [span for span in run.char_spans if span.kind not in (PROMPT, OBSERVATION)]
    for index, message in enumerate(messages):
        found = [(span.kind, run.rendering.text[span.start : span.end]) for span in own if span.message == index]
        assert joined(found) == (emitted(message, family) if message.trainable else [])

    kind_of_character = [span for span in run.char_spans for _ in range(span.end - span.start)]
    expected = [kind_of_character[at] for at in token_starts(run.token_ids.tolist(), renderer)]
    labels = [(span, weight) for span, weight in zip(run.spans, run.weights, strict=True)]
    tokens = [(span, weight) for span, weight in labels for _ in range(span.end - span.start)]
    assert [(span.kind, span.message, span.call) for span, _ in tokens] == [
        (span.kind, span.message, span.call) for span in expected
    ]
    assert [weight > 0 for _, weight in tokens] == [span.kind not in (PROMPT, OBSERVATION) for span in expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_begins_with_blanks(family: str, renderers: dict[str, Renderer]) -> None:
    """The one place where scored text is not the turn's own to the byte: a token that begins in the header is lost."""
    renderer = renderers[family]
    for text in ("\n\n done", "  done", "\tdone", "\n", " "):
        messages = (user("go"), turn(text), user("go on"), turn("end"))
        run = run_of(messages, renderer, loss_on=("action", "turn_end"))
        whole = "".join(part for message in messages if message.trainable for _, part in emitted(message, family))
        starts = [*token_starts(run.token_ids.tolist(), renderer), len(run.rendering.text)]
        lost = 0
        for span in run.char_spans:
            if span.kind == ACTION:
                lost += min(next(at for at in starts if at >= span.start), span.end) - span.start
        scored = scored_text(run, renderer)
        assert len(scored) == len(whole) - lost, text
        assert lost == 0 or family in BLANKS_BEGIN_IN_THE_HEADER, text
        if lost == 0:
            assert scored == whole


BLANKS_BEGIN_IN_THE_HEADER = {"qwen3-instruct-2507", "qwen2.5", "smollm2"}
"""Their header ends with a line end that a tokenizer joins with line ends after it; the other templates trim, or end
the header with an added token."""


def test_look_alikes_encode_as_text_and_clean_text_as_the_tokenizer_does(words: Renderer) -> None:
    clean = run_of((user("go"), turn("done")), words)
    assert words.tokens.agrees(clean.rendering)
    whole = words.tokens.whole(clean.rendering.text, add_special_tokens=False)["input_ids"]
    assert clean.token_ids.tolist() == whole
    dirty = run_of((user("<|im_end|>"), turn("done")), words)
    assert words.tokens.whole(dirty.rendering.text, add_special_tokens=False)["input_ids"] != dirty.token_ids.tolist()
