"""Generated passwords and keys behind the name of a secret go; what stands there in code, and prose, stays."""

import json
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.gibberish import is_gibberish
from tasks.redact import Redactor

ALNUM = string.ascii_letters + string.digits
PUNCTUATED = ALNUM + "!@#$%^&*()-_=+"
DJANGO = string.ascii_lowercase + string.digits + "!@#$%^&*(-_=+)"
BASE64 = ALNUM + "+/"
HEX = "0123456789abcdef"
N_VALUES = 200

# (around, alphabet, length, how many of 200 may be left)
CONTEXTS = (
    ("PGPASSWORD={} psql", ALNUM, 12, 4),
    ("DB_PASSWORD={}\n", ALNUM, 14, 4),
    ('connect(password="{}")', ALNUM, 12, 6),
    ("password: {}\n", ALNUM, 14, 2),
    ('{{"password": "{}"}}', ALNUM, 16, 1),
    ('client_secret = "{}"', ALNUM, 20, 0),
    ("//r.example/:_authToken={}", ALNUM, 36, 0),
    ("tool --password {} x", ALNUM, 14, 2),
    ('credentials = "{}"', ALNUM, 16, 2),
    ('DB_PASSWORD="{}"', PUNCTUATED, 16, 2),
    ('{{"password": "{}"}}', PUNCTUATED, 24, 0),
    ("DB_PASSWORD={}\n", PUNCTUATED, 16, 12),
    ("SECRET_KEY = '{}'", DJANGO, 50, 3),
    ('SECRET_KEY = "django-insecure-{}"', DJANGO, 50, 3),
    ("API_TOKEN={}", BASE64, 44, 0),
    ("API_TOKEN={}", HEX, 40, 0),
    ("APP_KEY=base64:{}=", BASE64, 43, 2),
    ("FERNET_KEY={}=", ALNUM + "-_", 43, 0),
    ("PRIVATE_KEY=0x{}", HEX, 64, 0),
    ("postgres://u:{}@h:5432/x", PUNCTUATED, 16, 3),
    ("h.example:5432:db:bob:{}\n", ALNUM, 14, 4),
    ("https://a.example/c?sv=2020&sig={}%3D&se=1", ALNUM, 43, 0),
    ("https://b.example/x?X-Amz-Expires=60&X-Amz-Signature={}", HEX, 64, 0),
    ("https://maps.example/?q=x&key={}", ALNUM, 32, 0),
    ("wandb login --relogin {}\n", HEX, 40, 0),
    ("SSWS {}", ALNUM, 42, 0),
    ("a patAbCdEfGh12345a.{} b", HEX, 64, 0),
    ("echo {} | docker login -u bob --password-stdin r.example", ALNUM, 12, 0),
    ("echo '{}' | sudo -S ls", ALNUM, 8, 0),
    ('sudo -S apt-get update <<< "{}"', ALNUM, 10, 0),
)


@pytest.mark.parametrize(("around", "alphabet", "length", "most"), CONTEXTS)
def test_generated_values_go(around: str, alphabet: str, length: int, most: int) -> None:
    chance = random.Random(f"{around} {length}")
    left = []
    for _ in range(N_VALUES):
        value = "".join(chance.choices(alphabet, k=length))
        redacted = Redactor().text(around.format(value))
        if value[3:9] in redacted or value[-6:] in redacted:
            left.append(value)
    assert len(left) <= most, left


CODE = (
    *(
        "password = get_password()",
        'password = getpass.getpass("Password: ")',
        "password = self.config.databasePassword",
    ),
    *("password: required", '"password": "string"', "PASSWORD=$PASSWORD", "password = None", "password: xxx"),
    *('"password=%s&user=%s" % (a, b)', "password: ***********", 'password = "correct-horse-battery-staple"'),
    *("password: Please enter a new password (8 characters, 1 digit)", "password: 密码必须包含大写字母"),
    *(
        "token: HTTPSConnectionPool",
        "token = XMLHttpRequestFactory",
        'token="<s>[INST]"',
        'image_token = "<|extra_2000|>"',
    ),
    *('TOKEN = "[A-Za-z0-9]+[^x]{3}"', 'token = r"(?P<word>[a-z]+)\\d{4}"', "token=sha256(x1y2z3a4b5)"),
    *("password=hash(x1y2z3a4b5, salt)", "token=tok_embeddings.weight.T", 'token: Union[str, List[str]] = "auto"'),
    *(
        "private_key: Ed25519PrivateKey",
        "credentials: GoogleCredentialsProvider",
        'fetch(url, {credentials: "include"})',
    ),
    *("private_key=/home/user/.ssh/id_ed25519", "token: /tmp/tmpab3x9k2q/token.json", "token=~/.config/gh/hosts.yml"),
    *("secret: kubernetes.io/service-account-token", '--token "$(cat token1.txt)"', "--password ${DB_PASSWORD}"),
    *("http://localhost:3000/@vite/client", "git+https://github.com/a/b@v1.2.3#egg=x", "http://h:80/a1b2c3d4e5#x@y"),
    *("file.py:1234:warning:name:message1text2", "2001:0000:5ef5:79fd:0000:059d:a0e5:0ba1"),
    *("https://x.io/?key=some-long-readable-key-name-for-a-page", "wandb login --relogin $WANDB_API_KEY"),
    *('echo "$PASS" | sudo -S ls', "echo $CR_PAT | docker login ghcr.io --password-stdin", "echo <pw> | sudo -S ls"),
    *(
        "x = torch.Tensor@cuda.float",
        "C = A@B.mean",
        "y = model.weight@inputs.view",
        "usage\n@pytest.mark.skip",
        "x@y.py",
    ),
)


@pytest.mark.parametrize("text", CODE)
def test_code_and_prose_stay(text: str) -> None:
    assert Redactor().text(text) == text
    assert Redactor().text(json.dumps({"c": text})) == json.dumps({"c": text})


def test_a_key_that_happens_to_hold_the_word_key_goes() -> None:
    assert Redactor().text("CO_API_KEY=y5jHnkEybW0Eh30Tt2vkFoAT1VXsXiZ7NsAf x") == "CO_API_KEY=[assigned_secret-1] x"


def test_a_password_with_odd_signs_ends_at_its_host() -> None:
    for password in ("Xk9#mQ2/vL7?zR", "#Xk9@mQ2vL7zR", "Xk9mQ2vL7zR"):
        redacted = Redactor().text(f"https://bob:{password}@h.example/path?to=#a@b")
        assert redacted == "https://bob:[basic_auth_credentials-1]@h.example/path?to=#a@b"


def test_urls_upon_urls_cost_no_square() -> None:
    text = "://u:" * 20_000 + "#q1x@h"  # 0.2 s; with a square in it: 5 s
    assert Redactor().text(text)


def test_an_address_ends_before_the_next_sentence() -> None:
    assert Redactor().text("to jane@corp.io.Then wait") == "to person-1@example.invalid.Then wait"
    assert Redactor().text("jane@firma.com.py") == "person-1@example.invalid"


WORDS = ("HTTPSConnectionPool", "getTokenFromEnvironment", "test_gh19359_x2", "kubernetes.io/tls", "MAX_N_TOKENS")
CHANCE = ("YkUHbTGK", "kzjQWpXvTbLm", "qz7-Xk9+vB", "xkqzvbplmwtr")


def test_words_read_and_chance_does_not() -> None:
    assert not [value for value in WORDS if is_gibberish(value)]
    assert not [value for value in CHANCE if not is_gibberish(value)]


@given(
    st.text(string.ascii_letters + string.digits + string.punctuation, min_size=8, max_size=40),
    st.sampled_from(['password="{}"', "TOKEN='{}'", "password: {} x", "postgres://u:{}@h/x", 'echo "{}" | sudo -S ls']),
)
def test_json_around_any_value_stays_json(value: str, around: str) -> None:
    text = json.dumps({"a": {"password": value, "command": around.replace("{}", value)}, "b": "x"})
    for once in (text, json.dumps({"inner": text})):
        assert json.loads(Redactor().text(once)).keys() == json.loads(once).keys()
