"""Rendering a conversation so that every piece of it has a known place in the text.

A search for a message's text in the rendered conversation can hit the wrong place (a message that says "user"), and it
cannot tell a template's `<|im_end|>` from one that a file listing happens to contain. So the template first renders
marks in the place of the pieces; the marks are then replaced by the pieces. The result is compared with what the
template makes of the pieces themselves: a template that rewrites a text is found out, never guessed around.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from schemas.trajectory import Message
from tasks.jinja import Chat, Jinja, RenderError

Part = Literal["content", "reasoning", "name", "arguments", "schema"]


class Piece(NamedTuple):
    """Characters [start, end) of the rendered text that are a message's own."""

    start: int
    end: int
    message: int  # -1: the tool schemas
    part: Part
    call: int
    offset: int  # where in the message's text the piece begins: leading blanks that the template trims


class Rendering(NamedTuple):
    text: str
    pieces: tuple[Piece, ...]  # in the order of the text
    turns: tuple[tuple[int, int], ...]  # characters the template marks as generated, one range an assistant message


class _Slot(NamedTuple):
    message: int
    part: Part
    call: int
    text: str
    lead: str  # blanks around the text, which a template may trim
    trail: str


_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xE010)]
_WORD = re.compile(r"[\w.-]+")


class _Marks:
    """Marks that no text of this conversation contains.

    The mark of an argument string holds a tab: a template that dumps the string as JSON prints it as backslash and t,
    in quotes, and so tells that the quotes are to go.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        free = [char for char in _PRIVATE_USE if not any(char in text for text in texts)]
        if len(free) < 2:
            raise RenderError("the conversation uses the private-use characters U+E000 to U+E00F")
        self.open, self.close = free[:2]
        self.pattern = re.compile(rf'(?P<q>")?{self.open}(\d+)(\t|\\t)?{self.close}(?(q)(?P<r>")?)')

    def of(self, index: int, part: Part) -> str:
        return f"{self.open}{index}{chr(9) if part == 'arguments' else ''}{self.close}"

    def split(self, text: str) -> tuple[list[str], list[int], list[int]]:
        """Texts between the marks, the marks' slot indexes, and the offset at which each mark ends."""
        gaps, slots, ends, position = [], [], [], 0
        for match in self.pattern.finditer(text):
            start, end = match.span()
            if match[3] != "\\t":  # printed as it is: quotes beside it are the template's own
                start += match["q"] is not None
                end -= match["r"] is not None
            elif match["q"] is None or match["r"] is None:
                raise RenderError("the template prints tool-call arguments in a form that changes their text")
            gaps.append(text[position:start])
            slots.append(int(match[2]))
            ends.append(end)
            position = end
        return [*gaps, text[position:]], slots, ends


def _slots(messages: Sequence[Message], with_reasoning: bool, schema_texts: Sequence[str]) -> list[_Slot]:
    def padded(message: int, part: Part, text: str) -> list[_Slot]:
        core = text.strip()
        start = text.find(core) if core else 0
        return [_Slot(message, part, 0, core, text[:start], text[start + len(core) :])] if core else []

    slots = [_Slot(-1, "schema", index, text, "", "") for index, text in enumerate(schema_texts)]
    for index, message in enumerate(messages):
        if with_reasoning and message.reasoning:
            slots += padded(index, "reasoning", message.reasoning)
        slots += padded(index, "content", message.content)
        for number, call in enumerate(message.tool_calls):
            slots.append(_Slot(index, "name", number, call.name, "", ""))
            slots.append(_Slot(index, "arguments", number, call.arguments, "", ""))
    return slots


def _chat(messages: Sequence[Message], texts: Mapping[tuple[int, Part, int], str], with_reasoning: bool) -> Chat:
    chat: Chat = []
    for index, message in enumerate(messages):
        row: dict[str, Any] = {
            "role": message.role,
            "content": texts.get((index, "content", 0), message.content),
        }
        if message.role == "assistant" and with_reasoning:
            # always a string: a template must not look for a reasoning block inside the content
            row["reasoning_content"] = texts.get((index, "reasoning", 0), "")
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.call_id if call.call_id and _WORD.fullmatch(call.call_id) else f"call{number}",
                    "function": {
                        "name": texts[index, "name", number],
                        "arguments": texts[index, "arguments", number],
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
            if value and _WORD.fullmatch(value):
                row[key] = value
        chat.append(row)
    return chat


def _suspicious(value: Any, special: re.Pattern[str]) -> list[str]:
    """Strings of a tool schema that hold what looks like an added token."""
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _suspicious(item, special)]
    if isinstance(value, list):
        return [text for item in value for text in _suspicious(item, special)]
    return [value] if isinstance(value, str) and special.search(value) else []


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {_replaced(key, texts): _replaced(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value


def _kept_blanks(gap: str, bare: str, trail: str, lead: str) -> tuple[int, int]:
    """How many of `trail` and `lead` the template kept, when `gap` stands where `bare` stood without blanks.

    A template trims from the outside: what it keeps of `trail` is a prefix, of `lead` a suffix.
    """
    n_kept = len(gap) - len(bare)
    for n_lead in range(min(n_kept, len(lead)), -1, -1):
        n_trail = n_kept - n_lead
        if n_trail <= len(trail) and gap == trail[:n_trail] + bare + lead[len(lead) - n_lead :]:
            return n_trail, n_lead
    raise RenderError(f"the template changes the text between two messages: {bare!r} became {gap!r}")


def render_conversation(
    template: Jinja,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    with_reasoning: bool,
    special: re.Pattern[str],
    check_prefix: Callable[[Chat, list[dict[str, Any]] | None], None] = lambda chat, tools: None,
) -> Rendering:
    """Renders a whole conversation once and says where each piece of it stands.

    Args:
        with_reasoning: whether the template prints reasoning; without, reasoning is left out.
        special: finds the tokenizer's added tokens; used to shield tool schemas that contain such text.
        check_prefix: called with the conversation and tools as the template gets them.

    Raises:
        RenderError: a piece is missing, printed twice, or printed otherwise than it was written.
    """
    schema_texts = sorted(set(_suspicious(tools, special))) if tools else []
    slots = _slots(messages, with_reasoning, [json.dumps(text, ensure_ascii=False)[1:-1] for text in schema_texts])
    written = [text for slot in slots for text in (slot.text, slot.lead, slot.trail)]
    marks = _Marks([*written, json.dumps(tools, ensure_ascii=False)])
    schema_marks = {text: marks.of(index, "schema") for index, text in enumerate(schema_texts)}
    tools = _replaced(tools, schema_marks) if tools else None

    def texts(bare: bool = False, real: bool = False) -> dict[tuple[int, Part, int], str]:
        result = {}
        for index, slot in enumerate(slots):
            core = slot.text if real and slot.part != "arguments" else marks.of(index, slot.part)
            result[slot.message, slot.part, slot.call] = core if bare else slot.lead + core + slot.trail
        return result

    skeleton, turns = template.render(_chat(messages, texts(), with_reasoning), tools)
    gaps, order, ends = marks.split(skeleton)
    if sorted(order) != list(range(len(slots))):
        raise RenderError(_missing(slots, order))
    blanks = [(0, 0)] * len(gaps)
    if any(slot.lead or slot.trail for slot in slots):
        bare, _ = template.render(_chat(messages, texts(bare=True), with_reasoning), tools)
        bare_gaps, bare_order, _ = marks.split(bare)
        if bare_order != order:
            raise RenderError("the template prints the messages in another order when blanks are trimmed")
        around = [None, *(slots[index] for index in order), None]
        blanks = [
            _kept_blanks(gap, bare_gap, left.trail if left else "", right.lead if right else "")
            for gap, bare_gap, (left, right) in zip(gaps, bare_gaps, pairwise(around), strict=True)
        ]

    parts, pieces, length, shifts = [gaps[0]], [], len(gaps[0]), [0]
    for number, (index, gap, end) in enumerate(zip(order, gaps[1:], ends, strict=True)):
        slot, kept_lead, kept_trail = slots[index], blanks[number][1], blanks[number + 1][0]
        start = length - kept_lead
        length += len(slot.text)
        pieces.append(Piece(start, length + kept_trail, slot.message, slot.part, slot.call, len(slot.lead) - kept_lead))
        parts += [slot.text, gap]
        shifts.append(length - end)
        length += len(gap)
    text = "".join(parts)

    def place(position: int) -> int:
        return position + shifts[bisect_right(ends, position)]

    chat = _chat(messages, texts(real=True), with_reasoning)
    check_prefix(chat, tools)
    real, _ = template.render(chat, tools)
    real_gaps, real_order, _ = marks.split(real)
    printed = real_gaps[0] + "".join(
        slots[index].text + gap for index, gap in zip(real_order, real_gaps[1:], strict=True)
    )
    if printed != text:
        raise RenderError(f"the template rewrites a message's text: {_first_difference(text, printed)}")
    return Rendering(text, tuple(pieces), tuple((place(start), place(end)) for start, end in turns))


def _missing(slots: Sequence[_Slot], order: Sequence[int]) -> str:
    for index, slot in enumerate(slots):
        if (n_printed := order.count(index)) != 1:
            times = "does not print" if n_printed == 0 else f"prints {n_printed} times"
            return f"the template {times} the {slot.part} of message {slot.message}"
    return "the template prints pieces that are not of this conversation"


def _first_difference(expected: str, found: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(map(len, (expected, found)))
    )
    return f"expected {expected[at : at + 40]!r}, the template prints {found[at : at + 40]!r}"
