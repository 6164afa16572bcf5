"""Running a chat template: text out, and what the template marks as generated."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Chat = list[dict[str, Any]]

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderError(Exception):
    """This conversation cannot be rendered faithfully; the text says why and is shown in the report."""


@dataclass(frozen=True)
class Jinja:
    """A chat template's source and the variables it is rendered with (bos_token and the like)."""

    source: str = field(repr=False)
    variables: Mapping[str, Any]

    def render(
        self,
        chat: Chat,
        tools: list[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        thinking: bool = True,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges that the template marks as generated, in order.

        Raises:
            RenderError: the template itself refuses the conversation.
        """
        try:
            rendered: Any = render_jinja_template(  # annotated as a string; it is two lists
                conversations=[chat],
                tools=list[Any](tools) if tools else None,
                chat_template=self.source,
                return_assistant_tokens_mask=marks_generation(self.source),
                add_generation_prompt=generation_prompt,
                enable_thinking=thinking,
                **self.variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RenderError(f"the chat template refuses the conversation: {error}") from error
        texts, ranges = rendered
        return texts[0], ranges[0] if ranges else []


def marks_generation(source: str) -> bool:
    """Whether a template marks what the model generates, with {% generation %}."""
    return _GENERATION.search(source) is not None
