"""What counts as a secret or as personal data: a trigger and a finder for each kind."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

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

Spans = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Rule:
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


def _library(detector: type[RegexBasedDetector], trigger: str) -> Rule:
    instance = detector()
    return Rule(str(instance.secret_type).lower().replace(" ", "_"), trigger, _matches(*instance.denylist))


def _entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


_SECRET_NAME = (
    r"(?i)(?:api_?key|secret(?:_?access)?_?key|access_?key|auth_?token|access_?token|client_?secret|passwd|password)"
    r"[\"']?\s{0,3}"
)
_SEPARATOR = r"(?:=>?|:)\s{0,3}[\"']?"
_ASSIGNED = re.compile(_SEPARATOR + r"([A-Za-z0-9+/_.~-]{16,200})")
_NAME_BEFORE = re.compile(_SECRET_NAME + "$")
_MAX_NAME_CHARS = 24
_NAME_LIKE = re.compile(r"[A-Za-z_]+(?:[._-][A-Za-z_]+)*")


def _assigned_values(text: str) -> Iterator[tuple[int, int]]:
    """Values of secret-like names that look random: mixed characters and high entropy, no identifiers or paths. Looked
    for from the separator outwards: names are many, and of any case.
    """
    for match in _ASSIGNED.finditer(text):
        if not _NAME_BEFORE.search(text, max(0, match.start() - _MAX_NAME_CHARS), match.start()):
            continue
        value = match.group(1)
        mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
        if mixed and not _NAME_LIKE.fullmatch(value) and "/" not in value[:2] and _entropy(value) >= 3.5:
            yield match.span(1)


_DOMAIN = re.compile(r"@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,5}[A-Za-z]{2,24})(?![\w(-])")
_LOCAL_PART = re.compile(r"(?:^|[^\w.+-])([A-Za-z0-9](?:[\w.+-]{0,62}\w)?)$")
_KEPT_DOMAINS = (".example", "example.com", "example.org", "example.net", ".invalid", ".test", ".localhost")
_HOME = re.compile(
    r"(?:/home/|/Users/|:(?<=[A-Za-z]:)(?:\\{1,4}Users(?:\\{1,4}|/)|/Users\\{1,4}))([A-Za-z0-9][\w.-]*\w|\w)"
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
def rules() -> tuple[tuple[Rule, ...], hyperscan.Database]:
    """(the rules, their triggers in one database). Earlier rules win where two find the same text."""
    found = (
        Rule("private_key", "PRIVATE KEY", _matches(_PRIVATE_KEY)),
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
        Rule("token", r"(?:sk-|github_pat_|hf_|npm_|AIza|ya29\.)[A-Za-z0-9_-]{20}", _matches(*_PLAIN_TOKENS)),
        Rule("assigned_secret", _SECRET_NAME + _SEPARATOR + "[A-Za-z0-9+/_.~-]{16}", _assigned_values),
        Rule("email", r"@[A-Za-z0-9.-]+\.[A-Za-z]", _emails, ("@",)),
        Rule("home_directory", r"/home/\w|[/\\]Users[/\\]", _home_users, ("/home/", "Users")),
    )
    triggers = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    triggers.compile(
        expressions=[rule.trigger.encode() for rule in found],
        ids=list(range(len(found))),
        flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(found),
    )
    return found, triggers
