"""Values that stand behind a secret-like name (`DB_PASSWORD="..."`, `token: ...`, `<password>...</password>`,
`ENV API_KEY ...`), told from the identifiers, calls, placeholders and words that stand there in code.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

from tasks.gibberish import is_gibberish, n_unreadable

_KEYS = (
    r"(?:api|access|secret|account|auth|subscription|encryption|signing|master|private|fernet|storage|client|app)"
    r"[-_ ]?key"
)
_NAMES = rf"(?:{_KEYS}|secret|token|passwd|password|passphrase|credentials?)"
_SHORT_NAMES = r"(?:(?<![A-Za-z])(?i:pass|pwd)|(?<=[a-z])(?:Pass|Pwd))"
_CHARACTER = r"[^\s\"'<>(){}\[\],;|\\`$]"
_QUOTES = r"[\\\"']{0,6}"
_TO_ODD = r"[^\s\"']{0,60}(?:[0-9]|[A-Z][a-z]?[A-Z][a-z]|[a-z][A-Z][A-Z]|[A-Za-z][#%^&*!+?~$][A-Za-z(])"
"""Up to a digit, to letters whose case changes as in few names, or to a sign within a word."""
_TYPE = r"(?::\s{0,2}&?[A-Za-z_][\w.\[\]| ]{0,24})?"
_ITS_VALUE = r"(?:(?:\\+[nrt]|[\\\"',\s]){1,24}(?i:value))?"
_ASSIGNED = rf"\s{{0,3}}(?:[:!=]?={{1,2}}>?|:)\s{{0,3}}[A-Za-z@$]{{0,2}}{_QUOTES}{_TO_ODD}"
ASSIGNED_TRIGGERS = (
    rf"(?i:{_NAMES})[\\\"'\]]{{0,6}}{_ITS_VALUE}{_QUOTES}\s{{0,3}}{_TYPE}{_ASSIGNED}",
    rf"(?i:{_NAMES})[\\\"']{{1,4}}\s{{0,3}},\s{{0,3}}[\\\"']{{1,4}}{_TO_ODD}",
    rf"(?i:pass|pwd)[\\\"'\]]{{0,6}}{_ITS_VALUE}{_QUOTES}{_ASSIGNED}",
    rf"(?i:{_NAMES})>{_TO_ODD}",
    rf"(?i:{_NAMES})[\\\"'\]]{{0,6}}\s{{0,3}}[:=]{{1,2}}\s{{0,3}}r?f[\\\"']{{1,4}}{{",
    rf"(?:\b(?i:ENV)|\b(?i:set)|--)[ \w:/.-]{{0,60}}(?i:{_NAMES}|pass|pwd)\s{{1,3}}{_QUOTES}{_TO_ODD}",
    rf"(?i:password)\s{{1,3}}[\\\"']{{1,4}}{_TO_ODD}",
)
"""One of these matches wherever there is anything to find."""

# In what is searched, an escaped quote is a blank and a quote (see tasks.redact).
_SEPARATOR = re.compile(
    r"(?:[:!=]?={1,2}>?|:|,(?=\s{0,3}[\"']))\s{0,5}([A-Za-z@$]{1,2}(?=\s{0,3}[\"']))?([\"'\s]{0,8})(?=[^\s\"'])"
)
_LITERALS = {quote: re.compile(rf"[^\s{quote}]{{8,4096}}(?=\s{{0,7}}{quote})") for quote in ("'", '"')}
"""A quoted value ends at its own quote, whatever stands in it."""
_INTERPOLATED = re.compile(r"\$\{[^{}]*\}|\$\([^()]*\)|\{\{\w|\{[\w.\[\]]*\}|%\(\w+\)")
_REGULAR_EXPRESSION = re.compile(r"\(\?[:=!<P]|\[\^|a-z|A-Z|0-9|\.[*+]|\\[dswbDSW][*+?{\])|]")
_VALUE = re.compile(rf"(?:{_CHARACTER}|(?<!^)\$(?![A-Za-z_{{(])){{8,4096}}")
_BARE_VALUE = re.compile(
    rf"(?:{_CHARACTER}|[()]|\$(?![A-Za-z_{{(]))"
    rf"(?:{_CHARACTER}|[()]|\$(?![A-Z_]{{3,64}}\b|[a-z_]{{4,64}}\b|\{{|\(\w)){{7,4095}}"
)
"""With parentheses and $ in it, but for what a shell would put in their place."""
_CALLED = re.compile(r"[A-Za-z_][\w.]*\((?:.*\)(?![\w@#%^&!~$]).*|[^)]*[,\[{\"'])?$")
"""A call, whole or up to what no bare value holds."""
_NAMED_ALIKE = re.compile(r"(?=.*(?:[Kk]ey|[Tt]oken|[Ss]ecret|[Pp]assw|[Cc]redential))[A-Za-z_][\w.]*")
"""Variables and types: `private_key: Ed25519PrivateKey`."""
_NAME_BEFORE = re.compile(
    r"((?i:auth|access|client|api|jwt|bot|refresh|webhook)[_-]?|(?<=[A-Z0-9])_(?=TOKEN|SECRET|PASSPHRASE))?"
    rf"((?i:{_NAMES})|{_SHORT_NAMES})[\"'\s\]]{{0,6}}(?:[\"',\s]{{1,24}}(?i:value)[\"'\s]{{0,4}})?{_TYPE}\s{{0,3}}$"
)
_SPACED = re.compile(
    rf"(?:(?:\bENV|\bset|\bsetenv)\s{{1,3}}(?:-\w{{1,3}}\s{{1,3}})?[\w:/.-]{{0,60}}?|(?<![\w-])--[\w-]{{0,40}}?)"
    rf"(?:(?i:{_NAMES})|{_SHORT_NAMES})\s{{1,3}}([\"']?)(?=[^\s\"'])"
    rf"|\b(?i:password)\s{{1,4}}([\"'])(?=[^\s\"'])"
    rf"|<[\w:.-]{{0,40}}?(?i:{_NAMES})(?:\s[^<>]{{0,80}})?>(?=[^\s<>]{{8,4096}}</)"
)
"""No sign between name and value: a variable's, an option's, SQL's `PASSWORD '...'`, an element's."""
_NAMES_OF_HASHES = ("secret", "token", "passphrase")
"""Where nothing more is said (`page_token`, not `API_TOKEN`), a hexadecimal value may be a hash."""
_MAX_NAME_CHARS = 64
_MAY_BE_NAMED = re.compile("(?i)key|secr|toke|pass|pwd|cred")
"""Most separators have no such name before them: they are told at once."""
_NEXT_PARAMETER = re.compile(r"&[\w.-]+=.*")
_CALL = re.compile(r"[(\[{]")
_LITERAL = re.compile(rf"{_CHARACTER}{{8,1024}}|[^\"'\n]")
_PIECE = r"[A-Za-z]*(?:[0-9]{0,4}|[0-9]{1,2}[a-z]+)"
_WORDS = re.compile(rf"(?:{_PIECE}[-_.:/]+)*{_PIECE}")
"""Identifiers, attributes, file names, versions: words, each perhaps with a number."""
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F-]+|sha[0-9]+[:-][0-9A-Za-z+/=]+")
"""Hashes, UUIDs and addresses in memory."""
_PATH = re.compile(r".?/|~/|\.\./|[A-Za-z]:/")
_SAMPLE = re.compile(r"(?i)example|your[_-]|placeholder|changeme|x{6}|\*{3}|\.\.\.|^<.*>$")
_DIGITS = re.compile(r"[0-9]+")
_SYMBOL = re.compile(r"[@#%^&*!+?~$]")
_UNLIKE_WORDS = re.compile(r"[<>(){}\[\],;|\\`$]")


def _entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


def is_sample(value: str) -> bool:
    """Whether it says of itself that it is none (`your-api-key`, `xxxxxx`)."""
    return bool(_SAMPLE.search(value))


def is_words(value: str) -> bool:
    """Whether it is an identifier, a file's name, a version or the like."""
    return bool(_WORDS.fullmatch(value)) and not is_gibberish(value)


def _is_path(value: str) -> bool:
    """Base64 may begin like a path; then hardly anything of it reads."""
    is_base64 = len(value) >= 24 and "." not in value and n_unreadable(value) >= 0.6 * len(value)
    return bool(_PATH.match(value)) and not is_base64


def looks_secret(value: str) -> bool:
    """Letters and digits mixed as no name mixes them."""
    if is_sample(value) or "://" in value or _is_path(value) or not any(map(str.isalpha, value)):
        return False
    entropy = _entropy(value)
    if entropy < 2.5:
        return False
    if is_gibberish(value):
        return True
    if _WORDS.fullmatch(value):
        return False
    n_numbers = len(_DIGITS.findall(value))
    has_all = n_numbers and _SYMBOL.search(value) and value.lower() != value != value.upper()
    return bool(n_numbers >= 2 or has_all or (n_numbers and len(value) >= 16 and entropy >= 3.5))


def _quoted_value(text: str, start: int, quote: str) -> str | None:
    """The literal that begins here, to its quote; empty if it is none of chance, None if it ends elsewhere."""
    match = _LITERALS[quote].match(text, start)
    if match is None or _INTERPOLATED.search(match.group()):
        return None
    value = match.group()
    if not _UNLIKE_WORDS.search(value):
        return value if looks_secret(value) else ""
    is_random = is_gibberish(value) and looks_secret(value) and not _REGULAR_EXPRESSION.search(value)
    return value if is_random else ""


def _bare_value(text: str, start: int) -> str:
    """What looks like a secret from here to a blank, or to what ends it in code."""
    match = _BARE_VALUE.match(text, start)
    if match and any(sign in match.group() for sign in "()$") and not _CALLED.match(text, start, match.end() + 1):
        value = _before_closing(match.group())
        if is_gibberish(value, 8) and looks_secret(value):
            return value
    match = _VALUE.match(text, start)
    if match is None or _CALL.match(text, match.end()):
        return ""
    value = _NEXT_PARAMETER.sub("", match.group()).rstrip(".:")
    is_secret = len(value) >= 8 and looks_secret(value) and not _NAMED_ALIKE.fullmatch(value)
    return value if is_secret else ""


def _before_closing(value: str) -> str:
    """Up to the parenthesis that ends a call around it."""
    depth = 0
    for index, char in enumerate(value):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == ")" and depth < 0 and value[index:].lstrip(")")[:1] in ("", ".", ":"):
            return value[:index]
    return value


def _value(text: str, start: int, quote: str) -> str:
    """The secret that begins here, behind this quote or behind none; empty if it is none."""
    quoted = _quoted_value(text, start, quote) if quote else None
    return _bare_value(text, start) if quoted is None else quoted


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
        value = _value(text, start, separator.group(2)[-1:].strip())
        if value and not _is_hash(name, value) and not _is_no_credential(name, separator, value):
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
        value = _value(text, match.end(), match.group(1) or match.group(2) or "")
        if value:
            yield match.end(), match.end() + len(value)
