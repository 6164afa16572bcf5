"""Secrets and personal data out of trajectories, before anything is written.

Token formats come from detect-secrets; added are tokens it does not know, values assigned to secret-like names, e-mail
addresses and the user's name in home directories. Hashes, SHAs, UUIDs and documentation examples are no secrets and
stay untouched: detect-secrets' entropy detectors are not used, since they cannot tell a hash from a key.

Each value gets one placeholder for the whole run, so that a path written in turn 3 is still the path read in turn 9.
Placeholders hold no quote and no backslash, so JSON stays JSON.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from threading import local

import hyperscan
from msgspec import msgpack
from msgspec.structs import replace

from tasks.escapes import offset, unescaped
from tasks.personal_data import dashed_users, short_home_users
from tasks.secret_rules import rules
from tasks.sources.base import digest
from tasks.sources.draft import CharSpan, Message, Run, ToolCall


class _Scratches(local):
    """What a scan needs to itself, once a thread."""

    _scratch: hyperscan.Scratch | None = None

    def own(self) -> hyperscan.Scratch:
        if self._scratch is None:
            self._scratch = hyperscan.Scratch(rules()[1])
        return self._scratch


_SCRATCHES = _Scratches()


@dataclass
class Redactor:
    """The placeholders of one run and what was replaced in it."""

    counts: Counter[str] = field(default_factory=Counter)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _dashed: dict[str, str] = field(default_factory=dict)
    """Users' names as coding agents write them in names of folders -> as they are."""
    _hints: tuple[str, ...] = ("",)
    """A text without any of these has nothing to replace."""

    def _triggered(self, text: bytes) -> list[int]:
        """Indices of the rules whose trigger matches, in order."""
        found: list[int] = []

        def note(index: int, *_: object) -> None:
            found.append(index)

        rules()[1].scan(text, match_event_handler=note, scratch=_SCRATCHES.own())
        return sorted(set(found))

    def _placeholder(self, kind: str, value: str) -> str:
        if kind == "home_directory":
            value = self._dashed.get(value, value)
        key = (kind, value.lower() if kind == "email" else value)
        if key not in self._names:
            self._numbers[kind] = number = self._numbers.get(kind, 0) + 1
            shapes = {"email": f"person-{number}@example.invalid", "home_directory": f"user-{number}"}
            self._names[key] = shapes.get(kind, f"[{kind}-{number}]")
        return self._names[key]

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """(start, end, placeholder) of what is to be replaced: in order, without overlap."""
        triggered = self._triggered(text.encode()) if any(hint in text for hint in self._hints) else []
        if not triggered:
            return []
        plain, ends, shifts = unescaped(text) if "\\" in text else (text, [], [0])
        if ends:
            triggered = sorted({*triggered, *self._triggered(plain.encode())})
        taken: list[tuple[int, int, str]] = []
        for index in triggered:
            rule = rules()[0][index]
            for start, end in rule.find(plain):
                end = self._home_end(plain, start, end) if rule.kind == "home_directory" else end
                at = bisect_left(taken, (start,))
                if (not at or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0]):
                    taken.insert(at, (start, end, rule.kind))
        self.counts.update(kind for _, _, kind in taken)
        return [
            (offset(start, ends, shifts), offset(end, ends, shifts), self._placeholder(kind, plain[start:end]))
            for start, end, kind in taken
        ]

    def _home_end(self, text: str, start: int, end: int) -> int:
        """Where the user's name ends in `-Users-jane-doe-project`, if the run names the home directory elsewhere."""
        ends = [start + len(name) for name in self._dashed if text.startswith(name, start)]
        return max([end, *[other for other in ends if text[other : other + 1] in ("", "-", "/")]])

    def text(self, text: str) -> str:
        """The text with placeholders."""
        return _replace(text, self.find(text))

    def message(self, message: Message) -> Message:
        """The message with placeholders in everything it says; action spans move along with the text."""
        found = self.find(message.content)
        if found:
            spans = tuple(
                CharSpan(_moved(span.start, found, end=False), _moved(span.end, found, end=True))
                for span in message.action_spans
            )
            message = replace(message, content=_replace(message.content, found), action_spans=spans)
        others = {name: self.text(value) for name in _MESSAGE_TEXTS if (value := getattr(message, name))}
        if others:
            message = replace(message, **others)
        if message.tool_calls:
            message = replace(message, tool_calls=tuple([self._call(call) for call in message.tool_calls]))
        return message

    def _call(self, call: ToolCall) -> ToolCall:
        call_id = self.text(call.call_id) if call.call_id else call.call_id
        return ToolCall(self.text(call.name), self.text(call.arguments), call_id)

    def _identity(self, value: str, users: set[str]) -> str:
        """A name that groups runs. A run's own placeholders would make equal tasks differ, and different ones equal, so
        it becomes a digest of itself if it holds anything to replace, or is a user's name: that of a home directory.
        """
        return f"redacted-{digest(value)[:16]}" if self.find(value) or value in users else value

    def _identities(self, run: Run) -> dict[str, str]:
        """Where the run comes from and what it belongs to. Looked at last: what the messages become must not depend on
        the folder the log lies in.
        """
        self._hints = ("",)
        path = self.find(run.source_path)
        users = {run.source_path[start:end] for start, end, _ in path}
        named = {name: self._identity(value, users) for name in _RUN_IDENTITIES if (value := getattr(run, name))}
        return {**named, "source_path": _replace(run.source_path, path)}

    def run(self, run: Run) -> Run:
        """The whole run with placeholders, the names it goes by included."""
        triggered = [rules()[0][index] for index in self._triggered(_all_text(run))]
        if triggered:
            if all(rule.hints for rule in triggered):  # most often addresses or home directories, in a few messages
                self._hints = tuple(hint for rule in triggered for hint in rule.hints)
            if any(rule.find is short_home_users for rule in triggered):
                self._dashed = dashed_users(_all_text(run).decode(errors="replace"))
            messages = tuple([self.message(message) for message in run.messages])
            others = {name: self.text(value) for name in _RUN_TEXTS if (value := getattr(run, name))}
            run = replace(run, messages=messages, **others)
        if self._triggered(_PACK([run.source_path, *[getattr(run, name) for name in _RUN_IDENTITIES]])):
            run = replace(run, **self._identities(run))
        return run


_MESSAGE_TEXTS = ("reasoning", "tool_call_id", "name")
_RUN_TEXTS = ("tools_json", "patch", "exit_status", "agent", "model")
_RUN_IDENTITIES = ("trajectory_id", "task_id", "repo", "run_id", "parent_id")


_PACK = msgpack.Encoder().encode


def _all_text(run: Run) -> bytes:
    """Everything that could hold a secret, so that a clean run is found to be clean in one pass. Texts stand in it
    whole and unescaped, as triggers need them; what stands between them may set off a trigger for nothing.
    """
    messages = run.messages
    calls = [call for message in messages for call in message.tool_calls]
    spoken = [message.content for message in messages], [message.reasoning for message in messages]
    named = [message.name for message in messages], [message.tool_call_id for message in messages]
    called = [call.arguments for call in calls], [call.name for call in calls], [call.call_id for call in calls]
    return _PACK([*spoken, *named, *called, [getattr(run, name) for name in _RUN_TEXTS]])


def _replace(text: str, found: list[tuple[int, int, str]]) -> str:
    parts, last = [], 0
    for start, end, placeholder in found:
        parts += [text[last:start], placeholder]
        last = end
    return "".join(parts) + text[last:] if found else text


def _moved(position: int, found: list[tuple[int, int, str]], *, end: bool) -> int:
    """Where a character offset lies after the replacements; inside a replaced value: at its outer edge."""
    shift = 0
    for start, stop, placeholder in found:
        if stop <= position:
            shift += len(placeholder) - (stop - start)
        elif start < position:
            return start + shift + (len(placeholder) if end else 0)
        else:
            break
    return position + shift


def redact(run: Run) -> tuple[Run, Counter[str]]:
    """(the run without secrets and personal data, number of replacements by kind)."""
    redactor = Redactor()
    return redactor.run(run), redactor.counts
