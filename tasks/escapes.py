"""Texts as a reader sees them: what JSON and other notations escape, unescaped, with the way back to the offsets."""

import re
from bisect import bisect_right
from itertools import accumulate

_ESCAPE = re.compile(
    r"(:\\{1,4}(?:Users|Documents and Settings)\\{1,4})"  # of a path: the name behind it may begin with n, r, t, b or f
    r"|\\+(?:u([0-9a-fA-F]{4})|x([0-7][0-9a-fA-F])|(/)|(\")|[nrtbf])"
)
ESCAPES_TRIGGER = r"\\(?:u00|x)[2-7][0-9a-fA-F]"
"""Of ASCII: only these can hide a sign that triggers look for."""
ESCAPES_HINTS = ("\\u00", "\\x")


def unescaped(text: str) -> tuple[str, list[int], list[int]]:
    """(the text with escapes replaced, ends, shifts). `\\u003d` becomes `=`; what has no sign of its own (`\\n`)
    becomes as many blanks, since it is no part of the value that follows it. See `offset` for the rest.
    """
    ends: list[int] = []
    removed: list[int] = []
    parts: list[str] = []
    last = length = 0
    for match in _ESCAPE.finditer(text):
        path, unicode, byte, slash, quote = match.groups()
        n_chars = match.end() - match.start()
        sign = chr(int(unicode or byte, 16)) if unicode or byte else slash
        if path:
            new = path
        elif quote:
            new = " " * (n_chars - 1) + quote
        elif sign and sign.isprintable():
            new = sign
        else:
            new = " " * n_chars
        before = text[last : match.start()]
        parts += [before, new]
        length += len(before) + len(new)
        last = match.end()
        if len(new) < n_chars:
            ends.append(length)
            removed.append(n_chars - len(new))
    return "".join(parts) + text[last:], ends, list(accumulate(removed, initial=0))


def offset(position: int, ends: list[int], shifts: list[int]) -> int:
    """Where in the text a position of the unescaped text lies; an escape belongs to it whole."""
    return position + shifts[bisect_right(ends, position)]
