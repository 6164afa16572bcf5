"""Parts of a card: markdown of numbers, tables, pictures and lists that no text of the data can break."""

import re
from collections.abc import Iterable, Mapping, Sequence

from schemas.refs import Ref
from schemas.reports import Dropped

DROPPED_SHOWN = 20
"""All of a card lies in the server's database; the report in the artifact store has the whole list."""

NONE = "n/a"

_NUMBER = re.compile(rf"[-+]?[\d,.]+(e[-+]?\d+)?%?|{NONE}|")
_MARKUP = re.compile(r"([\\`*_\[\]|])")


class Code(str):
    """Text to be copied: a path, a digest."""


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"


def signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.4f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def duration(seconds: float) -> str:
    """In the units that a person would say it in."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min} min" if hours else f"{minutes} min {rest_s} s"


def cell(text: object) -> str:
    """Text of the data may hold anything: neither a table row nor the page may break on it."""
    flat = " ".join(str(text).split())
    if isinstance(text, Code):
        return f"`{flat.replace('`', '').replace('|', '')}`"
    return _MARKUP.sub(r"\\\1", flat).replace("<", "&lt;")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns of numbers stand to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    numbers = [bool(cells) and all(_NUMBER.fullmatch(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(head) + " |", "|" + "".join(" ---: |" if right else " --- |" for right in numbers)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines)


def values(title: str, head: tuple[str, str], values: Mapping[str, float]) -> str:
    """In the order given."""
    if not values:
        return ""
    return f"### {title}\n\n" + table(head, [(name, number(value)) for name, value in values.items()])


def counts(title: str, head: tuple[str, str], counts: Mapping[str, float]) -> str:
    """Largest first."""
    return values(title, head, dict(sorted(counts.items(), key=lambda item: -item[1])))


def picture(uri: str, alternative: str) -> str:
    return f"![{alternative}]({uri})"


def dropped(title: str, dropped: Sequence[Dropped], n_all: int = 0) -> str:
    """`n_all`: how many there are, where `dropped` lists only the first of them."""
    if not dropped:
        return ""
    n_all = max(n_all, len(dropped))
    more = f"\n\n… and {n_all - DROPPED_SHOWN:,} more" if n_all > DROPPED_SHOWN else ""
    rows = table(("what", "why"), [(item.what, item.reason) for item in dropped[:DROPPED_SHOWN]])
    return f"### {title} ({n_all:,})\n\n{rows}{more}"


def payloads(refs: Sequence[Ref]) -> str:
    """Where they lie. Of a payload in the store the path holds the digest's first 16 digits."""
    if not refs:
        return ""
    rows = [
        (Code(ref.path), "" if ref.n_rows is None else number(ref.n_rows), f"{ref.n_bytes / 2**20:,.2f}")
        for ref in refs
    ]
    return "### Files\n\n" + table(("path", "rows", "MiB"), rows)


def page(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
