"""aider chat history: Markdown. `# aider chat started at` opens a session, `#### ` is the user, `> ` the program.

Fenced blocks are the assistant's whatever their lines begin with, until the user breaks in. One file holds many
sessions. The token and cost lines are shown to the user only and are left out.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.base import build, spans
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.enclosed import Enclosed

NAME = "aider"

_SESSION = re.compile(r"^# aider chat started at .*$", re.MULTILINE)
_EDIT = Enclosed(
    re.compile(r"^(?:[^\n`]+\n)?(`{3,}+)[^\n]*+\n<<<<<<< SEARCH\n", re.MULTILINE),
    r"\n>>>>>>> REPLACE[^\n]*+\n{}",
)
_MODEL = re.compile(r"^> (?:Main model|Model): (\S+)", re.MULTILINE)
_CLEARING = ("/clear", "/reset")
_COST = ("> Tokens: ", "Cost: $", "> Cost: $")


def detect(document: Document) -> bool:
    return document.kind == "text" and _SESSION.match(document.value) is not None


def _interrupts(line: str, *, closed: bool) -> bool:
    """Whether the user breaks off an answer inside a fence: by ^C, or with words, behind which aider writes two spaces.
    In a fence that is closed further down, other headings are the assistant's.
    """
    return line.startswith("> ^C") or (line.startswith("#### ") and (not closed or line.endswith("  ")))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(speaker, line) with speaker user, program or assistant; blank lines go to whoever speaks."""
    fence = ""
    speaker = "program"
    lines = text.split("\n")
    last_of = {line.rstrip(): number for number, line in enumerate(lines) if line.startswith("```")}
    for number, line in enumerate(lines):
        mark = re.match(r"`{3,}", line)
        if fence and _interrupts(line, closed=last_of.get(fence, -1) > number):
            fence = ""
        if fence:
            fence = "" if mark and line.rstrip() == fence else fence
            yield "assistant", line
            continue
        if line.startswith("#### "):
            speaker, line = "user", line[5:].rstrip()
        elif line.startswith(_COST):
            continue
        elif line.startswith(">"):
            speaker, line = "program", line[1:].removeprefix(" ").rstrip()
        elif line.strip():
            speaker = "assistant"
            fence = mark.group() if mark else ""
        yield speaker, line


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    current: tuple[str, list[str]] = ("program", [])
    for speaker, line in _lines(text):
        if speaker != current[0]:
            yield current[0], "\n".join(current[1]).strip("\n")
            current = (speaker, [])
        current[1].append(line)
    yield current[0], "\n".join(current[1]).strip("\n")


def _messages(text: str) -> list[list[Message]]:
    """The conversations of one session: `/clear` and `/reset` empty the model's context, so a new one begins."""
    conversations: list[list[Message]] = [[]]
    for speaker, block in _blocks(text):
        if not block:
            continue
        messages = conversations[-1]
        if speaker == "assistant":
            marked = spans(block, _EDIT)
            messages.append(Message(role="assistant", author="policy", content=block, action_spans=marked))
            continue
        if speaker == "user" and block.split("\n", 1)[0] in _CLEARING:
            conversations.append([])
            messages = conversations[-1]
        started = any(message.role == "assistant" for message in messages)
        author: Author = "human" if speaker == "user" else "environment" if started else "harness"
        messages.append(Message(role="user", author=author, content=block))
    return [messages for messages in conversations if any(message.role == "assistant" for message in messages)]


def read(document: Document) -> list[Run]:
    if document.kind != "text":
        raise SourceError("aider: not a Markdown chat history")
    starts = [match.start() for match in _SESSION.finditer(document.value)]
    runs = []
    for start, end in pairwise([*starts, len(document.value)]):
        session = document.value[start:end]
        heading, _, body = session.partition("\n")
        found = _MODEL.search(session)
        model = found.group(1) if found else None
        opened = heading.removeprefix("# aider chat started at ").strip()
        runs += [
            build(document, NAME, messages, run_id=opened, agent=NAME, model=model) for messages in _messages(body)
        ]
    if not runs:
        raise SourceError("aider: no session with an answer in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read)
