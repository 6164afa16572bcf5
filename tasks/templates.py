"""Which chat template a model is trained with, what its turns look like, and whether it can be trusted.

A template is usable when it (1) prints a conversation's beginning the same way whatever follows, (2) marks what the
model generates, (3) ends every turn with a stop token, (4) prints texts and calls as they were written. (1) to (3) are
probed here and again on the corpus; (4) is checked on every conversation (`skeleton.py`).
"""

import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from schemas.errors import UserError
from tasks.jinja import Chat, Jinja, RenderError, marks_generation

_OWN: Final = (
    # (text found in the stock template, our training template)
    ("Cutting Knowledge Date", "llama3_1_training.jinja"),
    ("[INST]", "mistral_training.jinja"),
    ("SmolLM, trained by Hugging Face", "smollm2_training.jinja"),
)
_MULTI_TURN: Final = [
    {"role": "system", "content": "Fix the bug."},
    {"role": "user", "content": "The test fails."},
    {"role": "assistant", "content": "I look at it.", "reasoning_content": "First the test."},
    {"role": "user", "content": "It still fails."},
    {"role": "assistant", "content": "I look again.", "reasoning_content": "Then the code."},
]


@dataclass(frozen=True)
class Template:
    """A chat template and the shape of its assistant turns, as probed.

    A turn is header, body, tail: the header is what the generation prompt gives the model; the tail begins at the stop
    token. `header_plain` is the header of a turn without reasoning (Qwen3 prefills an empty block then).
    """

    jinja: Jinja
    name: str
    header: str
    header_plain: str
    n_outside: int  # characters of the header that stand before the marked range
    n_outside_plain: int
    tail: str
    stop_token: str
    reasoning_open: str | None  # None: the template has no reasoning block
    reasoning_close: str
    call_open: str | None  # what a turn's first call begins with, up to the tool's name; None: calls are not printed
    special: re.Pattern[str]  # finds every added token of the tokenizer

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning_open is not None

    def body_start(self, text: str, marked: tuple[int, int], *, reasons: bool) -> int:
        """Where the model's own output begins.

        Raises:
            RenderError: the turn does not begin with the generation prompt.
        """
        headers = [(self.header_plain, self.n_outside_plain), (self.header, self.n_outside)]
        for header, n_outside in headers[reasons:]:
            start = marked[0] - n_outside
            if start >= 0 and text.startswith(header, start) and start + len(header) <= marked[1]:
                return start + len(header)
        raise RenderError("an assistant turn does not begin with the generation prompt")


def choose_source(tokenizer: PreTrainedTokenizerFast, choice: str) -> tuple[str, str]:
    """(name, Jinja source) for `auto`, `stock` or the path of a .jinja file.

    Raises:
        UserError: the file is missing, or the model has no template to start from.
    """
    if choice not in ("auto", "stock"):
        path = Path(choice).expanduser()
        if not path.is_file():
            raise UserError(
                "no such chat template", where=choice, fix="model.chat_template: auto, stock or a .jinja file"
            )
        return path.name, path.read_text(encoding="utf-8")
    stock = tokenizer.chat_template
    if not isinstance(stock, str):
        raise UserError(
            "the model folder has no chat template", where=tokenizer.name_or_path, fix="set model.chat_template"
        )
    if choice == "stock" or marks_generation(stock):
        return "the model's own", stock
    for text, file in _OWN:
        if text in stock:
            return file, (resources.files("tasks") / "chat_templates" / file).read_text(encoding="utf-8")
    try:
        training = get_training_chat_template(tokenizer)
    except ValueError:  # TRL knows no training form of it: the lint decides
        return "the model's own", stock
    return ("the model's own", stock) if training is None else ("trl training template", training)


def load_template(tokenizer: PreTrainedTokenizerFast, choice: str = "auto") -> Template:
    """Chooses a template and probes it.

    Raises:
        UserError: the template is not prefix-preserving, marks nothing as generated, or never stops a turn.
    """
    return probe_template(tokenizer, *choose_source(tokenizer, choice))


def probe_template(tokenizer: PreTrainedTokenizerFast, name: str, source: str) -> Template:
    """The shape of a template's turns, as it prints them.

    Raises:
        UserError: as `load_template`.
    """
    variables = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    jinja = Jinja(source, variables)
    try:
        check_prefix(jinja, tokenizer, _MULTI_TURN, None, name)
        return _probe(jinja, name, special_pattern(tokenizer))
    except RenderError as error:
        raise UserError(f"unusable chat template: {error}", where=name) from error


def special_pattern(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """Finds every added token, the longest first; matches nothing when there is none."""
    texts = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _probe(jinja: Jinja, name: str, special: re.Pattern[str]) -> Template:
    user = {"role": "user", "content": "probe question"}
    opening, _ = jinja.render([user])

    def header(thinking: bool) -> str:
        prompt, _ = jinja.render([user], generation_prompt=True, thinking=thinking)
        if not prompt.startswith(opening):
            raise RenderError("the generation prompt does not continue the conversation")
        return prompt[len(opening) :]

    def turn(**fields: object) -> tuple[str, tuple[int, int]]:
        # a user message follows: some templates never end the last turn, and the stock Qwen3 one keeps reasoning there
        chat = [user, {"role": "assistant", "reasoning_content": "", **fields}, user]
        text, ranges = jinja.render(chat)
        if len(ranges) != 1:
            raise RenderError(
                f"the template marks {len(ranges)} ranges as generated in a conversation with one assistant turn "
                "({% generation %} around the turn is needed)"
            )
        return text, ranges[0]

    text, marked = turn(content="probe answer")
    tail = text[slice(*marked)].rpartition("probe answer")[2]
    stop = special.search(tail)
    if stop is None:
        raise RenderError("an assistant turn does not end with a stop token")
    with_reasoning, with_reasoning_marked = turn(content="probe answer", reasoning_content="probe reason")
    template = Template(
        jinja=jinja,
        name=name,
        header=header(True),
        header_plain=header(False),
        n_outside=_n_outside(with_reasoning, with_reasoning_marked, header(True)),
        n_outside_plain=_n_outside(text, marked, header(False), header(True)),
        tail=tail,
        stop_token=stop.group(),
        reasoning_open=None,
        reasoning_close="",
        call_open=None,
        special=special,
    )
    start = template.body_start(with_reasoning, with_reasoning_marked, reasons=True)
    before, found, after = with_reasoning[start : with_reasoning_marked[1]].partition("probe reason")
    if found:
        template = replace(template, reasoning_open=before, reasoning_close=after.partition("probe answer")[0])
    call = {"type": "function", "id": "call00000", "function": {"name": "probe_tool", "arguments": "{}"}}
    text, marked = turn(content="", tool_calls=[call])
    start = template.body_start(text, marked, reasons=False)
    call_open, found, _ = text[start : marked[1]].partition("probe_tool")
    return replace(template, call_open=call_open if found else None)


def _n_outside(text: str, marked: tuple[int, int], *headers: str) -> int:
    """How much of a turn's header stands before the marked range: the range can begin before, in or after it."""
    for header in headers:
        for n_outside in range(len(header) + 1):
            start = marked[0] - n_outside
            if start >= 0 and text.startswith(header, start) and start + len(header) <= marked[1]:
                return n_outside
    raise RenderError("an assistant turn does not begin with the generation prompt")


def check_prefix(
    jinja: Jinja,
    tokenizer: PreTrainedTokenizerFast,
    chat: Chat,
    tools: list[dict[str, Any]] | None,
    where: str,
) -> None:
    """Refuses a template that prints a conversation's beginning otherwise once more messages follow.

    Tried after the first and before the last assistant turn, where templates that strip earlier reasoning show it.

    Raises:
        UserError: with the first differing token and its text.
    """
    turns = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    whole, _ = jinja.render(chat, tools)
    for end in sorted({turns[0] + 1, turns[-1]} - {0} if turns else ()):
        beginning, _ = jinja.render(chat[:end], tools)
        if not whole.startswith(beginning):
            raise UserError(
                "the chat template prints earlier messages otherwise when later ones follow: "
                + _first_differing_token(tokenizer, beginning, whole),
                where=f"{where}, messages 0 to {end - 1} of {len(chat)}",
                fix="set model.chat_template to auto or to a prefix-preserving template",
            )


def _first_differing_token(tokenizer: PreTrainedTokenizerFast, beginning: str, whole: str) -> str:
    a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (beginning, whole))
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def show(ids: list[int]) -> str:
        return f"{ids[at]} {tokenizer.decode(ids[at : at + 1])!r}" if at < len(ids) else "missing"

    before = tokenizer.decode(a[max(0, at - 8) : at])
    return f"after {before!r}, token {at} is {show(a)} alone and {show(b)} in the whole conversation"
