"""Credentials that a protocol or a command marks as such: headers, cookies, URLs, the options of clients, netrc and the
like. Their place says what they are, so their values need not look like secrets, but for placeholders and variables.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator

from tasks.assigned_secrets import is_sample, is_words, looks_secret
from tasks.gibberish import is_gibberish

_QUOTES = r"[\\\"']{0,6}"
_GAP = r"[\"'\s]{0,6}"
_VALUE = r"[^\s\"'<>(){}\[\],;|\\`$]"
_CALL = re.compile(r"[(\[{]")
_PLACEHOLDER = re.compile(
    r"(?i)(?:[$<{]|%[sd(]|(?:my|the|your|some|user)?[_-]?(?:password|passwd|pass|secret|token)$|x+$|[*.]+$)|.*[{}]"
)

AUTHORIZATION_TRIGGERS = (
    rf"(?i)authorization{_QUOTES}\s{{0,3}}[:=,]\s{{0,3}}{_QUOTES}[a-z][\w-]{{1,20}}\s{{1,3}}\S{{16}}",
    rf"(?i)authorization{_QUOTES}\s{{0,3}}[:=,]\s{{0,3}}{_QUOTES}\S{{16}}",
    r"(?i)bearer\s{1,3}[\w.~+/=-]{20}",
)
_AUTHORIZATION = re.compile(
    rf"(?i)authorization{_GAP}[:=,]{_GAP}(?:([a-z][\w-]{{1,20}})\s{{1,3}})?"
    rf"(?:[a-z_-]{{1,20}}=[\"'\s]{{0,3}})?({_VALUE}{{16,8192}})"
)
_BEARER = re.compile(r"(?i)\bbearer\s{1,3}([\w.~+/=-]{20,8192})", re.ASCII)
_KNOWN_SCHEMES = ("bearer", "token", "basic")


def authorizations(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the credentials of `Authorization` headers, and of what follows `Bearer` elsewhere, unless they are
    words of code or of an example.
    """
    for match in _AUTHORIZATION.finditer(text):
        value = match.group(2)
        if (match.group(1) or "").lower() in _KNOWN_SCHEMES:
            of_code = any(char in value for char in "-_.") and is_words(value) and not re.search("[0-9]", value)
        else:
            of_code = not looks_secret(value)
        if not of_code and not is_sample(value) and not _CALL.match(text, match.end(2)):
            yield match.span(2)
    for match in _BEARER.finditer(text):
        if looks_secret(match.group(1)) and not _CALL.match(text, match.end(1)):
            yield match.span(1)


URL_TRIGGERS = (
    r"://[^:/?#\s@\"'<>]*:[^/?#\s\"'<>]+@[\w\[$%.-]",
    r"://[^:/?#\s@\"'<>]+:[0-9]{0,5}[^0-9/?\s\"'<>][^\s\"'<>]*@[\w.-]",
)
_USER_INFO = re.compile(r"://[^\s:/?#@\"'<>\\`]{0,256}:([^\s/?#\"'<>\\`]{1,512})@(?!sha256:)(?=[\w\[$%.-])")
_HOST = r"[\w.-]{1,253}(?:[:/?\"'\s]|$)"
_ODD_USER_INFO = re.compile(
    rf"://[^\s:/?#@\"'<>\\`]{{1,256}}:(?![0-9]{{1,5}}[/?#])((?:[^\s\"'<>\\`@/?#]|@(?!{_HOST})){{0,256}}[/?#]"
    rf"(?:[^\s\"'<>\\`@]|@(?!{_HOST})){{0,256}})@(?={_HOST})"
)
"""With a sign that would have to be encoded there; behind a port it begins the path."""


def url_passwords(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the passwords of URLs: up to the last @ before the host ends."""
    for match in _ODD_USER_INFO.finditer(text):
        if is_gibberish(match.group(1)):
            yield match.span(1)
    for match in _USER_INFO.finditer(text):
        if not re.match(r"(?:\$(?:\w+$|[{(])|\[|%[sd(]|\*+$|x+$|\.+$)|.*[{}]", match.group(1)):
            yield match.span(1)


PARAMETER_TRIGGER = r"(?i)[?&;](?:sig|signature|x-(?:amz|goog)-signature|key)=[\w%+/=~.-]{32}"
_PARAMETER = re.compile(
    r"(?i)[?&;](?:(?:sig|signature|x-(?:amz|goog)-signature)=([\w%+/=~.-]{32,2048})|key=([\w-]{32,512}))"
)


def url_parameters(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the signatures of signed URLs, and of keys in URLs."""
    for match in _PARAMETER.finditer(text):
        group = match.lastindex or 0
        if looks_secret(match.group(group)):
            yield match.span(group)


PASSWORD_FILE_TRIGGER = r":(?:54[0-9]{2}|6432|\*):[\w*-]+:[\w*.@-]+:\S{8}"
_PASSWORD_FILE = re.compile(
    r"(?<![\w:/.-])[\w*.-]{1,253}:(?:54[0-9]{2}|6432|\*):[\w*-]{1,64}:[\w*.@-]{1,64}:([^\s\"'`:]{8,256})", re.ASCII
)


def password_files(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the passwords in lines of PostgreSQL's `.pgpass`: `host:port:database:user:password`."""
    return (match.span(1) for match in _PASSWORD_FILE.finditer(text) if is_gibberish(match.group(1)))


COOKIE_TRIGGER = rf"(?i)cookies?{_QUOTES}\s{{0,3}}[:=]\s{{0,3}}[{{\\\"']{{0,6}}[\w.-]{{1,64}}{_QUOTES}\s{{0,3}}[=:]"
_COOKIES = re.compile(r"(?i)cookies?[\"'\s]{0,6}[:=][\"'\s{]{0,6}(?=[\w.-]{1,64}[\"'\s]{0,6}[=:])")
_COOKIE = re.compile(
    r"[\"'\s]{0,6}([\w.-]{1,64})[\"'\s]{0,4}[=:][\"'\s]{0,4}([^\s\"',;{}\\]{1,4096})[\"'\s]{0,4}([;,]?)"
)
_COOKIE_ATTRIBUTES = ("expires", "domain", "path", "max-age", "samesite", "version")


def cookies(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the values of cookies that are as long and as random as a session's."""
    position = 0
    for header in _COOKIES.finditer(text):
        if header.start() < position:
            continue  # what one header led through is not walked again by the next
        position = header.end()
        while match := _COOKIE.match(text, position):
            name, value, more = match.groups()
            is_random = len(value) >= 12 and (looks_secret(value) or re.fullmatch("[0-9a-f-]{16,}", value))
            if is_random and name.lower() not in _COOKIE_ATTRIBUTES:
                yield match.span(2)
            position = match.end()
            if not more:
                break


_ARGUMENTS = r"(?:[^\n|&]|\\\n){0,400}"
_BLANKS = r"(?:\s|\\+[nrt]){1,8}"
_SAID = r"(?:'([^'\n]{0,255}[^'\s])\s{0,7}'|\"([^\"\n]{0,255}[^\"\s])\s{0,7}\"|([^\s\"'|&;<>()]{1,256}))"
_OPTION_VALUE = r"([^\s\"'\\-][^\s\"'\\]{1,255})"
_OPTIONS = (
    rf"\bcurl\s{_ARGUMENTS}?(?<=\s)(?:-u|--user|-U|--proxy-user)[ =]?"
    rf"[\"'\s]{{0,4}}[^\s:\"'/]{{1,128}}:([^\s\"'\\]{{2,256}})",
    rf"\bmysql(?:dump|admin|import|show|check)?\s{_ARGUMENTS}?(?<=\s)-p[\"']?{_OPTION_VALUE}",
    rf"\bsshpass\s{{1,3}}-p[\s\"']{{0,3}}{_OPTION_VALUE}",
    rf"\bredis-cli\s{_ARGUMENTS}?(?<=\s)-a[\s\"']{{1,3}}{_OPTION_VALUE}",
    rf"\bdocker\slogin\s{_ARGUMENTS}?(?<=\s)-p[\s\"']{{1,3}}{_OPTION_VALUE}",
    r"\bwandb\slogin\s(?:[^\n|&;]{0,200}\s)?[\"']?([0-9a-f]{40}|wandb_v1_\w{40,200})\b",
    r"\bSSWS\s{1,3}([\w-]{30,256})",
    rf"\b(?:echo|printf)\s{{1,3}}(?:-\w{{1,3}}\s)?{_SAID}\s{{0,3}}\|\s{{0,3}}"
    rf"(?:sudo\s(?:-\w{{1,20}}\s){{0,4}}?-\w{{0,8}}S"
    rf"|\w{{2,20}}\s(?:\w{{2,20}}\s)?login\s{_ARGUMENTS}?--password-stdin)\b",
    rf"\bsudo\s(?:-\w{{1,20}}\s){{0,4}}?-\w{{0,8}}S\s[^\n|&;<]{{0,200}}<<<\s?{_SAID}",
    r"\b(?:machine\s{1,8}\S{1,253}|default)\s{1,8}login\s{1,8}\S{1,128}\s{1,8}password\s{1,8}([^\s\"'\\]{1,256})",
)
OPTION_TRIGGERS = (
    r"curl[^|&]{0,400}\s(?:-u|--user|-U|--proxy-user)[ =\\\"'\s]{0,6}[^\s:\"'/]{1,128}:",
    r"mysql(?:dump|admin|import|show|check)?[^|&]{0,400}\s-p[^\s-]",
    r"sshpass\s{1,3}-p",
    r"redis-cli[^|&]{0,400}\s-a\s",
    r"docker\slogin[^|&]{0,400}\s-p\s",
    r"wandb\slogin\s",
    r"SSWS\s{1,3}[\w-]{30}",
    r"(?:echo|printf)\s[^|]{1,300}\|\s{0,3}sudo\s[^|]{0,80}-\w{0,8}S",
    "--password-stdin",
    r"sudo\s[^|&;]{0,300}<<<",
    rf"login{_BLANKS}\S{{1,128}}{_BLANKS}password{_BLANKS}",
)
_OF_OTHERS = re.compile(r"(?:ath|rint0?|erm|rune|re|rotocol|rogress|arallel|ort|lugin\S*|assword)$|[0-9.:]+$")
"""What `-p` begins with other tools: find's `-path`, a container's `-p3306:3306`."""


def option_passwords(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the passwords that programs are given (`curl -u user:password`, `echo x | sudo -S`) and of a netrc's."""
    for pattern in _OPTION_PATTERNS:
        for match in pattern.finditer(text):
            group = match.lastindex or 0
            value = match.group(group)
            if not _PLACEHOLDER.match(value) and not _OF_OTHERS.match(value) and not is_sample(value):
                yield match.span(group)


_OPTION_PATTERNS = tuple(re.compile(option) for option in _OPTIONS)

ENCODED_LOGIN_TRIGGER = rf"(?i)auth{_QUOTES}\s{{0,3}}[:=]\s{{0,3}}{_QUOTES}[A-Za-z0-9+/]{{8}}"
_ENCODED_LOGIN = re.compile(r"(?<![A-Za-z])_?auth[\"'\s]{0,4}[:=][\"'\s]{0,4}([A-Za-z0-9+/]{8,4096}={0,2})(?![\w+/=])")


def encoded_logins(text: str) -> Iterator[tuple[int, int]]:
    """Spans of base64 in `"auth": "..."` (Docker) and `_auth=...` (npm) that is a name, a colon and a password."""
    for match in _ENCODED_LOGIN.finditer(text):
        try:
            login = b64decode(match.group(1), validate=True).decode("ascii")
        except (Base64Error, UnicodeDecodeError):
            continue
        if login.isprintable() and ":" in login:
            yield match.span(1)
