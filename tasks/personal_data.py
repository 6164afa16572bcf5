"""E-mail addresses and the names of users in home directories."""

import re
from collections.abc import Callable, Iterator

_LETTER = "A-Za-z\u00c0-\u024f\u0370-\u052f"
"""Latin, Greek, Cyrillic. Not of scripts without blanks, where an address may follow a word at once."""
_WORD = rf"{_LETTER}0-9_"
_LABEL = rf"[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,62}})"
_DOMAIN = re.compile(rf"@((?:{_LABEL}\.){{1,5}}(?:xn--[a-z0-9-]{{2,58}}|[{_LETTER}]{{2,24}}))(?![{_WORD}(-])")
_LOCAL_PART = re.compile(rf"(?:^|[^{_WORD}.+-])([{_LETTER}0-9](?:[{_WORD}.+-]{{0,62}}[{_WORD}])?)\Z")
_KEPT_DOMAINS = (".example", "example.com", "example.org", "example.net", ".invalid", ".test", ".localhost")
_TOP_LEVEL_TEXT = (
    "com net org edu gov mil int info biz name pro mobi coop aero museum jobs tel travel cat asia arpa dev app "
    "page cloud tech online site store shop xyz top club live life world today news media email blog website "
    "space digital agency studio design solutions systems software services support team company center network "
    "global international academy education school institute foundation ngo art eco bio health care law legal "
    "finance bank capital ventures energy engineering consulting expert zone works work tools codes hosting "
    "social community events video fund partners technology marketing management london berlin paris nyc tokyo "
    "amsterdam hamburg koeln wien swiss africa bayern scot wales quebec ninja rocks guru moe red fyi local lan "
    "internal corp google ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo "
    "br bs bt bw by bz ca cc cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es "
    "et eu fi fj fk fm fo fr ga gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im "
    "in io iq ir is it je jm jo jp ke kg kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me "
    "mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph "
    "pk pl pm pn pr ps pt pw qa re ro rs ru rw sa sb sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc "
    "td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw"
)
_TOP_LEVEL = frozenset(_TOP_LEVEL_TEXT.split())
"""Countries, and the common ones of the rest: `x@inputs.view` is code. Not those that are as often an attribute."""
_SECOND_LEVEL_OF_PARAGUAY = (".com.py", ".edu.py", ".gov.py", ".org.py", ".net.py")
"""Another name that ends so is a file's."""
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


def _is_domain(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    plausible = last in _TOP_LEVEL or last.startswith("xn--") or not last.isascii()
    return "." in name and (plausible or name.lower().endswith(_SECOND_LEVEL_OF_PARAGUAY))


def emails(text: str) -> Iterator[tuple[int, int]]:
    """Spans of addresses, looked for from the @ outwards: that is linear in the text."""
    for match in _DOMAIN.finditer(text):
        domain = match.group(1)
        if not _is_domain(domain):
            domain, _, word = domain.rpartition(".")  # "to jane@corp.io.Then"
            if not word[0].isupper() or not _is_domain(domain):
                continue
        local = _LOCAL_PART.search(text, max(0, match.start() - 66), match.start())
        if local is not None and local.group(1) != "git" and not domain.lower().endswith(_KEPT_DOMAINS):
            yield local.start(1), match.start(1) + len(domain)


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
