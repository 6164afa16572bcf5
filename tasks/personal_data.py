"""E-mail addresses and the names of users in home directories."""

import re
from collections.abc import Callable, Iterator

_LETTER = "A-Za-z\u00c0-\u024f\u0370-\u052f"
"""Latin, Greek, Cyrillic. Not of scripts without blanks, where an address may follow a word at once."""
_WORD = rf"{_LETTER}0-9_"
_LABEL = rf"[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,62}})"
_DOMAIN = re.compile(rf"@((?:{_LABEL}\.){{1,5}}(?:xn--[a-z0-9-]{{2,58}}|[{_LETTER}]{{2,24}}))(?![{_WORD}(-])")
_LOCAL_PART = re.compile(rf"(?:^|[^{_WORD}.+-])([{_LETTER}0-9](?:[{_WORD}.+-]{{0,62}}[{_WORD}])?)$")
_KEPT_DOMAINS = (".example", "example.com", "example.org", "example.net", ".invalid", ".test", ".localhost")
EMAIL_TRIGGER = r"@[A-Za-z0-9.\\\x80-\xff-]+\.[A-Za-z\\\x80-\xff]"

_USER = r"([^\W_][\w.-]*\w|\w)"
_WINDOWS_USER = rf"([^\W_][\w.'-]*(?: [\w.'()-]+){{0,3}}(?=[\\/])|(?<=\\){_USER}|{_USER})"
_HOME = re.compile(
    rf"(?:/home/|/Users/){_USER}"
    rf"|:(?<=[A-Za-z]:)(?:\\{{1,4}}(?:Users|Documents and Settings)(?:\\{{1,4}}|/)|/Users\\{{1,4}}){_WINDOWS_USER}"
)
HOME_TRIGGER = r"/home/[\w\x80-\xff]|[/\\]Users[/\\]|\\Documents and Settings[/\\]"
HOME_HINTS = ("/home/", "Users", "Documents and")
_SHORT_HOME = re.compile(
    r"(?:(?<![^\s\"'=:(])~(?=[\w.-]+/)|(?<![^/])-(?:home|Users)-(?=\w))([A-Za-z][A-Za-z0-9_]+)(?=[/-]|$)"
)
"""`~jane/`, and `-home-jane-project` as coding agents name the folder of a project's logs."""
SHORT_HOME_TRIGGER = r"~[a-z][\w.-]*/|-(?:home|Users)-\w"
_KEPT_USERS = frozenset(
    (
        *("user", "users", "username", "your-name", "your_username", "yourname", "name", "you", "me", "sample_user"),
        *("root", "admin", "ubuntu", "debian", "runner", "runneradmin", "vscode", "node", "agent", "app", "dev"),
        *("openhands", "swe-agent", "testuser", "jovyan", "gitpod", "coder", "codespace", "circleci", "linuxbrew"),
        *("docker", "nobody", "public", "shared", "default", "all", "all users", "default user", "administrator"),
        *("localservice", "networkservice", "your name", "your username", "user name"),
    )
)
"""Names that machines and examples have; a path with one of them says nothing about a person."""


def emails(text: str) -> Iterator[tuple[int, int]]:
    """Spans of addresses, looked for from the @ outwards: that is linear in the text."""
    for match in _DOMAIN.finditer(text):
        local = _LOCAL_PART.search(text, max(0, match.start() - 66), match.start())
        kept = local is None or local.group(1) == "git" or match.group(1).lower().endswith(_KEPT_DOMAINS)
        if local is not None and not kept:
            yield local.start(1), match.end()


def _users(pattern: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, int]]]:
    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            group = match.lastindex or 0
            if match.group(group).lower() not in _KEPT_USERS:
                yield match.span(group)

    return find


home_users = _users(_HOME)
short_home_users = _users(_SHORT_HOME)


def dashed_users(text: str) -> dict[str, str]:
    """The names of home directories that hold signs, as coding agents write them in the name of a project's folder:
    `jane.doe` stands there as `jane-doe`.
    """
    users = {text[start:end] for start, end in home_users(text)}
    return {re.sub("[^A-Za-z0-9]", "-", user): user for user in users if re.search("[^A-Za-z0-9]", user)}
