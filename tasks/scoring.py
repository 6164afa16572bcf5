"""The score policy: which labelled spans are scored, and with what weight."""

from collections.abc import Sequence

from schemas.config import RenderConfig, SpanKind
from schemas.tables import SPAN_KINDS
from schemas.trajectory import Message
from tasks.spans import ACTION, TURN_END, Span


def failed_turns(messages: Sequence[Message]) -> set[int]:
    """Assistant messages whose action failed: an observation before the next assistant message says so."""
    failed, turn = set(), None
    for index, message in enumerate(messages):
        if message.role == "assistant":
            turn = index
        elif message.failed and turn is not None:
            failed.add(turn)
    return failed


def scored_turns(messages: Sequence[Message], config: RenderConfig) -> set[int]:
    """Indexes of the turns that are scored at all: the policy's own, less what the config leaves out."""
    turns = [index for index, message in enumerate(messages) if message.trainable]
    if config.last_n_turns is not None:
        turns = turns[-config.last_n_turns :]
    if config.turns != "all":
        turns = [
            i for i in turns if bool(messages[i].tool_calls or messages[i].action_spans) == (config.turns == "calls")
        ]
    return set(turns) if config.score_failed_turns else set(turns) - failed_turns(messages)


def span_weights(spans: Sequence[Span], messages: Sequence[Message], config: RenderConfig) -> list[float]:
    """A weight for each span; 0 is not scored.

    A turn of which nothing but its end would be scored (all its calls are of tools left out) is not scored at all.
    """
    turns = scored_turns(messages, config)
    scored_kinds: dict[int, SpanKind] = {SPAN_KINDS.index(kind): kind for kind in config.loss_on}
    weights = []
    for span in spans:
        kind = scored_kinds.get(span.kind)
        scored = kind is not None and span.message in turns
        if scored and span.kind == ACTION and span.call >= 0:
            scored = messages[span.message].tool_calls[span.call].name not in config.skip_tools
        weights.append(config.kind_weights.get(kind, 1.0) if kind and scored else 0.0)
    has_action = {span.message for span in spans if span.kind == ACTION}
    with_body = {
        span.message for span, weight in zip(spans, weights, strict=True) if weight > 0 and span.kind != TURN_END
    }
    muted = has_action - with_body if "action" in config.loss_on else set()
    return [
        0.0 if span.kind == TURN_END and span.message in muted else weight
        for span, weight in zip(spans, weights, strict=True)
    ]
