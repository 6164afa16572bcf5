"""Redaction: what is a secret goes, what only looks like one stays."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.redact import Redactor, redact
from tasks.sources.draft import CharSpan, Message, Run, ToolCall

# Put together here so that no scanner finds a token in this file.
SECRETS = {
    "AKIA" + "QYLPMN5HFIQR7XYA": "aws_access_key",
    "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx": "github_token",
    "github_pat_" + "11ABCDEFG0abcdefghijklmnopqrstuvwxyz": "token",
    "glpat-" + "aB3dE5gH7jK9mN1pQ3sT": "gitlab_token",
    "xoxb-" + "123456789012-1234567890123-abcdefghijklmnopqrstuvwx": "slack_token",
    "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc": "stripe_access_key",
    "sk-ant-" + "api03-abcDEF123456789ghiJKL": "token",
    "sk-proj-" + "abcdEFGH1234ijklMNOP5678": "token",
    "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345": "token",
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLXBhcnQtaGVyZQ": "json_web_token",
    "SG." + "a" * 22 + "." + "b" * 43: "sendgrid_api_key",
    "jane.doe+x@corp.co.uk": "email",
}

KEPT = (
    "commit 3ea751c087f3a5b1c8d5d4e5f60718293a4b5c6d",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "d41d8cd98f00b204e9800998ecf8427e  empty.txt",
    "id 123e4567-e89b-12d3-a456-426614174000",
    "git clone git@github.com:owner/name.git",
    "index 11136f8c..d102a340 100644",
    "@pytest.mark.parametrize('a', [1])",
    "numpy@1.26.4 left-pad@1.3.0",
    "-22-@pytest.mark.skip",
    "mail someone@example.com or a@b.example.org",
    "cd /home/user/project && ls /Users/USER/x /home/runner/work",
    "password = os.environ['PASSWORD']",
    "api_key = settings.openai_api_key_from_environment",
    "token: AKIAIOSFODNN7EXAMPLE",
    "self.assertEqual(password, 'correct horse battery staple')",
    "https://example.org/a:b/c@d",
)


@pytest.mark.parametrize(("secret", "kind"), SECRETS.items())
@pytest.mark.parametrize("around", ["{}", "key {} end", "export KEY='{}'", 'a\n"{}"\n', "x={};"])
def test_secrets_go(secret: str, kind: str, around: str) -> None:
    redactor = Redactor()
    found = redactor.text(around.format(secret))
    assert secret not in found
    assert redactor.counts[kind] == 1 == sum(redactor.counts.values())


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


@given(st.binary(min_size=20, max_size=20), st.uuids(), st.text(max_size=20))
def test_hashes_and_uuids_always_stay(digest: bytes, uuid: object, word: str) -> None:
    text = f"commit {digest.hex()} {uuid} sha={digest.hex()}"
    assert Redactor().text(text) == text


def test_private_keys_go_whole() -> None:
    key = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----"
    assert Redactor().text(f"a\n{key}\nb") == "a\n[private_key-1]\nb"
    escaped = json.dumps({"text": key})
    assert json.loads(Redactor().text(escaped)) == {"text": "[private_key-1]"}


def test_values_of_secret_names_go() -> None:
    assert Redactor().text('API_KEY="q9XvT2mZ7pLw4RkB8sYd"') == 'API_KEY="[assigned_secret-1]"'
    assert "q9XvT2mZ7pLw4RkB8sYd" not in Redactor().text("--client-secret x client_secret: q9XvT2mZ7pLw4RkB8sYd")


ASSIGNED = (
    ("password: {}", "Tr0ub4dor&3"),
    ('DB_PASSWORD="{}"', "s3cr3tP@ss"),
    ("token={}", "abcd1234efgh5678ijkl"),
    ("https://x.io/a?token={}&page=2", "abcd1234efgh5678ijkl"),
    ("curl -H 'Authorization: Bearer {}' x", "abcdefghijklmnopqrst"),
    ("Authorization: Basic {}", "dXNlcjpwYXNzd29yZDEyMw=="),
    ("passwd => '{}'", "xK92#mQ1"),
    ("API_KEY={}", "9f86d081884c7d659a2feaa0c55ad015"),
)


@pytest.mark.parametrize(("around", "value"), ASSIGNED)
def test_assigned_values_go(around: str, value: str) -> None:
    text = around.format(value)
    assert value not in Redactor().text(text)
    arguments = json.loads(Redactor().text(json.dumps({"command": text})))["command"]
    assert value not in arguments
    assert arguments.startswith(around.partition("{")[0])
    assert arguments.endswith(around.partition("}")[2])


CODE = (
    "token = tokenizer.next()",
    "password=None, token=self.tokens[i+1], secret = b64decode(x1y2z3a4)",
    "token = tok2vec_model.v2_0",
    "password = get_password2_from_env1()",
    'password="password123"',
    "token: Optional[str] = None",
    "api_key: your-api-key-0a1b2c3d",
    "api_key=os.environ['API_KEY']",
    "api_key = ${API_KEY_1}",
    "token = 3ea751c087f3a5b1c8d5d4e5f60718293a4b5c6d",
    "next_token: 123e4567-e89b-12d3-a456-426614174000",
    "Unexpected token: 0x1f2e3d4c5b",
    "secret: /etc/app1/key2.pem",
    "token=text-embedding-ada-002",
    "Authorization: Bearer your-access-token-here",
    "Authorization: Bearer {self.token_of_service}",
    "Authorization: Bearer $GITHUB_ACCESS_TOKEN",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
)


@pytest.mark.parametrize("text", CODE)
def test_code_stays(text: str) -> None:
    assert Redactor().text(text) == text
    arguments = json.dumps({"command": text})
    assert Redactor().text(arguments) == arguments


KEY_BODY = "MIIEowIBAAKCAQEA0Z3VS5JJcds3xfn/ygWyF8PbnGy0AHB7MbzYLdZ7ZvVy7F7V\nabcdEFGH1234"


@pytest.mark.parametrize("end", ["", "\n... output cut", '"', "\n<truncated>"])
@pytest.mark.parametrize("header", ["", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,AB12\n\n"])
def test_a_cut_private_key_goes_to_the_end_of_its_body(header: str, end: str) -> None:
    key = "-----BEGIN RSA " + f"PRIVATE KEY-----\n{header}{KEY_BODY}"
    assert Redactor().text(f"cat key\n{key}{end}") == f"cat key\n[private_key-1]{end}"
    assert json.loads(Redactor().text(json.dumps({"text": key + end}))) == {"text": f"[private_key-1]{end}"}
    assert Redactor().text("if '-----BEGIN " + "PRIVATE KEY-----' in text:").endswith("in text:")


def test_a_cut_key_does_not_reach_to_the_end_of_the_next() -> None:
    begin, end = "-----BEGIN " + "PRIVATE KEY-----\n", "\n-----END " + "PRIVATE KEY-----"
    text = f"{begin}{KEY_BODY}\nwords between\n{begin}{KEY_BODY}x{end}"
    assert Redactor().text(text) == "[private_key-1]\nwords between\n[private_key-2]"


def test_other_spellings() -> None:
    assert Redactor().text(r"a jane.doe\u0040corp.io, jane.doe@corp.io") == (
        "a person-1@example.invalid, person-1@example.invalid"
    )
    assert Redactor().text("ls ~janedoe/x HEAD~v1/2 ~/y") == "ls ~user-1/x HEAD~v1/2 ~/y"
    assert Redactor().text("cat projects/-home-janedoe-app/a --home-dir x/-home-user-y") == (
        "cat projects/-home-user-1-app/a --home-dir x/-home-user-y"
    )


def run_of(*messages: Message, **fields: str) -> Run:
    names = {"trajectory_id": "t", "task_id": "k", "source_format": "f", "source_path": "p", "source_blake3": "s"}
    return Run(messages=messages, **(names | fields))  # pyright: ignore[reportArgumentType]


def test_every_field_of_a_run_is_redacted_and_ids_still_fit() -> None:
    secret = "jane@corp.io"
    call = Message("assistant", "policy", "x", None, (ToolCall(f"mail {secret}", "{}", f"call-{secret}"),))
    answer = Message("tool", "environment", "done", tool_call_id=f"call-{secret}", name=f"mail {secret}")
    named = ("trajectory_id", "task_id", "repo", "run_id", "parent_id", "agent", "model", "exit_status", "source_path")
    redacted, _ = redact(run_of(call, answer, **dict.fromkeys(named, f"of {secret}")))
    assert secret not in str(redacted)
    assert redacted.messages[0].tool_calls[0].call_id == redacted.messages[1].tool_call_id
    assert redacted.task_id == redacted.parent_id  # equal names stay equal


def test_tasks_stay_apart_and_together() -> None:
    tasks = ["ask jane@corp.io", "ask bob@corp.io", "ask jane@corp.io", "owner__name-12"]
    first, second, third, plain = [redact(run_of(Message("user", "human", "x"), task_id=task))[0] for task in tasks]
    assert first.task_id == third.task_id != second.task_id
    assert plain.task_id == "owner__name-12"


def test_the_folder_of_a_log_tells_no_user_and_changes_no_text() -> None:
    message = Message("user", "human", "cd /home/alice/x")
    redacted, _ = redact(run_of(message, source_path="/home/janedoe/a.json", run_id="janedoe"))
    assert redacted.source_path == "/home/user-2/a.json"
    assert redacted.run_id is not None
    assert redacted.run_id.startswith("redacted-")
    assert redacted.messages == redact(run_of(message))[0].messages


def test_one_value_has_one_placeholder_within_a_run() -> None:
    redactor = Redactor()
    first = redactor.text("cd /home/alice/x; mail bob@corp.io; ls /Users/carol/y")
    again = redactor.text("open /home/alice/x/a.py; /Users/carol/y; BOB@corp.io; dave@corp.io")
    assert first == "cd /home/user-1/x; mail person-1@example.invalid; ls /Users/user-2/y"
    assert again == "open /home/user-1/x/a.py; /Users/user-2/y; person-1@example.invalid; person-2@example.invalid"


def test_windows_homes() -> None:
    assert Redactor().text(r"C:\Users\alice\code") == r"C:\Users\user-1\code"
    assert json.loads(Redactor().text(json.dumps({"p": r"C:\Users\alice\code"}))) == {"p": r"C:\Users\user-1\code"}


def test_an_escape_before_a_value_is_no_part_of_it() -> None:
    arguments = json.dumps({"command": "git log\nnora@corp.io\tpat@corp.io"})
    redacted = json.loads(Redactor().text(arguments))
    assert redacted == {"command": "git log\nperson-1@example.invalid\tperson-2@example.invalid"}


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.just('x\n"nora@corp.io"\\n'), max_size=4))
def test_json_stays_json(arguments: dict[str, str]) -> None:
    assert json.loads(Redactor().text(json.dumps(arguments))).keys() is not None


def test_spans_move_with_the_text() -> None:
    content = "mail longer.name@corp.io\n```bash\ncd /home/alice/x\n```\nbye"
    start, end = content.index("```"), content.rindex("```") + 3
    message = Message(
        role="assistant",
        author="policy",
        content=content,
        action_spans=(CharSpan(start=start, end=end),),
        reasoning="from /home/alice",
        tool_calls=(ToolCall(name="bash", arguments='{"command": "cat /home/alice/x"}'),),
    )
    run = Run(
        trajectory_id="t", task_id="k", source_format="f", source_path="p", source_blake3="s", messages=(message,)
    )
    redacted, counts = redact(run)
    (moved,) = redacted.messages
    (span,) = moved.action_spans
    assert moved.content[span.start : span.end] == "```bash\ncd /home/user-1/x\n```"
    assert moved.reasoning == "from /home/user-1"
    assert moved.tool_calls[0].arguments == '{"command": "cat /home/user-1/x"}'
    assert counts == {"email": 1, "home_directory": 3}


@given(
    st.lists(
        st.sampled_from([*SECRETS, "plain", "/home/alice/x", "C:\\Users\\bob\\x", "a@b", "eve@corp.io"]), max_size=6
    )
)
def test_a_run_is_redacted_as_its_texts_are(texts: list[str]) -> None:
    messages = tuple(Message("user", "human", text) for text in texts)
    run = Run(trajectory_id="t", task_id="k", source_format="f", source_path="p", source_blake3="s", messages=messages)
    alone = Redactor()
    redacted, counts = redact(run)
    assert [message.content for message in redacted.messages] == [alone.text(text) for text in texts]
    assert counts == alone.counts
