"""Parts of a text that stand between an opener and its closer, found in time linear in the text.

As one regular expression (`<a>.*?</a>`), each opener without a closer is a search to the end of the text, and a model
in a loop writes thousands of openers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.sources.draft import CharSpan


@dataclass(frozen=True)
class Enclosed:
    """`closer` is a regular expression too, in which `{}` stands for the first group of the opener."""

    opener: re.Pattern[str]
    closer: str

    def _pairs(self, content: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
        at = 0
        missing = set[str]()  # closers that do not stand anywhere ahead
        while (opened := self.opener.search(content, at)) is not None:
            at = opened.end()
            closer = self.closer.replace("{}", re.escape(opened[1])) if self.opener.groups else self.closer
            if closer in missing:
                continue
            closed = re.compile(closer, re.MULTILINE).search(content, at)
            if closed is None:
                missing.add(closer)
            else:
                yield opened, closed
                at = closed.end()

    def spans(self, content: str) -> Iterator[CharSpan]:
        """Each part with its opener and closer."""
        for opened, closed in self._pairs(content):
            yield CharSpan(start=opened.start(), end=closed.end())

    def inner(self, content: str) -> str | None:
        """What stands inside the first part; None where there is none."""
        opened, closed = next(self._pairs(content), (None, None))
        return None if opened is None or closed is None else content[opened.end() : closed.start()]
