"""Choosing and refusing chat templates."""

from pathlib import Path

import pytest
from render_inputs import FAMILIES, family_tokenizer, make_renderer, run_of, scored_text, stock_template, turn, user

from schemas.errors import UserError
from tasks.templates import load_template


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_finds_a_training_template(family: str) -> None:
    template = load_template(family_tokenizer(family))
    assert template.stop_token == {"llama3.1": "<|eot_id|>", "mistral": "</s>"}.get(family, "<|im_end|>")
    assert template.tail.startswith(template.stop_token)
    assert template.has_reasoning == (family == "qwen3")
    assert template.call_open is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_our_generation_header_is_the_prompt_that_a_server_gives(family: str) -> None:
    """The scored part begins where the generation prompt ends: with and without reasoning."""
    tokenizer = family_tokenizer(family)
    renderer = make_renderer(tokenizer)
    for reasoning in (None, "hm") if renderer.template.has_reasoning else (None,):
        run = run_of((user(), turn("done", reasoning=reasoning)), renderer, loss_on=("reasoning", "action", "turn_end"))
        prompt, _ = renderer.template.jinja.render(
            [{"role": "user", "content": user().content}], generation_prompt=True, thinking=reasoning is not None
        )
        scored = scored_text(run, renderer)
        assert run.rendering.text.startswith(prompt + scored)


@pytest.mark.parametrize(
    ("stock", "message"),
    [
        ("qwen3.jinja", r"token \d+ is \d+ '<think>' alone"),
        ("qwen2_5.jinja", "marks 0 ranges as generated"),
        ("llama3_1.jinja", "marks 0 ranges as generated"),
    ],
)
def test_stock_templates_are_refused(stock: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / stock
    path.write_text(stock_template(stock), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_template(family_tokenizer("qwen3"), str(path))


def test_a_template_that_never_stops_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "endless.jinja"
    path.write_text(
        stock_template("qwen3_training.jinja").replace("{{- '<|im_end|>\\n' }}\n        {%- endgen", "{%- endgen")
    )
    with pytest.raises(UserError, match="does not end with a stop token"):
        load_template(family_tokenizer("qwen3"), str(path))


def test_a_template_that_rewrites_a_text_drops_the_run_by_name(tmp_path: Path) -> None:
    from tasks.jinja import RenderError

    path = tmp_path / "upper.jinja"
    source = stock_template("qwen3_training.jinja")
    path.write_text(
        source.replace("'\\n' + content + '<|im_end|>'", "'\\n' + content | replace('secret', '***') + '<|im_end|>'")
    )
    renderer = make_renderer(family_tokenizer("qwen3"), str(path))
    assert run_of((user("open"), turn("done")), renderer).n_scored > 0
    with pytest.raises(RenderError, match="rewrites a message's text: expected 'secret"):
        run_of((user("a secret"), turn("done")), renderer)


def test_a_template_without_calls_is_refused_when_the_runs_have_some(tmp_path: Path) -> None:
    path = tmp_path / "nocalls.jinja"
    path.write_text(stock_template("qwen3_training.jinja").replace("{%- if message.tool_calls %}", "{%- if false %}"))
    renderer = make_renderer(family_tokenizer("qwen3"), str(path))
    run_of((user(), turn("done")), renderer)
    with pytest.raises(UserError, match="leaves out tool calls"):
        run_of((user(), turn("", ("bash", "{}"))), renderer)


def test_no_template_and_no_file() -> None:
    tokenizer = family_tokenizer("qwen3")
    with pytest.raises(UserError, match="no such chat template"):
        load_template(tokenizer, "nowhere.jinja")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        load_template(tokenizer)
