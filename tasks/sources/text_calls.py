"""Calls that a model wrote as text: where they stand in the untouched content."""

import re

from tasks.sources.base import spans
from tasks.sources.draft import CharSpan
from tasks.sources.enclosed import Enclosed

XML_CALL = Enclosed(re.compile(r"<function=[^<>\n]+>"), r"</function>|\Z")
"""OpenHands and SWE-smith style. A stop word can cut the closing tag off, so the end of the text closes it too."""

COMMAND_TAG = Enclosed(re.compile("<command>"), "</command>")
EXECUTE_TAG = Enclosed(re.compile("<(execute|solution)>"), "</{}>")
FENCE = Enclosed(re.compile(r"^```[^\n`]*\n", re.MULTILINE), r"^```[^\S\n]*$")

_EXIT_CODES = re.compile(
    r"\[(?:The command completed|Command finished) with exit code (-?\d+)\.?\]|Process exited with code (-?\d+)"
)


def last_fence(content: str) -> tuple[CharSpan, ...]:
    """The last fenced block: the action of a thought-and-action parser."""
    return spans(content, FENCE)[-1:]


def exit_code_failed(content: str) -> bool | None:
    """Whether an exit code told in prose says that the command failed; None where there is none.

    Only the last one counts, since a command's own output comes before it.
    """
    found = _EXIT_CODES.findall(content)
    if not found:
        return True if content.lstrip().removeprefix("OBSERVATION:").lstrip().startswith("ERROR:") else None
    code = int(next(filter(None, found[-1])))
    return None if code == -1 else code != 0  # -1: still running
