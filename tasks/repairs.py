"""Which later action repaired a failed one, and could have been taken in its place.

A fix is put where the failed turn stood, so nothing that it needs may have come into being in between: it is the next
thing that the agent did, but for turns that only look.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Final, NamedTuple

from schemas.trajectory import Message, ToolCall
from tasks.scoring import failed_turns

REPAIR_WINDOW_TURNS: Final = 4
"""A fix comes within so many turns, or it is taken for something else."""

SAME_ACTION: Final = 0.6
"""Least similarity (difflib ratio) of what a failed action and its fix are about."""

_READERS: Final = (
    "cat",
    "diff",
    "egrep",
    "fgrep",
    "grep",
    "head",
    "nl",
    "rg",
    "sed",
    "sort",
    "tail",
    "uniq",
    "view",
    "wc",
)
_FINDERS: Final = ("apt-cache", "file", "find", "git", "ls", "pwd", "stat", "tree", "type", "which")
_LOOKING: Final = frozenset((*_READERS, *_FINDERS))
"""Programmes, and commands of editor tools, that change nothing (some only without the options below)."""

_LOOKING_GIT: Final = frozenset(("diff", "grep", "log", "ls-files", "show", "status"))
_CHANGING_OPTIONS: Final = {
    "find": ("-delete", "-fprint", "-ok"),
    "sed": ("-i", "--in-place"),
    "sort": ("-o", "--output"),
}
_WRAPPERS: Final = frozenset(("env", "nice", "nohup", "sudo", "time", "timeout", "xargs"))
_HARMLESS_TARGETS: Final = ("/dev/null", "1", "2")
_COMMAND_ARGUMENTS: Final = ("command", "cmd")
_OPERATORS: Final = "();<>|&\n"
_ASSIGNMENT: Final = re.compile(r"\w+=")
_FILE: Final = re.compile(r"[^\s/]*/[^\s]*|[\w.-]*[\w-]\.[A-Za-z]\w{0,5}")


class _Command(NamedTuple):
    programme: str  # without its folder and version: python3.11 is python
    words: tuple[str, ...]
    piped: bool  # reads the output of the command before it
    writes: bool  # into a file


class _Action(NamedTuple):
    tools: tuple[tuple[str, tuple[str, ...]], ...]  # name and argument names of each call
    folders: tuple[str, ...]  # where `cd` went
    commands: tuple[_Command, ...]
    values: tuple[str, ...]  # words of the arguments that are no command


def find_repairs(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """(failed turn, fixing turn) of a run.

    The fix is the next action, turns that only look left aside. It worked, and it is the same command with other
    arguments: same tools, same programmes, about nearly the same (`_alike`), and every file that it names and the
    failed one does not was known before. After a turn without any call that failed (a format error) the next call is
    the fix if it worked.
    """
    failed = failed_turns(messages)
    worked = {
        turn
        for turn, following in _observations(messages)
        if following and all(message.failed is False for message in following)
    }
    turns = [index for index, message in enumerate(messages) if message.trainable]
    for number, turn in enumerate(turns):
        if turn not in failed:
            continue
        for later in turns[number + 1 : number + 1 + REPAIR_WINDOW_TURNS]:
            if later in worked and _repairs(messages, turn, later):
                yield turn, later
                break
            if not _only_looks(messages[later]):
                break


def _observations(messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
    """Each assistant message with the observations before the next one."""
    turn, following = None, []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            if turn is not None:
                yield turn, following
            turn, following = index, []
        elif message.author == "environment":
            following.append(message)
    if turn is not None:
        yield turn, following


def _repairs(messages: Sequence[Message], turn: int, later: int) -> bool:
    if not _acts(messages[turn]):
        return _acts(messages[later])
    failed, fix = _action(messages[turn]), _action(messages[later])
    if _as_written(messages[turn]) == _as_written(messages[later]):
        return False
    if failed is None or fix is None or failed.tools != fix.tools:
        return False
    if _programmes(failed) != _programmes(fix) or (failed.folders and failed.folders != fix.folders):
        return False  # a `cd` of the failed turn may have moved the shell for good
    return _alike(_subject(failed), _subject(fix)) and _known_files(messages, turn, later, failed, fix)


def _as_written(message: Message) -> list[str]:
    fences = [message.content[span.start : span.end].strip() for span in message.action_spans]
    return [*fences, *(call.arguments for call in message.tool_calls)]


def _acts(message: Message) -> bool:
    return bool(message.tool_calls or message.action_spans)


def _only_looks(message: Message) -> bool:
    if not _acts(message):
        return True
    action = _action(message)
    return action is not None and bool(action.commands) and not action.folders and all(map(_looks, action.commands))


def _looks(command: _Command) -> bool:
    options = _CHANGING_OPTIONS.get(command.programme, ())
    if (
        command.programme not in _LOOKING
        or command.writes
        or any(word.startswith(options) for word in command.words if options)
    ):
        return False
    if command.programme == "git":
        return bool(command.words) and command.words[0] in _LOOKING_GIT
    run_by_find = [b for a, b in zip(command.words, command.words[1:], strict=False) if a in ("-exec", "-execdir")]
    return all(programme in _LOOKING for programme in run_by_find)


def _action(message: Message) -> _Action | None:
    """What a turn does; None where that cannot be read (no JSON object, an unclosed quote, a heredoc)."""
    if message.tool_calls:
        return _joined([_of_call(call) for call in message.tool_calls])
    return _joined([_of_fence(fence) for fence in _as_written(message)])


def _joined(parts: Sequence[_Action | None]) -> _Action | None:
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    tools, folders, commands, values = (
        tuple(item for part in column for item in part) for column in zip(*known, strict=True)
    )
    return _Action(tools, folders, commands, values)


def _of_fence(fence: str) -> _Action | None:
    lines = fence.split("\n")
    if len(lines) < 3 or not lines[0].startswith("```") or lines[-1] != "```":
        return None
    return _of_shell("fence", (lines[0],), "\n".join(lines[1:-1]), ())


def _of_call(call: ToolCall) -> _Action | None:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    keys, line, values = tuple(sorted(arguments)), "", []
    for key in keys:
        if key in _COMMAND_ARGUMENTS:
            line = _command_line(arguments[key])
        else:
            values += str(arguments[key]).split()
    return _of_shell(call.name, keys, line, tuple(values))


def _command_line(value: object) -> str:
    """A command as a line of shell; `["bash", "-lc", line]` is that line."""
    if not isinstance(value, list):
        return str(value)
    words = [str(word) for word in value]
    return words[2] if len(words) == 3 and words[1] in ("-c", "-lc") else shlex.join(words)


def _of_shell(tool: str, keys: tuple[str, ...], line: str, values: tuple[str, ...]) -> _Action | None:
    lexer = shlex.shlex(line.strip().replace("\\\n", " "), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        return None
    if any("<<" in token for token in tokens if _is_operator(token)):
        return None
    folders, commands, piped = [], [], False
    for split, group in groupby(tokens, _splits):
        if split:
            piped = list(group)[-1] == "|"
        elif command := _command(list(group), piped):
            if command.programme == "cd":
                folders.extend(command.words)
            else:
                commands.append(command)
    return _Action(((tool, keys),), tuple(folders), tuple(commands), values)


def _is_operator(token: str) -> bool:
    return bool(token) and set(token) <= set(_OPERATORS)


def _splits(token: str) -> bool:
    return _is_operator(token) and not set(token) & set("<>")


def _command(tokens: Sequence[str], piped: bool) -> _Command | None:
    """A simple command without assignments, wrappers (`timeout 60`, `sudo`) and redirections."""
    words, writes, target_next = [], any("`" in token or "$(" in token for token in tokens), ""
    for token in tokens:
        if target_next:
            writes |= ">" in target_next and token not in _HARMLESS_TARGETS
            target_next = ""
        elif _is_operator(token):
            if words and words[-1] in ("1", "2"):
                words.pop()  # the number of the stream that is redirected
            target_next = token
        else:
            words.append(token)
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS):
        wrapped = words.pop(0) in _WRAPPERS
        while wrapped and words and (words[0].startswith("-") or words[0][0].isdigit()):
            words.pop(0)
    if not words:
        return None
    return _Command(re.sub(r"(?<=[a-z])[\d.]+$", "", words[0].rsplit("/", 1)[-1]), tuple(words[1:]), piped, writes)


def _programmes(action: _Action) -> list[str]:
    """Those that do something: not what a pipe passes through on its way to the reader."""
    return [command.programme for command in action.commands if not (command.piped and _looks(command))]


def _words(action: _Action) -> list[str]:
    own = (word for command in action.commands if not (command.piped and _looks(command)) for word in command.words)
    return [*own, *action.values]


def _subject(action: _Action) -> list[str]:
    return [word for word in _words(action) if not word.startswith("-")]


def _alike(failed: Sequence[str], fix: Sequence[str]) -> bool:
    """Files that both name are left out, of others the folders: a long path in common says nothing of likeness."""
    shared = {word for word in failed if _FILE.fullmatch(word)} & set(fix)
    a, b = (" ".join(_base(word) for word in words if word not in shared) for words in (failed, fix))
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.quick_ratio() >= SAME_ACTION and matcher.ratio() >= SAME_ACTION


def _base(word: str) -> str:
    return word.rstrip("/").rsplit("/", 1)[-1] if _FILE.fullmatch(word) else word


def _known_files(messages: Sequence[Message], turn: int, later: int, failed: _Action, fix: _Action) -> bool:
    """Whether each file that only the fix names was named before the failed turn, or seen after it."""
    new = {_base(word) for word in _words(fix) if _FILE.fullmatch(word)} - {_base(word) for word in _words(failed)}
    if not new:
        return True
    before = messages[:turn]
    seen = [message.content for message in (*before, *(m for m in messages[turn:later] if m.author == "environment"))]
    seen += [call.arguments for message in before for call in message.tool_calls]
    return all(any(name in text for text in seen) for name in new)
