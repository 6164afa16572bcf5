"""What counts as a secret or as personal data: a trigger and a finder for each kind."""

import re
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

from tasks.assigned_secrets import ASSIGNED_TRIGGER, BEARER_TRIGGER, assigned_values, bearer_values

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


_DOMAIN = re.compile(r"(?:@|\\+u0040)((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,5}[A-Za-z]{2,24})(?![\w(-])")
_LOCAL_PART = re.compile(r"(?:^|[^\w.+-])([A-Za-z0-9](?:[\w.+-]{0,62}\w)?)$")
_KEPT_DOMAINS = (".example", "example.com", "example.org", "example.net", ".invalid", ".test", ".localhost")
_HOME = re.compile(
    r"(?:/home/|/Users/|:(?<=[A-Za-z]:)(?:\\{1,4}Users(?:\\{1,4}|/)|/Users\\{1,4}))([A-Za-z0-9][\w.-]*\w|\w)"
)
_SHORT_HOME = re.compile(
    r"(?:(?<![^\s\"'=:(])~(?=[\w.-]+/)|(?<![^/])-(?:home|Users)-(?=\w))([A-Za-z][A-Za-z0-9_]+)(?=[/-]|$)"
)
"""`~jane/`, and `-home-jane-project` as coding agents name the folder of a project's logs."""
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


def _home_users(pattern: re.Pattern[str]) -> Callable[[str], Spans]:
    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if match.group(1).lower() not in _KEPT_USERS:
                yield match.span(1)

    return find


_KEY_NAME = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_KEY_PIECE = r"(?:MI[A-Za-z0-9+/=]+|[A-Za-z0-9+/=]{16,}|(?=[A-Za-z]*[0-9+/=])[A-Za-z0-9+/=]+)"
_PRIVATE_KEY = re.compile(
    rf"-----BEGIN {_KEY_NAME}(?:(?:(?!-----BEGIN ).){{0,16384}}?-----END {_KEY_NAME}"
    rf"|(?:\s{{0,8}}(?:Proc-Type|DEK-Info|Version|Comment): [^\n]{{0,200}})*(?:\s{{1,8}}{_KEY_PIECE})+)",
    re.DOTALL,
)
"""Whole, or cut off: then up to where the base64 ends."""
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
        Rule("authorization", BEARER_TRIGGER, bearer_values),
        Rule("assigned_secret", ASSIGNED_TRIGGER, assigned_values),
        Rule("email", r"(?:@|\\u0040)[A-Za-z0-9.-]+\.[A-Za-z]", _emails, ("@", "u0040")),
        Rule("home_directory", r"/home/\w|[/\\]Users[/\\]", _home_users(_HOME), ("/home/", "Users")),
        Rule(
            "home_directory", r"~[a-z][\w.-]*/|-(?:home|Users)-\w", _home_users(_SHORT_HOME), ("~", "-home-", "-Users-")
        ),
    )
    triggers = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    triggers.compile(
        expressions=[rule.trigger.encode() for rule in found],
        ids=list(range(len(found))),
        flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(found),
    )
    return found, triggers
