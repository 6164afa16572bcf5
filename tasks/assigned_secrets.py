"""Values that stand behind a secret-like name (`DB_PASSWORD="..."`, `token: ...`, `<password>...</password>`,
`ENV API_KEY ...`), told from the identifiers, calls, placeholders and words that stand there in code.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

_KEYS = r"(?:api|access|secret|account|auth|subscription|encryption|signing|master)[-_ ]?key"
_NAMES = rf"(?:{_KEYS}|secret|token|passwd|password|passphrase)"
_SHORT_NAMES = r"(?:(?<![A-Za-z])(?i:pass|pwd)|(?<=[a-z])(?:Pass|Pwd))"
_CHARACTER = r"[^\s\"'<>(){}\[\],;|\\`$]"
_QUOTES = r"[\\\"']{0,6}"
_TO_DIGIT = r"[^\s\"'<>(){}\[\],;|\\`]{0,60}[0-9]"
_TYPE = r"(?::\s{0,2}&?[A-Za-z_][\w.\[\]| ]{0,24})?"
_ITS_VALUE = r"(?:(?:\\+[nrt]|[\\\"',\s]){1,24}value)?"
_ASSIGNED = rf"\s{{0,3}}(?:[:!=]?={{1,2}}>?|:)\s{{0,3}}[A-Za-z@$]{{0,2}}{_QUOTES}{_TO_DIGIT}"
ASSIGNED_TRIGGERS = (
    rf"(?i){_NAMES}[\\\"'\]]{{0,6}}{_ITS_VALUE}{_QUOTES}\s{{0,3}}{_TYPE}{_ASSIGNED}",
    rf"(?i){_NAMES}[\\\"']{{1,4}}\s{{0,3}},\s{{0,3}}[\\\"']{{1,4}}{_TO_DIGIT}",
    rf"(?i)(?:pass|pwd)[\\\"'\]]{{0,6}}{_ITS_VALUE}{_QUOTES}{_ASSIGNED}",
    rf"(?i){_NAMES}>{_TO_DIGIT}",
    rf"(?i){_NAMES}[\\\"'\]]{{0,6}}\s{{0,3}}[:=]{{1,2}}\s{{0,3}}r?f[\\\"']{{1,4}}{{",
    rf"(?i)(?:\bENV|\bset|--)[ \w:/.-]{{0,60}}(?:{_NAMES}|pass|pwd)\s{{1,3}}{_QUOTES}{_TO_DIGIT}",
    rf"(?i)password\s{{1,3}}[\\\"']{{1,4}}{_TO_DIGIT}",
)
"""One of these matches wherever there is anything to find."""

# In what is searched, an escaped quote is a blank and a quote (see tasks.redact).
_SEPARATOR = re.compile(
    r"(?:[:!=]?={1,2}>?|:|,(?=\s{0,3}[\"']))\s{0,5}([A-Za-z@$]{1,2}(?=\s{0,3}[\"']))?([\"'\s]{0,8})(?=[^\s\"'<>()\[\],;|`])"
)
_VALUE = re.compile(rf"(?:{_CHARACTER}|(?<!^)\$(?![A-Za-z_{{(])){{8,1024}}")
_QUOTED_VALUE = re.compile(rf"{_CHARACTER}(?:{_CHARACTER}|\$(?![{{(])){{7,1023}}(?=\s?[\"'])")
_NAME_BEFORE = re.compile(
    rf"((?i:auth|access|client)[_-]?)?((?i:{_NAMES})|{_SHORT_NAMES})"
    rf"[\"'\s\]]{{0,6}}(?:[\"',\s]{{1,24}}(?i:value)[\"'\s]{{0,4}})?{_TYPE}\s{{0,3}}$"
)
_SPACED = re.compile(
    rf"(?:(?:\bENV|\bset|\bsetenv)\s{{1,3}}(?:-\w{{1,3}}\s{{1,3}})?[\w:/.-]{{0,60}}?|(?<![\w-])--[\w-]{{0,40}}?)"
    rf"((?i:{_NAMES})|{_SHORT_NAMES})\s{{1,3}}[\"']{{0,2}}({_CHARACTER}{{8,1024}})"
    rf"|\b(?i:password)\s{{1,4}}[\"']({_CHARACTER}{{8,1024}})(?=\s?[\"'])"
    rf"|<[\w:.-]{{0,40}}?(?i:{_NAMES})(?:\s[^<>]{{0,80}})?>({_CHARACTER}{{8,1024}})(?=</)"
)
"""No sign between name and value: a variable's, an option's, SQL's `PASSWORD '...'`, an element's."""
_NAMES_OF_HASHES = ("secret", "token", "passphrase")
"""Where nothing more is said, a hexadecimal value may be a hash."""
_MAX_NAME_CHARS = 64
_MAY_BE_NAMED = re.compile("(?i)key|secr|toke|pass|pwd")
"""Most separators have no such name before them: they are told at once."""
_NEXT_PARAMETER = re.compile(r"&[\w.-]+=.*")
_CALL = re.compile(r"[(\[{]")
_LITERAL = re.compile(rf"{_CHARACTER}{{8,1024}}|[^\"'\n]")
_PIECE = r"[A-Za-z]*(?:[0-9]{0,4}|[0-9]{1,2}[a-z]+)"
_WORDS = re.compile(rf"(?:{_PIECE}[-_.:/]+)*{_PIECE}")
"""Identifiers, attributes, file names, versions: words, each perhaps with a number."""
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F-]+|sha[0-9]+[:-][0-9A-Za-z+/=]+")
"""Hashes, UUIDs and addresses in memory."""
_PATH = re.compile(r".?/|[A-Za-z]:/|\w+://")
_SAMPLE = re.compile(r"(?i)example|your[_-]|placeholder|changeme|x{6}|\*{3}|\.\.\.")
_DIGITS = re.compile(r"[0-9]+")
_SYMBOL = re.compile(r"[@#%^&*!+?~$]")


def _entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


def is_sample(value: str) -> bool:
    """Whether it says of itself that it is none (`your-api-key`, `xxxxxx`)."""
    return bool(_SAMPLE.search(value))


def is_words(value: str) -> bool:
    """Whether it is an identifier, a file's name, a version or the like."""
    return bool(_WORDS.fullmatch(value))


def looks_secret(value: str) -> bool:
    """Letters and digits mixed as no name mixes them."""
    if is_words(value) or is_sample(value) or _PATH.match(value) or "://" in value:
        return False
    n_numbers, entropy = len(_DIGITS.findall(value)), _entropy(value)
    has_all = n_numbers and _SYMBOL.search(value) and value.lower() != value != value.upper()
    is_random = n_numbers >= 2 or has_all or (n_numbers and len(value) >= 16 and entropy >= 3.5)
    return bool(is_random) and any(map(str.isalpha, value)) and entropy >= 2.5


def _is_hash(name: re.Match[str], value: str) -> bool:
    return name.group(1) is None and name.group(2).lower() in _NAMES_OF_HASHES and bool(_HEX.fullmatch(value))


def _is_no_credential(name: re.Match[str], separator: re.Match[str], value: str) -> bool:
    """`pwd` is more often the working directory, `PASS:` what a test says."""
    short = name.group(2).lower()
    if short == "pwd":
        return "/" in value
    is_bare = not any(quote in separator.group(2) for quote in "\"'") and name.start(2) == name.start()
    return short == "pass" and separator.group().startswith(":") and is_bare and name.group(2) != "pass"


def assigned_values(text: str) -> Iterator[tuple[int, int]]:
    """Spans of values of secret-like names that look like none of code's. Looked for from the separator outwards: names
    are many, and of any case.
    """
    for separator in _SEPARATOR.finditer(text):
        before = max(0, separator.start() - _MAX_NAME_CHARS)
        if not _MAY_BE_NAMED.search(text, before, separator.start()):
            continue
        name = _NAME_BEFORE.search(text, before, separator.start())
        if name is None:
            continue
        start = separator.end()
        if "f" in (separator.group(1) or "").lower():
            yield from _literal_parts(text, start)
            continue
        quoted = separator.group(2)[-1:] in ("'", '"')
        match = (_QUOTED_VALUE.match(text, start) if quoted else None) or _VALUE.match(text, start)
        if match is None or _CALL.match(text, match.end()):
            continue
        value = _NEXT_PARAMETER.sub("", match.group()).rstrip(".:")
        is_value = len(value) >= 8 and looks_secret(value) and not _is_hash(name, value)
        if is_value and not _is_no_credential(name, separator, value):
            yield start, start + len(value)


def _literal_parts(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Spans of secrets in what is literal in the f-string that begins here."""
    depth, position = 0, start
    while match := _LITERAL.match(text, position):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if not depth and looks_secret(match.group()):
            yield match.span()
        position = match.end()


def spaced_values(text: str) -> Iterator[tuple[int, int]]:
    """Spans of values that follow their name without a sign: `ENV DB_PASSWORD x`, `--token x`, `<password>x<`."""
    for match in _SPACED.finditer(text):
        group = match.lastindex or 0
        if looks_secret(match.group(group)) and not _CALL.match(text, match.end(group)):
            yield match.span(group)
