"""Text of a model in a loop: an opener a hundred thousand times costs no more than any other text of its length."""

import json
from collections.abc import Callable
from time import perf_counter

import pytest

from tasks.sources import parse, read_document
from tasks.sources.base import issue_text, spans
from tasks.sources.enclosed import Enclosed
from tasks.sources.instances import instance_task
from tasks.sources.text_calls import COMMAND_TAG, EXECUTE_TAG, FENCE, XML_CALL, exit_code_failed

N_CHARS, LIMIT_S = 200_000, 2.0
"""What is linear takes some milliseconds; what was not took minutes."""

LOOPS = (
    "<pr_description>x",
    "ISSUE:\nx ",
    "\n",
    " ",
    "`",
    "```\n",
    "```bash\n",
    "```x\n",
    "<execute>",
    "<execute><solution></solution>",
    "<command>",
    "<function=",
    "<function=a>",
    "<exception>",
    "<exception></exception> ",
    "<returncode>1",
    "<finish>",
    "</finish>",
    "a.py\n```\n<<<<<<< SEARCH\nx\n=======\n",
    "````\n<<<<<<< SEARCH\nx\n>>>>>>> REPLACE\n",
    "#### x\n",
    "[Command finished with exit code ",
)


def rows(text: str) -> dict[str, object]:
    """A log of each format whose readers look for marks in text."""
    turns = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
    return {
        "openai-chat": {"messages": turns},
        "mini-swe-agent": {"trajectory_format": "mini-swe-agent-1", "info": {}, "messages": turns},
        "sharegpt": {"conversations": turns},
        "swe-smith": {"instance_id": "o__r-1", "traj_id": "x", "resolved": True, "messages": json.dumps(turns)},
        "nebius": {
            "target": True,
            "trajectory": [{"role": role, "text": text, "mask": True} for role in ("user", "ai", "user")],
        },
        "adp": {
            "content": [
                {"class_": "text_observation", "content": text, "source": "user"},
                {"class_": "message_action", "content": text},
            ]
        },
    }


def seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


@pytest.mark.parametrize("loop", LOOPS, ids=repr)
def test_no_reader_takes_more_time_than_the_text_is_long(loop: str) -> None:
    text = loop * (N_CHARS // len(loop))
    for source_format, row in rows(text).items():
        data = json.dumps(row).encode()
        assert seconds(lambda data=data, name=source_format: parse(data, "x.json", name)) < LIMIT_S, source_format
    session = f"# aider chat started at 2024-08-22\n\n#### hi\n\nSure:\n{text}".encode()
    assert seconds(lambda: parse(session, "x.md", "aider")) < LIMIT_S, "aider"
    assert seconds(lambda: issue_text(f"{text}INSTRUCTIONS:")) < LIMIT_S
    assert seconds(lambda: exit_code_failed(text)) < LIMIT_S


def test_blank_lines_before_something_else_than_yaml() -> None:
    text = "# x\n" + "\n" * N_CHARS + "!"
    assert seconds(lambda: read_document(text.encode())) < LIMIT_S


@pytest.mark.parametrize("loop", ["a__b", "_", ".01234567.x", "-1_1"])
def test_a_name_without_end_is_no_trap(loop: str) -> None:
    assert seconds(lambda: instance_task(loop * (N_CHARS // len(loop)))) < LIMIT_S


@pytest.mark.parametrize(
    ("marks", "text", "marked"),
    [
        (COMMAND_TAG, "<command><command>a</command></command>", ["<command><command>a</command>"]),
        (EXECUTE_TAG, "<execute>a</solution><solution>b</solution>", ["<solution>b</solution>"]),
        (EXECUTE_TAG, "<execute>a</solution></execute>", ["<execute>a</solution></execute>"]),
        (FENCE, "```py\na\n```x\nb\n``` \n```\nc", ["```py\na\n```x\nb\n``` "]),
        (XML_CALL, "<function=a>x</function><function=b>cut", ["<function=a>x</function>", "<function=b>cut"]),
    ],
)
def test_what_is_marked(marks: Enclosed, text: str, marked: list[str]) -> None:
    found = spans(text, marks)
    assert [text[span.start : span.end] for span in found] == marked


@pytest.mark.parametrize(
    ("prompt", "issue"),
    [
        ("Solve <pr_description>\nit fails\n</pr_description> now", "it fails"),
        ("ISSUE:\nit\n\nfails\n\n\nINSTRUCTIONS:\ngo", "it\n\nfails"),
        ("ISSUE:\nwithout an end", None),
        ("<pr_description></pr_description>", None),
    ],
)
def test_the_issue_of_a_prompt(prompt: str, issue: str | None) -> None:
    assert issue_text(prompt) == issue
