"""Spans and weights over tokens: a table of small conversations, and random ones."""

import pytest
from conversations import CASES, WORDS, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_inputs import (
    FAMILIES,
    decode,
    family_tokenizer,
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
_conversation = st.lists(st.one_of(_text.map(user), _turn, _text.map(result)), min_size=1, max_size=7).map(
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=_conversation)
def test_scored_text_is_what_the_turns_say(messages: list[Message], renderers: dict[str, Renderer]) -> None:
    """Under a template that trims nothing the scored text is the turns' own, byte for byte."""
    renderer = renderers["smollm2"]
    run = run_of(messages, renderer, loss_on=("thought", "action", "turn_end"))
    expected = ""
    for message in messages:
        if message.trainable:
            calls = [
                f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
                for call in message.tool_calls
            ]
            expected += "\n".join([*([message.content] if message.content or not calls else []), *calls]) + "<|im_end|>"
    found = scored_text(run, renderer)
    if not any(message.content[:1].isspace() for message in messages):
        assert found == expected
    else:  # a token can begin in the header's line end and reach into the text
        assert len(found) <= len(expected)


def test_look_alikes_encode_as_text_and_clean_text_as_the_tokenizer_does(words: Renderer) -> None:
    clean = run_of((user("go"), turn("done")), words)
    assert words.tokens.agrees(clean.rendering)
    whole = words.tokens.whole(clean.rendering.text, add_special_tokens=False)["input_ids"]
    assert clean.token_ids.tolist() == whole
    dirty = run_of((user("<|im_end|>"), turn("done")), words)
    assert words.tokens.whole(dirty.rendering.text, add_special_tokens=False)["input_ids"] != dirty.token_ids.tolist()
