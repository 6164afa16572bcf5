"""Formats of access tokens that tell themselves by prefix, alphabet and length, as their issuers document them.

They complete detect-secrets, which knows fewer and cuts some short (a longer Stripe or GitLab key kept its tail).
"""

import re
from collections.abc import Callable, Iterator

_ALNUM = "A-Za-z0-9"
_URL_SAFE = r"\w\-"
_HEX = "a-f0-9"

TOKEN_FORMATS: tuple[tuple[str, str, str], ...] = (
    # (kind, literal or short expression it begins with, rest)
    ("github_token", "gh[pousr]_", f"[{_ALNUM}_]{{36,255}}"),
    ("token", "github_pat_", r"\w{22,255}"),
    ("gitlab_token", "gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct)-", rf"[{_URL_SAFE}]{{20,1024}}(?:\.\w+)*"),
    ("stripe_access_key", "[rs]k_(?:live|test|prod)_", f"[{_ALNUM}]{{16,255}}"),
    ("token", "whsec_", f"[{_ALNUM}+/=]{{32,}}"),
    ("slack_token", "xapp-[0-9]-", rf"[{_ALNUM}]+-[0-9]+-[{_ALNUM}]{{20,}}"),
    ("slack_token", r"xoxe(?:\.xox[bp])?-[0-9]-", f"[{_ALNUM}]{{20,}}"),
    ("slack_token", r"hooks\.slack\.com/(?:workflows|triggers)/", rf"[{_ALNUM}/]{{20,}}"),
    ("token", r"discord(?:app)?\.com/api/webhooks/", rf"[0-9]{{16,20}}/[{_URL_SAFE}]{{60,}}"),
    ("telegram_bot_token", "[0-9]{8,10}:AA", rf"[{_URL_SAFE}]{{33}}(?![{_URL_SAFE}])"),
    # model providers
    ("token", "sk-(?:proj|ant|or|svcacct|admin|lf|None)-", rf"[{_URL_SAFE}]{{20,}}"),
    ("token", "sk-", f"(?=[A-Za-z]*[0-9])[{_ALNUM}]{{20,}}"),
    ("token", "sk_", f"[{_HEX}]{{48}}(?![{_ALNUM}])"),
    ("token", "sess-", f"[{_ALNUM}]{{40}}"),
    ("token", "hf_", f"[{_ALNUM}]{{30,}}"),
    ("token", "api_org_", f"[{_ALNUM}]{{34}}"),
    ("token", "gsk_", f"[{_ALNUM}]{{40,}}"),
    ("token", "r8_", f"[{_ALNUM}]{{37}}"),
    ("token", "xai-", f"[{_ALNUM}]{{40,}}"),
    ("token", "pplx-", f"[{_ALNUM}]{{40,}}"),
    ("token", "tvly-", rf"(?:dev-|prod-)?[{_ALNUM}-]{{24,}}"),
    ("token", "lsv2_(?:pt|sk)_", f"[{_HEX}]{{32}}_[{_HEX}]{{10}}"),
    ("token", "ls__", f"[{_HEX}]{{32}}"),
    ("token", "nvapi-", rf"[{_URL_SAFE}]{{60,}}"),
    ("token", "csk-", f"[{_ALNUM}]{{40,}}"),
    ("token", "pcsk_", r"\w{60,}"),
    ("token", "jina_", rf"[{_URL_SAFE}]{{60,}}"),
    ("token", "tgp_v1_", rf"[{_URL_SAFE}]{{40,}}"),
    ("token", "fc-", f"[{_HEX}]{{32}}(?![{_ALNUM}-])"),
    ("token", "e2b_", f"[{_HEX}]{{40}}"),
    ("token", "apify_api_", f"[{_ALNUM}]{{36}}"),
    # clouds and hosts
    ("token", "AIza", rf"[{_URL_SAFE}]{{35}}"),
    ("token", "GOCSPX-", rf"[{_URL_SAFE}]{{28}}"),
    ("token", r"ya29\.", rf"[{_URL_SAFE}.]{{20,}}"),
    ("token", "1//0", rf"[{_URL_SAFE}]{{40,}}"),
    ("token", r"[\w~.]{3}[0-9]Q~", r"[\w~.-]{31,34}"),
    ("token", "SharedAccessKey=", f"[{_ALNUM}+/]{{43}}="),
    ("token", "LTAI", f"[{_ALNUM}]{{16,20}}(?![{_ALNUM}])"),
    ("token", "AKID", f"[{_ALNUM}]{{32}}(?![{_ALNUM}])"),
    ("token", "do[opr]_v1_", f"[{_HEX}]{{64}}"),
    ("token", "dapi", f"[{_HEX}]{{32}}(?:-[0-9])?(?![{_ALNUM}])"),
    ("token", "HRKU-AA", rf"[{_URL_SAFE}]{{58}}"),
    ("token", "nf[bcopu]_", f"[{_ALNUM}]{{36,40}}"),
    ("token", "vercel_blob_rw_", f"[{_ALNUM}]{{16,}}_[{_ALNUM}]{{30,}}"),
    ("token", "fo1_", rf"[{_URL_SAFE}]{{43}}"),
    ("token", "fm[12][ar]?_", f"[{_ALNUM}+/]{{100,}}=*"),
    ("token", "sbp_", f"[{_HEX}]{{40}}"),
    ("token", "sb_secret_", rf"[{_URL_SAFE}]{{20,}}"),
    ("token", "pscale_(?:tkn|pw|oauth)_", r"[\w=.-]{32,64}"),
    ("token", "napi_", f"[{_ALNUM}]{{60,}}"),
    ("token", r"v1\.0-", f"[{_HEX}]{{24}}-[{_HEX}]{{146}}"),
    ("token", "tskey-[a-z]{3,9}-", f"[{_ALNUM}]{{8,}}-[{_ALNUM}]{{16,}}"),
    # tools of development and operation
    ("npm_tokens", "npm_", f"[{_ALNUM}]{{36}}"),
    ("token", "pypi-AgE", rf"[{_URL_SAFE}]{{70,}}"),
    ("token", "rubygems_", f"[{_HEX}]{{48}}"),
    ("token", "cio", f"(?=[a-z]*[A-Z0-9])(?=[A-Za-z]*[0-9])[{_ALNUM}]{{32}}(?![{_ALNUM}])"),
    ("token", "CLOJARS_", f"[{_HEX}]{{60}}"),
    ("token", "dckr_[op]at_", rf"[{_URL_SAFE}]{{27,}}"),
    ("token", r"hv[sbr]\.", rf"[{_URL_SAFE}]{{24,}}"),
    ("token", "[a-z0-9]{14}" r"\.atlasv1\.", rf"[{_URL_SAFE}=]{{60,70}}"),
    ("token", "AGE-SECRET-KEY-1", "[0-9A-Z]{58}"),
    ("token", r"dp\.(?:pt|st|ct|sa|scim|audit)\.", rf"(?:[a-z0-9_-]{{2,35}}\.)?[{_ALNUM}]{{40,44}}"),
    ("token", "sntrys_", rf"[{_URL_SAFE}=+/]{{40,}}"),
    ("token", "sntryu_", f"[{_HEX}]{{64}}"),
    ("token", "glc_", f"[{_ALNUM}+/]{{32,}}=*"),
    ("token", "glsa_", f"[{_ALNUM}]{{32}}_[A-Fa-f0-9]{{8}}"),
    ("token", "NRAK-", "[A-Z0-9]{27}"),
    ("token", "NRJS-", f"[{_HEX}]{{19}}"),
    ("token", r"dt0[a-z][0-9]{2}\.", r"[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    ("token", "AT(?:ATT|CTT)3x", rf"[{_URL_SAFE}=]{{30,}}"),
    ("token", "ATBB", f"[{_ALNUM}]{{32}}(?![{_ALNUM}])"),
    ("token", "PMAK-", f"[{_HEX}]{{24}}-[{_HEX}]{{34}}"),
    ("token", "pul-", f"[{_HEX}]{{40}}"),
    ("token", "bku?a_", f"[{_ALNUM}]{{40}}"),
    ("token", "CCIP(?:AT|RJ)_", rf"[{_ALNUM}]{{16,}}_[{_HEX}]{{40}}"),
    ("token", "AKCp", f"[{_ALNUM}]{{69}}"),
    ("token", "sha256~", rf"[{_URL_SAFE}]{{43}}"),
    ("token", "pn[bu]_", f"[{_ALNUM}]{{36}}"),
    # services
    ("token", f"pat[{_ALNUM}]{{14}}" r"\.", f"[{_HEX}]{{64}}"),
    ("token", "lin_(?:api|oauth)_", f"[{_ALNUM}]{{40,}}"),
    ("token", "ntn_", f"[{_ALNUM}]{{40,}}"),
    ("token", "secret_", f"(?=[A-Za-z]*[0-9])[{_ALNUM}]{{43}}(?![{_ALNUM}])"),
    ("token", "figd_", rf"[{_URL_SAFE}]{{40,}}"),
    ("token", "shp(?:at|ss|ca|pa)_", "[A-Fa-f0-9]{32}"),
    ("token", "sq0atp-", rf"[{_URL_SAFE}]{{22}}"),
    ("token", "EAACEdEose0cBA", f"[{_ALNUM}]{{10,}}"),
    ("token", "key-", f"[{_HEX}]{{32}}(?![{_ALNUM}-])"),
    ("token", "xkeysib-", f"[{_HEX}]{{64}}-[{_ALNUM}]{{16}}"),
    ("token", "CFPAT-", rf"[{_URL_SAFE}]{{43}}"),
    ("token", "tfp_", r"[\w.=-]{59}"),
    ("token", "rdme_", f"[{_ALNUM}]{{70}}"),
    ("token", "EZ[AT]K", f"[{_ALNUM}]{{54}}"),
    ("token", "ico-", f"[{_ALNUM}]{{32}}(?![{_ALNUM}-])"),
)
"""A rest is matched as ASCII."""

_ASSERTION = re.compile(r"\(\?[=!][^)]*\)")
_LAST_REPEAT = re.compile(r"\{([0-9]+),[0-9]*\}$")
_MAY_PRECEDE = re.compile(r"(?:^|[^A-Za-z0-9]|%[0-9A-Fa-f]{2})$")
"""Nothing that would make the prefix the end of a word; but `url%3Dghp_...`."""
_SAMPLE = re.compile(r"(?i)example|x{8}")


def token_trigger(start: str, rest: str) -> str:
    """The expression for Hyperscan: it has no assertions, and needs no more than what shows that there is a match."""
    return start + _LAST_REPEAT.sub(r"{\1}", _ASSERTION.sub("", rest))


def token_finder(start: str, rest: str) -> Callable[[str], Iterator[tuple[int, int]]]:
    """A function that gives the spans of such tokens in a text."""
    pattern = re.compile(start + rest, re.ASCII)

    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            before = text[max(0, match.start() - 3) : match.start()]
            if _MAY_PRECEDE.search(before) and not _SAMPLE.search(match.group()):
                yield match.span()

    return find
