"""Claude Code sessions: JSON Lines, one line per content block, ordered by `parentUuid`.

Lines of one response share `message.id` and are merged; results belong to the turn that made the call, whatever line
they hang on, so parallel calls are no forks. Real forks (edits, retries) become trajectories of their own, whose shared
opening is copied context. Where the history was compacted, a run ends and its continuation begins: the model saw the
summary from there on, and nothing before it. Subagents (inline or in files of their own) name the session's main
trajectory as parent.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from schemas.trajectory import Author
from tasks.sources.adapter import Adapter
from tasks.sources.anthropic_messages import result_message
from tasks.sources.base import build, dicts, digest, get, string, text_of
from tasks.sources.chat import assistant_blocks
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "claude-code"

_HARNESS_MARKS = ("<command-", "<local-command", "<system-reminder>", "<bash-", "Caveat: ", "[Request interrupted")


@dataclass
class _Unit:
    """One turn with its results, or one user message: a node of the conversation's tree."""

    key: str
    line: int
    group: str
    parent: str | None
    blocks: list[Any] = field(default_factory=list)
    message: Message | None = None
    results: list[Message] = field(default_factory=list)
    synthetic: bool = False
    is_continuation: bool = False

    def messages(self) -> list[Message]:
        if self.message is not None:
            return [self.message]
        turn = assistant_blocks(self.blocks)
        return [replace(turn, author="invented") if self.synthetic else turn, *self.results]


def detect(document: Document) -> bool:
    if document.kind not in ("json", "jsonl"):
        return False
    for record in dicts(document.records[:64]):
        if record.get("type") in ("user", "assistant") and "uuid" in record and isinstance(record.get("message"), dict):
            return True
    return False


def _add_block(blocks: list[Any], block: Any) -> None:
    """Lines of one response can repeat a block, a partial one before the whole: the whole one stays, once."""
    for index, earlier in enumerate(blocks):
        if not isinstance(earlier, dict) or not isinstance(block, dict) or earlier.get("type") != block.get("type"):
            continue
        if block.get("type") == "tool_use" and earlier.get("id") == block.get("id"):
            blocks[index] = block
            return
        for key in ("text", "thinking"):
            old, new = earlier.get(key), block.get(key)
            if isinstance(old, str) and isinstance(new, str) and old and new.startswith(old):
                blocks[index] = block
                return
    blocks.append(block)


def _author(record: dict[str, Any], text: str) -> Author:
    if record.get("isCompactSummary"):
        return "copied_context"
    if record.get("isMeta") or record.get("isSidechain") or text.startswith(_HARNESS_MARKS):
        return "harness"
    return "human"


class _Session:
    """The tree of one file, built line by line."""

    def __init__(self) -> None:
        self.units: dict[str, _Unit] = {}
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
        if parent is None or record.get("isCompactSummary") or record.get("subtype") == "compact_boundary":
            return None
        if parent in self.unit_of_line:
            return self.unit_of_line[parent]
        return self.last_of_group.get(group)  # the line it names is not in the file: it follows the one before

    def _continues(self, record: dict[str, Any]) -> bool:
        """Whether the line begins, or stands at the beginning of, what follows a compaction."""
        marked = record.get("isCompactSummary") or record.get("logicalParentUuid")
        return bool(marked) or string(record.get("parentUuid")) in self.boundaries

    def _open(self, key: str, line: int, group: str, parent: str | None) -> _Unit:
        unit = _Unit(key, line, group, parent)
        self.units[key] = unit
        self.last_of_group[group] = key
        return unit

    def add(self, line: int, record: dict[str, Any]) -> None:
        uuid = string(record.get("uuid"))
        if uuid is None:
            return
        group = self._group(record)
        self.group_of_line[uuid] = group
        parent = self._parent(record, group)
        raw = record.get("message")
        if record.get("type") == "assistant" and isinstance(raw, dict):
            self.unit_of_line[uuid] = self._add_turn(line, record, raw, group, parent, uuid)
        elif record.get("type") == "user" and isinstance(raw, dict):
            self.unit_of_line[uuid] = self._add_user(line, record, raw, group, parent, uuid)
        else:
            self.unit_of_line[uuid] = parent  # bookkeeping lines only pass the thread on
            if record.get("subtype") == "compact_boundary" or self._continues(record):
                self.boundaries.add(uuid)

    def _add_turn(
        self, line: int, record: dict[str, Any], raw: dict[str, Any], group: str, parent: str | None, uuid: str
    ) -> str:
        key = f"{group}/{string(raw.get('id')) or uuid}"
        unit = self.units.get(key) or self._open(key, line, group, parent)
        unit.is_continuation = unit.is_continuation or self._continues(record)
        content = raw.get("content")
        for block in content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]:
            _add_block(unit.blocks, block)
            call_id = string(get(block, "id"))
            if call_id is not None:
                self.unit_of_call[call_id] = key
        unit.synthetic = unit.synthetic or raw.get("model") == "<synthetic>" or bool(record.get("isApiErrorMessage"))
        return key

    def _add_user(
        self, line: int, record: dict[str, Any], raw: dict[str, Any], group: str, parent: str | None, uuid: str
    ) -> str | None:
        content = raw.get("content")
        blocks = dicts(content)
        results = [block for block in blocks if block.get("type") == "tool_result"]
        position = parent
        for block in results:
            owner = self.unit_of_call.get(string(block.get("tool_use_id")) or "")
            if owner is not None:
                self.units[owner].results.append(result_message(block))
                position = owner
            else:  # a result whose call is not in the file stays as context
                unit = self._open(f"{uuid}/{block.get('tool_use_id')}", line, group, position)
                unit.message = result_message(block)
                position = unit.key
        rest = content
        if isinstance(content, list):
            rest = [block for block in content if get(block, "type") != "tool_result"]
        text = text_of(rest)
        if not text and results:
            return position
        unit = self._open(uuid, line, group, position)
        unit.message = Message(role="user", author=_author(record, text), content=text)
        unit.is_continuation = self._continues(record)
        return unit.key

    def path_to(self, leaf: str) -> list[_Unit]:
        """Units from the root to `leaf`; a cycle in the parent links ends the walk."""
        path: list[_Unit] = []
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


def _copied(messages: Iterable[Message]) -> list[Message]:
    return [
        replace(message, author="copied_context") if message.role == "assistant" else message for message in messages
    ]


def _segments(session: _Session, group: str) -> list[list[list[_Unit]]]:
    """The group's conversations as paths of units, the newest first, apart for each stretch between compactions."""
    paths = [session.path_to(leaf) for leaf in session.leaves(group)]
    paths.sort(key=lambda path: path[-1].line, reverse=True)
    segments: dict[str | None, list[list[_Unit]]] = defaultdict(list)
    for path in paths:
        segments[path[0].key if path[0].is_continuation else None].append(path)
    return sorted(segments.values(), key=lambda segment: min(path[0].line for path in segment))


def _read_group(document: Document, session: _Session, group: str, session_id: str, model: str | None) -> list[Run]:
    main_id = digest(NAME, session_id, "main")
    own_id = main_id if group == "main" else digest(NAME, session_id, group)
    runs: list[Run] = []
    previous_id = None
    for segment in _segments(session, group):
        goes_on = segment[0][0].is_continuation
        segment_id = digest(own_id, segment[0][0].key) if runs else own_id
        if group != "main" and not runs:
            parent = (main_id, "subagent")
        else:  # a file that begins with a summary goes on from another one
            parent = (previous_id, "continuation" if goes_on else "fork" if runs else None)
        covered: set[str] = set()
        for number, path in enumerate(segment):
            messages: list[Message] = []
            for unit in path:
                messages += _copied(unit.messages()) if unit.key in covered else unit.messages()
            covered.update(unit.key for unit in path)
            parent_id, link = (segment_id, "fork") if number else parent
            fields = {"task_id": runs[0].task_id, "repo": runs[0].repo} if goes_on and runs else {}
            runs.append(
                build(
                    document,
                    NAME,
                    messages,
                    trajectory_id=digest(own_id, path[-1].key) if number else segment_id,
                    run_id=session_id,
                    agent=NAME,
                    model=model,
                    parent_id=parent_id,
                    parent_link=link,
                    **fields,
                )
            )
        previous_id = segment_id
    return runs


def read(document: Document) -> list[Run]:
    sessions: dict[str, _Session] = defaultdict(_Session)
    models: dict[str, str] = {}
    for line, record in enumerate(dicts(document.records)):
        session_id = string(record.get("sessionId")) or ""
        sessions[session_id].add(line, record)
        model = string(get(record, "message", "model"))
        if model and model != "<synthetic>":
            models.setdefault(session_id, model)
    runs = []
    for session_id, session in sessions.items():
        for group in dict.fromkeys(unit.group for unit in session.units.values()):
            runs += _read_group(document, session, group, session_id or document.blake3, models.get(session_id))
    if not runs:
        raise SourceError("claude-code: no message in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read)
