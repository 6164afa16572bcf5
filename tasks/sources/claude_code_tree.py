"""The tree of one Claude Code session: turns with their results, and user messages, by their parents."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from schemas.trajectory import Author
from tasks.sources.anthropic_messages import result_message
from tasks.sources.base import as_dict, dicts, get, string, text_of
from tasks.sources.chat import assistant_blocks
from tasks.sources.document import SourceError
from tasks.sources.draft import Message

_HARNESS_TEXT = re.compile(
    r"\s*(?:<(?:command-|local-command|system-reminder>|bash-|[\w-]+-hook>)|Caveat: |\[Request interrupted"
    r"|\w+ hook feedback:)"
)
_SUMMARY = "This session is being continued from a previous conversation"
_NOTIFICATION = "<task-notification>"


@dataclass
class Unit:
    """One turn with its results, or one user message: a node of the conversation's tree."""

    key: str
    line: int
    group: str
    parent: str | None
    blocks: list[Any] = field(default_factory=list)
    message: Message | None = None
    results: dict[str, Message] = field(default_factory=dict)
    """By line and call, so that a line that was written twice adds none."""
    synthetic: bool = False
    is_continuation: bool = False

    def messages(self) -> list[Message]:
        if self.message is not None:
            return [self.message]
        turn = assistant_blocks(self.blocks)
        return [replace(turn, author="invented") if self.synthetic else turn, *self.results.values()]


def in_parent_order(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines as they stand, but none before the line that it names as its parent; those in a cycle stand last."""
    records = list(records)
    unplaced = {string(record.get("uuid")) for record in records}
    waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ordered: list[dict[str, Any]] = []
    for record in records:
        parent = string(record.get("parentUuid"))
        if parent is not None and parent in unplaced and parent != string(record.get("uuid")):
            waiting[parent].append(record)
            continue
        ready = [record]
        while ready:
            ordered.append(ready.pop())
            uuid = string(ordered[-1].get("uuid"))
            unplaced.discard(uuid)
            ready += reversed(waiting.pop(uuid or "", []))
    if waiting:
        placed = set(map(id, ordered))
        ordered += [record for record in records if id(record) not in placed]
    return ordered


def _add_blocks(blocks: list[Any], added: list[Any], *, repeated: bool) -> None:
    """Lines of one response can repeat a block, a partial one before the whole: the whole one stays, once. Blocks of
    one line are no repeats of each other. `repeated`: the line itself stood before.
    """
    earlier = range(len(blocks))
    for block in added:
        at = next((index for index in earlier if _repeats(block, blocks[index], repeated)), None)
        if at is None:
            blocks.append(block)
        else:
            blocks[at] = block


def _repeats(block: Any, earlier: Any, repeated: bool) -> bool:
    if repeated and earlier == block:
        return True
    if not isinstance(earlier, dict) or not isinstance(block, dict) or earlier.get("type") != block.get("type"):
        return False
    if block.get("type") == "tool_use" and block.get("id") is not None and earlier.get("id") == block["id"]:
        return True
    for key in ("text", "thinking"):
        old, new = earlier.get(key), block.get(key)
        if isinstance(old, str) and isinstance(new, str) and old and new.startswith(old):
            return True
    return False


def _is_blocks(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(block, str) or (isinstance(block, dict) and "type" in block and "role" not in block)
        for block in value
    )


def said(record: dict[str, Any]) -> dict[str, Any] | None:
    """The message of a user's or the model's line, as an object with `content`; None for other lines. What the user
    typed while the model worked is an attachment.

    Raises:
        SourceError: the line holds no message that can be read.
    """
    attachment = record.get("attachment")
    if record.get("type") == "attachment" and get(attachment, "type") == "queued_command":
        return {"content": get(attachment, "prompt")}
    if "type" not in record:
        raise SourceError("a line without type")
    if record.get("type") not in ("user", "assistant"):
        return None
    raw = record.get("message")
    if isinstance(raw, str) or _is_blocks(raw):
        return {"content": raw}
    if "content" not in as_dict(raw, "message"):
        raise SourceError("message: an object without content")
    return raw


def _author(record: dict[str, Any], text: str) -> Author:
    if record.get("isCompactSummary") or text.startswith(_SUMMARY):
        return "copied_context"
    if text.startswith(_NOTIFICATION):
        return "environment"
    if record.get("isMeta") or record.get("isSidechain") or _HARNESS_TEXT.match(text):
        return "harness"
    return "human"


class Session:
    """The tree of one file, built line by line."""

    def __init__(self) -> None:
        self.units: dict[str, Unit] = {}
        self.unit_of_line: dict[str, str | None] = {}
        self.unit_of_call: dict[str, str] = {}
        self.last_of_group: dict[str, str] = {}
        self.group_of_line: dict[str, str] = {}
        self.boundaries: set[str] = set()
        """Lines where the history was compacted, and lines without a message that follow them."""

    def _group(self, record: dict[str, Any]) -> str:
        """Main conversation, or one subagent: by agent id, in old files by the sidechain's first line."""
        if not record.get("isSidechain"):
            return "main"
        agent = string(record.get("agentId"))
        if agent:
            return agent
        parent = string(record.get("parentUuid"))
        if parent is None:
            return f"sidechain-{record.get('uuid')}"
        known = self.group_of_line.get(parent)
        if known is not None and known != "main":
            return known
        sidechains = [group for group in self.last_of_group if group != "main"]
        return sidechains[-1] if sidechains else f"sidechain-{record.get('uuid')}"

    def _parent(self, record: dict[str, Any], group: str) -> str | None:
        parent = string(record.get("parentUuid"))
        if parent is None and record.get("uuid") is None:
            return self.last_of_group.get(group)  # no line can be named in this file: each follows the one before
        if parent is None or record.get("isCompactSummary") or record.get("subtype") == "compact_boundary":
            return None
        if parent in self.unit_of_line:
            return self.unit_of_line[parent]
        return self.last_of_group.get(group)  # the line it names is not in the file: it follows the one before

    def _continues(self, record: dict[str, Any]) -> bool:
        """Whether the line begins, or stands at the beginning of, what follows a compaction."""
        marked = record.get("isCompactSummary") or record.get("logicalParentUuid")
        return bool(marked) or string(record.get("parentUuid")) in self.boundaries

    def _open(self, key: str, line: int, group: str, parent: str | None) -> Unit:
        unit = Unit(key, line, group, parent)
        self.units[key] = unit
        self.last_of_group[group] = key
        return unit

    def add(self, line: int, record: dict[str, Any]) -> None:
        raw = said(record)
        uuid = string(record.get("uuid")) or (None if raw is None else f"line-{line}")
        if uuid is None:
            return
        group = self._group(record)
        self.group_of_line[uuid] = group
        parent = self._parent(record, group)
        if raw is None:
            self.unit_of_line[uuid] = parent  # bookkeeping lines only pass the thread on
            if record.get("subtype") == "compact_boundary" or self._continues(record):
                self.boundaries.add(uuid)
        elif record.get("type") == "assistant":
            self.unit_of_line[uuid] = self._add_turn(line, record, raw, group, parent, uuid)
        else:
            self.unit_of_line[uuid] = self._add_user(line, record, raw["content"], group, parent, uuid)
        if raw is not None and string(record.get("uuid")) is None:
            self._insert(string(record.get("parentUuid")), self.unit_of_line[uuid])

    def _insert(self, after: str | None, key: str | None) -> None:
        """No line can name a unit whose line has no id: what follows it names the line before."""
        before = self.unit_of_line.get(after or "")
        if key is not None and before is not None and self.units[key].parent == before:
            self.unit_of_line[after or ""] = key

    def _add_turn(
        self, line: int, record: dict[str, Any], raw: dict[str, Any], group: str, parent: str | None, uuid: str
    ) -> str:
        key = f"{group}/{string(raw.get('id')) or uuid}"
        unit = self.units.get(key) or self._open(key, line, group, parent)
        unit.is_continuation = unit.is_continuation or self._continues(record)
        content = raw["content"]
        if not isinstance(content, list):
            content = [content if isinstance(content, dict) else {"type": "text", "text": text_of(content)}]
        _add_blocks(unit.blocks, content, repeated=uuid in self.unit_of_line)
        for block in content:
            call_id = string(get(block, "id"))
            if call_id is not None:
                self.unit_of_call[call_id] = key
        unit.synthetic = unit.synthetic or raw.get("model") == "<synthetic>" or bool(record.get("isApiErrorMessage"))
        return key

    def _add_user(
        self, line: int, record: dict[str, Any], content: Any, group: str, parent: str | None, uuid: str
    ) -> str | None:
        content = [content] if isinstance(content, dict) else content
        results = [block for block in dicts(content) if block.get("type") == "tool_result"]
        position = parent
        for block in results:
            key = f"{uuid}/{block.get('tool_use_id')}"
            result = result_message(block)
            owner = self.unit_of_call.get(string(block.get("tool_use_id")) or "")
            if owner is not None:
                known = self.units[owner].results
                if key in known or result not in known.values():
                    known[key] = result
                position = owner
            else:  # a result whose call is not in the file stays as context
                unit = self.units.get(key) or self._open(key, line, group, position)
                unit.message = result
                position = unit.key
        rest = content
        if isinstance(content, list):
            rest = [block for block in content if get(block, "type") != "tool_result"]
        text = text_of(rest)
        if not text and results:
            return position
        unit = self.units.get(uuid) or self._open(uuid, line, group, position)
        unit.message = Message(role="user", author=_author(record, text), content=text)
        unit.is_continuation = self._continues(record)
        return unit.key

    def path_to(self, leaf: str) -> list[Unit]:
        """Units from the root to `leaf`; a cycle in the parent links ends the walk."""
        path: list[Unit] = []
        seen: set[str] = set()
        key: str | None = leaf
        while key is not None and key not in seen:
            seen.add(key)
            unit = self.units[key]
            path.append(unit)
            key = unit.parent
        return path[::-1]

    def leaves(self, group: str) -> list[str]:
        members = [unit for unit in self.units.values() if unit.group == group]
        parents = {unit.parent for unit in members}
        found = [unit.key for unit in members if unit.key not in parents]
        return found or [members[-1].key]  # every unit has a child: the links are a cycle
