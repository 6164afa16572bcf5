"""Secrets and personal data out of trajectories, before anything is written.

Token formats come from detect-secrets; added are tokens it does not know, values assigned to secret-like names, e-mail
addresses and the user's name in home directories. Hashes, SHAs, UUIDs and documentation examples are no secrets and
stay untouched: detect-secrets' entropy detectors are not used, since they cannot tell a hash from a key.

Each value gets one placeholder for the whole run, so that a path written in turn 3 is still the path read in turn 9.
Placeholders hold no quote and no backslash, so JSON stays JSON.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from threading import local

import hyperscan
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.openai import OpenAIDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector
from msgspec import msgpack
from msgspec.structs import replace

from tasks.sources.draft import CharSpan, Message, Run

Spans = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class _Rule:
    """`find` gives the spans of values. It runs only on texts in which `trigger` matches: Hyperscan looks for all
    triggers at once, in one pass whose time is linear in the text.
    """

    kind: str
    trigger: str
    find: Callable[[str], Spans]
    hints: tuple[str, ...] = ()
    """A text in which the trigger matches holds one of these; empty: nothing so simple is known."""


def _matches(*patterns: re.Pattern[str]) -> Callable[[str], Spans]:
    """Spans of each match, or of its first group where that is the value and not just a prefix."""

    def find(text: str) -> Iterator[tuple[int, int]]:
        for pattern in patterns:
            for match in pattern.finditer(text):
                group = 1 if match.lastindex and len(match.group(1) or "") >= 8 else 0
                if "EXAMPLE" not in match.group(group):
                    yield match.span(group)

    return find


def _library(detector: type[RegexBasedDetector], trigger: str) -> _Rule:
    instance = detector()
    return _Rule(str(instance.secret_type).lower().replace(" ", "_"), trigger, _matches(*instance.denylist))


def _entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


_SECRET_NAME = (
    r"(?i)(?:api_?key|secret(?:_?access)?_?key|access_?key|auth_?token|access_?token|client_?secret|passwd|password)"
    r"[\"']?\s{0,3}(?:=|:|=>)\s{0,3}[\"']?"
)
_ASSIGNED = re.compile(_SECRET_NAME + r"([A-Za-z0-9+/_.~-]{16,200})")
_NAME_LIKE = re.compile(r"[A-Za-z_]+(?:[._-][A-Za-z_]+)*")


def _assigned_values(text: str) -> Iterator[tuple[int, int]]:
    """Values of secret-like names that look random: mixed characters and high entropy, no identifiers or paths."""
    for match in _ASSIGNED.finditer(text):
        value = match.group(1)
        mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
        if mixed and not _NAME_LIKE.fullmatch(value) and "/" not in value[:2] and _entropy(value) >= 3.5:
            yield match.span(1)


_DOMAIN = re.compile(r"@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,5}[A-Za-z]{2,24})(?![\w(-])")
_LOCAL_PART = re.compile(r"(?:^|[^\w.+-])([A-Za-z0-9](?:[\w.+-]{0,62}\w)?)$")
_KEPT_DOMAINS = (".example", "example.com", "example.org", "example.net", ".invalid", ".test", ".localhost")
_HOME = re.compile(
    r"(?:/home/|/Users/|/mnt/c/Users/|[A-Za-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/))([A-Za-z0-9][\w.-]*\w|\w)"
)
_KEPT_USERS = frozenset(
    (
        *("user", "users", "username", "your-name", "your_username", "yourname", "name", "you", "me", "sample_user"),
        *("root", "admin", "ubuntu", "debian", "runner", "runneradmin", "vscode", "node", "agent", "app", "dev"),
        *("openhands", "swe-agent", "testuser", "jovyan", "gitpod", "coder", "codespace", "circleci", "linuxbrew"),
        *("docker", "nobody", "public", "shared", "default", "all"),
    )
)
"""Names that machines and examples have; a path with one of them says nothing about a person."""


def _emails(text: str) -> Iterator[tuple[int, int]]:
    """Addresses, looked for from the @ outwards: that is linear in the text."""
    for match in _DOMAIN.finditer(text):
        local = _LOCAL_PART.search(text, max(0, match.start() - 66), match.start())
        kept = local is None or local.group(1) == "git" or match.group(1).lower().endswith(_KEPT_DOMAINS)
        if local is not None and not kept:
            yield local.start(1), match.end()


def _home_users(text: str) -> Iterator[tuple[int, int]]:
    for match in _HOME.finditer(text):
        if match.group(1).lower() not in _KEPT_USERS:
            yield match.span(1)


_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.{0,16384}?"
    r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----",
    re.DOTALL,
)
_PLAIN_TOKENS = (
    re.compile(r"\bsk-(?:proj-|ant-|or-|svcacct-)?[A-Za-z0-9_-]{20,200}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{22,255}"),
    re.compile(r"\bhf_[A-Za-z0-9]{30,60}"),
    re.compile(r"\bnpm_[A-Za-z0-9]{36}\b"),
    re.compile(r"\bAIza[A-Za-z0-9_-]{35}"),
    re.compile(r"\bya29\.[A-Za-z0-9_-]{20,400}"),
)


@cache
def _rules() -> tuple[tuple[_Rule, ...], hyperscan.Database]:
    """(the rules, their triggers in one database). Earlier rules win where two find the same text."""
    rules = (
        _Rule("private_key", "PRIVATE KEY", _matches(_PRIVATE_KEY)),
        _library(AWSKeyDetector, r"(?:AKIA|ASIA|ABIA|ACCA|A3T)[0-9A-Z]{16}|(?i:aws.{0,20}(?:key|pwd|pw|pass|token))"),
        _library(GitHubTokenDetector, r"gh[pousr]_[A-Za-z0-9_]{36}"),
        _library(GitLabTokenDetector, r"(?:gl[a-z]{2,6}-|GR1348941)[A-Za-z0-9_-]{20}"),
        _library(SlackDetector, r"xox[abposr]-|hooks\.slack\.com"),
        _library(StripeDetector, r"[rs]k_live_"),
        _library(TwilioKeyDetector, r"(?i)twilio"),
        _library(SendGridDetector, r"SG\.[a-zA-Z0-9_-]{22}"),
        _library(MailchimpDetector, r"[0-9a-z]{8}-us[0-9]"),
        _library(NpmDetector, "_authToken"),
        _library(PypiTokenDetector, "pypi-Ag"),
        _library(OpenAIDetector, "T3BlbkFJ"),
        _library(DiscordBotTokenDetector, r"(?i)discord"),
        _library(TelegramBotTokenDetector, r"(?i)telegram"),
        _library(SquareOAuthDetector, "sq0csp"),
        _library(JwtTokenDetector, r"eyJ[A-Za-z0-9_=-]+\."),
        _library(AzureStorageKeyDetector, "AccountKey="),
        _library(BasicAuthDetector, r"://[^:/?#\s]+:[^:/?#\s]+@"),
        _Rule("token", r"(?:sk-|github_pat_|hf_|npm_|AIza|ya29\.)[A-Za-z0-9_-]{20}", _matches(*_PLAIN_TOKENS)),
        _Rule("assigned_secret", _SECRET_NAME + "[A-Za-z0-9+/_.~-]{16}", _assigned_values),
        _Rule("email", r"@[A-Za-z0-9.-]+\.[A-Za-z]", _emails, ("@",)),
        _Rule("home_directory", r"/home/\w|[/\\]Users[/\\]", _home_users, ("/home/", "Users")),
    )
    triggers = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    triggers.compile(
        expressions=[rule.trigger.encode() for rule in rules],
        ids=list(range(len(rules))),
        flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(rules),
    )
    return rules, triggers


class _Scratches(local):
    """What a scan needs to itself, once a thread."""

    _scratch: hyperscan.Scratch | None = None

    def own(self) -> hyperscan.Scratch:
        if self._scratch is None:
            self._scratch = hyperscan.Scratch(_rules()[1])
        return self._scratch


_SCRATCHES = _Scratches()
_ESCAPE = re.compile(r"\\+(?:u[0-9a-fA-F]{4}|[nrtbf\"/])")


@dataclass
class Redactor:
    """The placeholders of one run and what was replaced in it."""

    counts: Counter[str] = field(default_factory=Counter)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)
    _hints: tuple[str, ...] = ("",)
    """A text without any of these has nothing to replace."""

    def _triggered(self, text: bytes) -> list[int]:
        """Indices of the rules whose trigger matches, in order."""
        found: list[int] = []

        def note(index: int, *_: object) -> None:
            found.append(index)

        _rules()[1].scan(text, match_event_handler=note, scratch=_SCRATCHES.own())
        return sorted(found)

    def _placeholder(self, kind: str, value: str) -> str:
        key = (kind, value.lower() if kind == "email" else value)
        if key not in self._names:
            self._numbers[kind] += 1
            number = self._numbers[kind]
            shapes = {"email": f"person-{number}@example.invalid", "home_directory": f"user-{number}"}
            self._names[key] = shapes.get(kind, f"[{kind}-{number}]")
        return self._names[key]

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """(start, end, placeholder) of what is to be replaced: in order, without overlap."""
        triggered = self._triggered(text.encode()) if any(hint in text for hint in self._hints) else []
        if not triggered:
            return []
        # an escape before a value (\nalice@...) is no part of it; blanks of equal length keep the offsets
        plain = _ESCAPE.sub(lambda match: " " * len(match.group()), text) if "\\" in text else text
        taken: list[tuple[int, int, str]] = []
        for index in triggered:
            rule = _rules()[0][index]
            for start, end in rule.find(plain):
                if all(end <= other[0] or start >= other[1] for other in taken):
                    taken.append((start, end, rule.kind))
        taken.sort()
        self.counts.update(kind for _, _, kind in taken)
        return [(start, end, self._placeholder(kind, plain[start:end])) for start, end, kind in taken]

    def text(self, text: str) -> str:
        """The text with placeholders."""
        return _replace(text, self.find(text))

    def message(self, message: Message) -> Message:
        """The message with placeholders in everything it says; action spans move along with the text."""
        found = self.find(message.content)
        if found:
            spans = tuple(
                CharSpan(_moved(span.start, found, end=False), _moved(span.end, found, end=True))
                for span in message.action_spans
            )
            message = replace(message, content=_replace(message.content, found), action_spans=spans)
        if message.reasoning:
            message = replace(message, reasoning=self.text(message.reasoning))
        if message.tool_calls:
            calls = tuple(replace(call, arguments=self.text(call.arguments)) for call in message.tool_calls)
            message = replace(message, tool_calls=calls)
        return message

    def run(self, run: Run) -> Run:
        """The whole run with placeholders. Identities stay: they are hashes."""
        rules = [_rules()[0][index] for index in self._triggered(_all_text(run))]
        if not rules:
            return run
        if all(rule.hints for rule in rules):  # most often addresses or home directories, and in a few messages
            self._hints = tuple(hint for rule in rules for hint in rule.hints)
        messages = tuple([self.message(message) for message in run.messages])
        others = {name: self.text(value) for name in _RUN_TEXTS if (value := getattr(run, name))}
        return replace(run, messages=messages, **others)


_RUN_TEXTS = ("tools_json", "patch", "exit_status")


_PACK = msgpack.Encoder().encode


def _all_text(run: Run) -> bytes:
    """Everything that could hold a secret, so that a clean run is found to be clean in one pass. Texts stand in it
    whole and unescaped, as triggers need them; what stands between them may set off a trigger for nothing.
    """
    messages = run.messages
    calls = [call for message in messages for call in message.tool_calls]
    spoken = [message.content for message in messages], [message.reasoning for message in messages]
    return _PACK([*spoken, [call.arguments for call in calls], [getattr(run, name) for name in _RUN_TEXTS]])


def _replace(text: str, found: list[tuple[int, int, str]]) -> str:
    parts, last = [], 0
    for start, end, placeholder in found:
        parts += [text[last:start], placeholder]
        last = end
    return "".join(parts) + text[last:] if found else text


def _moved(position: int, found: list[tuple[int, int, str]], *, end: bool) -> int:
    """Where a character offset lies after the replacements; inside a replaced value: at its outer edge."""
    shift = 0
    for start, stop, placeholder in found:
        if stop <= position:
            shift += len(placeholder) - (stop - start)
        elif start < position:
            return start + shift + (len(placeholder) if end else 0)
        else:
            break
    return position + shift


def redact(run: Run) -> tuple[Run, Counter[str]]:
    """(the run without secrets and personal data, number of replacements by kind)."""
    redactor = Redactor()
    return redactor.run(run), redactor.counts
