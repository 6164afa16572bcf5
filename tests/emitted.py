"""What a turn emits under each template family, from the message and the format alone: the oracle of the span tests."""

from schemas.trajectory import Message
from tasks.spans import ACTION, REASONING, THOUGHT, TURN_END


def _call(family: str, name: str, arguments: str) -> str:
    if family == "llama3.1":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    body = f'{{"name": "{name}", "arguments": {arguments}}}'
    return body if family == "mistral" else f"<tool_call>\n{body}\n</tool_call>"


def emitted(message: Message, family: str) -> list[tuple[int, str]]:
    """What a policy turn emitted, as (kind, text) in order: from the log and the format alone, not our renderer."""
    text, trimmed = message.content, 0
    if family in ("qwen3", "llama3.1"):  # these templates trim: line ends before the answer, blanks around it
        start = len(text) - len(text.lstrip("\n" if family == "qwen3" else None))
        text, trimmed = text[start:] if family == "qwen3" else text.strip(), start
    calls = [_call(family, call.name, call.arguments) for call in message.tool_calls]
    if family == "mistral" and (text or not calls):
        text, trimmed = " " + text, trimmed - 1
    pieces: list[tuple[int, str]] = []
    if family == "qwen3" and message.reasoning and message.reasoning.strip():
        pieces.append((REASONING, "<think>\n" + message.reasoning.strip("\n") + "\n</think>\n\n"))
    position = 0
    for fence in sorted(message.action_spans, key=lambda span: span.start):
        start, end = max(fence.start - trimmed, position), min(fence.end - trimmed, len(text))
        pieces += [(THOUGHT, text[position:start]), (ACTION, text[start:end])]
        position = end
    rest = text[position:]
    if calls:
        # Qwen3 puts the line end after content that is nothing but line ends, too, which it has trimmed away
        breaks = message.content if family == "qwen3" else text
        pieces += [(THOUGHT, rest + ("\n" if breaks and family != "mistral" else ""))]
        together = {"mistral": ", ", "llama3.1": "; "}.get(family, "\n").join(calls)
        pieces.append((ACTION, f"[TOOL_CALLS] [{together}]" if family == "mistral" else together))
    else:
        pieces.append((THOUGHT if message.action_spans else ACTION, rest))
    pieces.append((TURN_END, {"llama3.1": "<|eot_id|>", "mistral": "</s>"}.get(family, "<|im_end|>")))
    return joined(pieces)


def joined(pieces: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Without empty pieces; neighbours of one kind are one."""
    result: list[tuple[int, str]] = []
    for kind, text in pieces:
        if text and result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + text)
        elif text:
            result.append((kind, text))
    return result
