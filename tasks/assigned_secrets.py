"""Values that stand behind a secret-like name (`DB_PASSWORD="..."`, `token=...`, `Authorization: Bearer ...`), told
from the identifiers, calls, placeholders and words that stand there in code.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

_NAMES = r"(?:api_?key|access_?key|secret_?key|secret|token|passwd|password|passphrase)"
_QUOTES = r"[\\\"']{0,6}"
ASSIGNED_TRIGGER = rf"(?i){_NAMES}{_QUOTES}\s{{0,3}}(?:=>?|:)\s{{0,3}}{_QUOTES}[^\s\"'<>(){{}}\[\],;|\\`$]{{0,60}}[0-9]"
BEARER_TRIGGER = rf"(?i)authorization{_QUOTES}\s{{0,3}}[:=]\s{{0,3}}{_QUOTES}(?:bearer|token|basic)\s{{1,3}}\S{{16}}"

# Escapes were made blanks before these run, so a \" is two of them.
_CHARACTER = r"[^\s\"'<>(){}\[\],;|\\`$]"
_SEPARATOR = re.compile(rf"(?:=>?|:)\s{{0,5}}[\"']{{0,3}}\s{{0,3}}(?={_CHARACTER}{{8}})")
_VALUE = re.compile(rf"{_CHARACTER}{{8,200}}")
_NAME_BEFORE = re.compile(rf"(?i)((?:auth|access|client)[_-]?)?({_NAMES})[\"'\s]{{0,6}}$")
_NAMES_OF_HASHES = ("secret", "token", "passphrase")
"""Where nothing more is said, a hexadecimal value may be a hash."""
_MAX_NAME_CHARS = 24
_NEXT_PARAMETER = re.compile(r"&[\w.-]+=.*")
_CALL = re.compile(r"[(\[{]")
_BEARER = re.compile(
    r"(?i)authorization[\"'\s]{0,6}[:=][\"'\s]{0,6}(?:bearer|token|basic)\s{1,3}([^\s\"'<>(){}\[\],;|\\`$]{16,4096})"
)
_PIECE = r"[A-Za-z]*(?:[0-9]{0,4}|[0-9]{1,2}[a-z]+)"
_WORDS = re.compile(rf"(?:{_PIECE}[-_.:/]+)*{_PIECE}")
"""Identifiers, attributes, file names, versions: words, each perhaps with a number."""
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F-]+|sha[0-9]+[:-][0-9A-Za-z+/=]+")
"""Hashes, UUIDs and addresses in memory."""
_SAMPLE = re.compile(r"(?i)example|your[_-]|placeholder|changeme|x{6}|\*{3}|\.\.\.")
_DIGITS = re.compile(r"[0-9]+")
_SYMBOL = re.compile(r"[@#%^&*!+?~]")


def _entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


def _looks_secret(value: str) -> bool:
    """Letters and digits mixed as no name mixes them."""
    if _WORDS.fullmatch(value) or _SAMPLE.search(value) or "/" in value[:2] or "://" in value:
        return False
    n_numbers, entropy = len(_DIGITS.findall(value)), _entropy(value)
    has_all = n_numbers and _SYMBOL.search(value) and value.lower() != value != value.upper()
    is_random = n_numbers >= 2 or has_all or (n_numbers and len(value) >= 16 and entropy >= 3.5)
    return bool(is_random) and any(map(str.isalpha, value)) and entropy >= 2.5


def assigned_values(text: str) -> Iterator[tuple[int, int]]:
    """Spans of values of secret-like names that look like none of code's. Looked for from the separator outwards: names
    are many, and of any case.
    """
    for separator in _SEPARATOR.finditer(text):
        name = _NAME_BEFORE.search(text, max(0, separator.start() - _MAX_NAME_CHARS), separator.start())
        match = _VALUE.match(text, separator.end()) if name else None
        if name is None or match is None or _CALL.match(text, match.end()):
            continue
        value = _NEXT_PARAMETER.sub("", match.group()).rstrip(".:")
        may_be_hash = name.group(1) is None and name.group(2).lower() in _NAMES_OF_HASHES and _HEX.fullmatch(value)
        if len(value) >= 8 and not may_be_hash and _looks_secret(value):
            yield match.start(), match.start() + len(value)


def bearer_values(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the credentials of `Authorization` headers, unless they are words of code or of an example."""
    for match in _BEARER.finditer(text):
        value = match.group(1)
        is_words = any(char in value for char in "-_.") and _WORDS.fullmatch(value) and not _DIGITS.search(value)
        if not is_words and not _SAMPLE.search(value) and not _CALL.match(text, match.end(1)):
            yield match.span(1)
