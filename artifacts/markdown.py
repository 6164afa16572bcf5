"""Parts of a card: markdown of numbers, tables, pictures and lists that no text of the data can break."""

from collections.abc import Iterable, Mapping, Sequence

from schemas.refs import Ref
from schemas.reports import Dropped

DROPPED_SHOWN = 20
"""All of a card lies in the server's database; the report in the artifact store has the whole list."""

NONE = "n/a"


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"


def cell(text: object) -> str:
    """Text of the data may hold anything: neither a table row nor the page may break on it."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def values(title: str, values: Mapping[str, float]) -> str:
    """In the order given."""
    if not values:
        return ""
    return f"### {title}\n\n" + table(("", "n"), [(name, number(value)) for name, value in values.items()])


def counts(title: str, counts: Mapping[str, float]) -> str:
    """Largest first."""
    return values(title, dict(sorted(counts.items(), key=lambda item: -item[1])))


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
    if not refs:
        return ""
    rows = [(f"`{ref.path}`", number(ref.n_rows), f"{ref.n_bytes / 2**20:,.2f}", ref.sha256[:16]) for ref in refs]
    return "### Files\n\n" + table(("path", "rows", "MiB", "sha256"), rows)


def page(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
