"""What counts as a secret or as personal data: a trigger and a finder for each kind."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import hyperscan
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

from tasks import credentials, personal_data
from tasks.assigned_secrets import ASSIGNED_TRIGGERS, assigned_values, spaced_values
from tasks.escapes import ESCAPES_HINTS, ESCAPES_TRIGGER
from tasks.token_formats import TOKEN_FORMATS, token_finder, token_trigger

Spans = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Rule:
    """`find` gives the spans of values. It runs only on texts in which one of `triggers` matches: Hyperscan looks for
    all at once, in one pass whose time is linear in the text.
    """

    kind: str
    triggers: tuple[str, ...]
    find: Callable[[str], Spans]
    hints: tuple[str, ...] = ()
    """A text in which a trigger matches holds one of these; empty: nothing so simple is known."""


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
    return Rule(str(instance.secret_type).lower().replace(" ", "_"), (trigger,), _matches(*instance.denylist))


_KEY_NAME = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_KEY_PIECE = r"(?:MI[A-Za-z0-9+/=]+|[A-Za-z0-9+/=]{16,}|(?=[A-Za-z]*[0-9+/=])[A-Za-z0-9+/=]+)"
_PRIVATE_KEY = re.compile(
    rf"-----BEGIN {_KEY_NAME}(?:(?:(?!-----BEGIN ).){{0,16384}}?-----END {_KEY_NAME}"
    rf"|(?:\s{{0,8}}(?:Proc-Type|DEK-Info|Version|Comment): [^\n]{{0,200}})*(?:\s{{1,8}}{_KEY_PIECE})+)",
    re.DOTALL,
)
"""Whole, or cut off: then up to where the base64 ends."""
_JWT = re.compile(r"\beyJ[\w=-]{10,8192}(?:\.[\w=+/-]*){0,3}\.[\w=+/-]{6,}", re.ASCII)


def _all_assigned(text: str) -> Iterator[tuple[int, int]]:
    yield from assigned_values(text)
    yield from spaced_values(text)


def _nothing(_: str) -> Spans:
    return ()


@cache
def rules() -> tuple[tuple[Rule, ...], hyperscan.Database]:
    """(the rules, their triggers in one database). Earlier rules win where two find the same text."""
    found = (
        Rule("private_key", ("PRIVATE KEY",), _matches(_PRIVATE_KEY)),
        *[Rule(kind, (token_trigger(*shape),), token_finder(*shape)) for kind, *shape in TOKEN_FORMATS],
        _library(AWSKeyDetector, r"(?:AKIA|ASIA|ABIA|ACCA|A3T)[0-9A-Z]{16}|(?i:aws.{0,20}(?:key|pwd|pw|pass|token))"),
        _library(SlackDetector, r"xox[abposr]-|hooks\.slack\.com"),
        _library(TwilioKeyDetector, r"(?i)twilio"),
        _library(SendGridDetector, r"SG\.[a-zA-Z0-9_-]{22}"),
        _library(MailchimpDetector, r"[0-9a-z]{8}-us[0-9]"),
        _library(DiscordBotTokenDetector, r"(?i)discord"),
        _library(SquareOAuthDetector, "sq0csp"),
        Rule("json_web_token", (r"eyJ[\w=-]{10}[\w=-]*\.",), _matches(_JWT)),
        _library(AzureStorageKeyDetector, "AccountKey="),
        Rule("basic_auth_credentials", credentials.URL_TRIGGERS, credentials.url_passwords),
        Rule("url_parameter", (credentials.PARAMETER_TRIGGER,), credentials.url_parameters),
        Rule("password", (credentials.PASSWORD_FILE_TRIGGER,), credentials.password_files),
        Rule("authorization", credentials.AUTHORIZATION_TRIGGERS, credentials.authorizations),
        Rule("cookie", (credentials.COOKIE_TRIGGER,), credentials.cookies),
        Rule("login", (credentials.ENCODED_LOGIN_TRIGGER,), credentials.encoded_logins),
        Rule("password", credentials.OPTION_TRIGGERS, credentials.option_passwords),
        Rule("assigned_secret", ASSIGNED_TRIGGERS, _all_assigned),
        Rule("email", (personal_data.EMAIL_TRIGGER,), personal_data.emails, ("@",)),
        Rule("home_directory", (personal_data.HOME_TRIGGER,), personal_data.home_users, personal_data.HOME_HINTS),
        Rule(
            "home_directory",
            (personal_data.SHORT_HOME_TRIGGER,),
            personal_data.short_home_users,
            ("~", "-home-", "-Users-"),
        ),
        Rule("escapes", (ESCAPES_TRIGGER,), _nothing, ESCAPES_HINTS),
    )
    triggers = [(trigger.encode(), index) for index, rule in enumerate(found) for trigger in rule.triggers]
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(
        expressions=[trigger for trigger, _ in triggers],
        ids=[index for _, index in triggers],
        flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(triggers),
    )
    return found, database
