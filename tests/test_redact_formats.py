"""Which tokens, headers, options and escapes are found, and that what is around them stays."""

import json

import pytest

from tasks.redact import Redactor, redact
from tasks.sources.draft import Message, Run

MIXED = "Ab3xY9kQ2mZ7pLw4RkB8sYd1Tq5Vn6Jc0Hf2Gu8Wi3EoXa7" * 3
HEX = "9f86d081884c7d659a2feaa0c55ad0153b7e" * 4
VALUE = MIXED[:12]
LONG = MIXED[:24]

# Put together here so that no scanner finds a token in this file.
TOKENS = (
    *("GOCSPX-" + MIXED[:28], "sk_test_" + MIXED[:24], "rk_live_" + MIXED[:24], "sk_live_" + MIXED[:90]),
    *("whsec_" + MIXED[:32], "xapp-1-" + "A012ABC-123-" + HEX[:64], "dop_v1_" + HEX[:64], "shpat_" + HEX[:32]),
    *("dapi" + HEX[:32], "hvs." + MIXED[:24], "lin_api_" + MIXED[:40], "dp.pt." + MIXED[:43]),
    *("NRAK-" + "ABCDEFGHIJK0123456789LMNOPQ", "ATATT3x" + MIXED[:120], "gsk_" + MIXED[:52], "r8_" + MIXED[:37]),
    *("xai-" + MIXED[:80], "pplx-" + MIXED[:48], "tvly-" + MIXED[:32], f"lsv2_pt_{HEX[:32]}_{HEX[:10]}"),
    *("nfp_" + MIXED[:36], "AGE-SECRET-KEY-1" + MIXED.upper()[:58], "sq0atp-" + MIXED[:22], "hf_" + MIXED[:34]),
    *("glpat-" + MIXED[:20], "glpat-" + MIXED[:60], "npm_" + MIXED[:36], "pypi-AgEIcHlwaS5vcmc" + MIXED[:80]),
    *("sk-ant-api03-" + MIXED[:90], "sk-" + MIXED[:48], "AIza" + MIXED[:35], "dckr_pat_" + MIXED[:27]),
    *("sntrys_" + MIXED[:60], "sbp_" + HEX[:40], "pscale_tkn_" + MIXED[:43], "figd_" + MIXED[:40]),
    *("key-" + HEX[:32], "EAACEdEose0cBA" + MIXED[:60], "123456789:AA" + MIXED[:33]),
)

AROUND = (
    ("redis://:{}@host/0", "pw"),
    ("https://user:{}@host/x", "p@ss1word"),
    ("x-api-key: {}", VALUE),
    ("SMTP_PASS={} x", VALUE),
    ("PASS={}", VALUE),
    ("Server=x;Uid=a;Pwd={};Db=y", VALUE),
    ('password := "{}"', VALUE),
    ('password = b"{}"', VALUE),
    ('password = f"{}{{host}}"', VALUE),
    ('password: str = "{}"', VALUE),
    ('os.environ["DB_PASSWORD"] = "{}"', VALUE),
    ("- name: DB_PASSWORD\n  value: {}\n", VALUE),
    ("<password>{}</password>", VALUE),
    ("ENV DB_PASSWORD {}\nRUN x", VALUE),
    ("run --password {} x", VALUE),
    ("curl -u joe:{} https://x", "pw"),
    ('curl -s -X POST \\\n --user "joe:{}" https://x', "hunter2"),
    ("mysql -u root -p{} db", "PW"),
    ("Cookie: session={}; theme=dark", LONG),
    ("Set-Cookie: sid={}; Path=/; HttpOnly", LONG),
    ('{{"auths":{{"r":{{"auth": "{}"}}}}}}', "dXNlcjpwYXNzd29yZA=="),
    ("machine h\n  login u\n  password {}\n", "hunter2"),
    ("Authorization: ApiKey {}", LONG),
    ('Authorization: Token token="{}"', LONG),
    ('"h": "Bearer {}"', LONG),
    ("//r.example/:_authToken={} && npm publish", "npm_" + MIXED[:36]),
    ("C:\\Users\\{}\\x", "John Smith"),
    ("C:\\Users\\{}\\x", "nora"),
    ("C:\\Documents and Settings\\{}\\x", "bob"),
    ("mail {} now", "jürgen@müller.de"),
    ("邮箱{}请", "jane@corp.io"),
    ("jwt {} end", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLXBhcnQ"),
)

ESCAPED = (
    ("password\\u003d{} x", VALUE),
    ("Authorization: Bearer {} x", "abcdefghij1k\\u002Bdef2ghijk"),
    ("a {} b", "jane\\u0040corp.io"),
    ("/home/{}/x", "j\\u00fcrgen"),
    ("C:\\\\Users\\\\{}\\\\x", "John Smith"),
)

KEPT = (
    *("pwd=$(pwd)", "PWD=/testbed", "PWD=D:/a1b2c3/d4e5f6g7", "api_key=api_key", "token: str = None"),
    *(
        "docker run -p 8080:80 mysql",
        "docker run mysql -p3306:3306 x",
        "mysql -u root -p db",
        "find / -name mysql -print",
    ),
    *("password: <password>", "API_KEY=xxxxxxxxxxxxxxxx", "password=changeme", "redis://[[username]:[password]]@host"),
    *("postgres://${USER}:${PASS}@host/x", "curl -u $USER:$PASS x", 'curl -u "${U}:${P}" x'),
    *("PASS: tests/test_x1.py::Test2::test_3", "--- PASS: TestFoo/1h30m0s_abc (0.00s)", "PASS: TestA1b2C3d4e5"),
    *(".sk-toggleable__label-arrow:before", "sk-top-container-2-abcdefgh-toggle", "eyJson.loads_something"),
    *("docker://alpine:3.18@sha256:abc", '"auth": "required_for_all"', "Cookie: theme=dark", "f'Bearer {token}'"),
    *("对象用@property.setter装饰", "ghp_" + "x" * 36),
)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("around", ["a {} b", "url%3D{}", '"{}"'])
def test_tokens_go_whole(token: str, around: str) -> None:
    before, after = around.split("{}")
    redacted = Redactor().text(around.format(token))
    assert redacted.startswith(before + "[")
    assert redacted.endswith("-1]" + after)


@pytest.mark.parametrize(("around", "value"), AROUND)
def test_values_go_and_the_rest_stays_also_within_json(around: str, value: str) -> None:
    text = around.format(value)
    before, after = text.split(value)
    for redacted in (Redactor().text(text), json.loads(Redactor().text(json.dumps({"c": text})))["c"]):
        assert value not in redacted
        assert redacted.startswith(before)
        assert redacted.endswith(after)


@pytest.mark.parametrize(("around", "value"), ESCAPED)
def test_values_behind_and_with_escapes_go(around: str, value: str) -> None:
    before, after = around.split("{}")
    redacted = Redactor().text(around.format(value))
    assert value not in redacted
    assert redacted.startswith(before)
    assert redacted.endswith(after)


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert Redactor().text(text) == text
    assert Redactor().text(json.dumps({"c": text})) == json.dumps({"c": text})


def test_a_folder_that_holds_a_users_name_is_known_by_the_home_directory() -> None:
    texts = ("cat projects/-Users-jane-doe-proj/x", "cd /Users/jane.doe/proj")
    messages = tuple(Message("user", "human", text) for text in texts)
    run = Run(trajectory_id="t", task_id="k", source_format="f", source_path="p", source_blake3="s", messages=messages)
    redacted, _ = redact(run)
    assert [message.content for message in redacted.messages] == [
        "cat projects/-Users-user-1-proj/x",
        "cd /Users/user-1/proj",
    ]


def test_a_cookie_ends_with_its_header_and_many_headers_cost_no_square() -> None:
    text = f"Cookie: a=b\nX-Request-Id: {HEX[:32]}\n"
    assert Redactor().text(text) == text
    assert (
        Redactor().text("cookie: a=1; " * 50_000 + f"sid={LONG}").endswith("sid=[cookie-1]")
    )  # 0.3 s; as a square: minutes
