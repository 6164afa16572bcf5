"""Claude Code sessions: JSON Lines, one line per content block, ordered by `parentUuid`.

Lines of one response share `message.id` and are merged; results belong to the turn that made the call, whatever line
they hang on, so parallel calls are no forks. Real forks (edits, retries) become trajectories of their own, whose shared
opening is copied context. Where the history was compacted, a run ends and its continuation begins: the model saw the
summary from there on, and nothing before it. Subagents (inline or in files of their own) name the session's main
trajectory as parent.
"""

from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import build, dicts, digest, get, string
from tasks.sources.claude_code_tree import Session, Unit, in_parent_order, said
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run

NAME = "claude-code"


def detect(document: Document) -> bool:
    if document.kind not in ("json", "jsonl"):
        return False
    for record in dicts(document.records[:64]):
        if record.get("type") in ("user", "assistant") and "uuid" in record and isinstance(record.get("message"), dict):
            return True
    return False


def _copied(messages: Iterable[Message]) -> list[Message]:
    return [
        replace(message, author="copied_context") if message.role == "assistant" else message for message in messages
    ]


def _segments(session: Session, group: str) -> list[list[list[Unit]]]:
    """The group's conversations as paths of units, the newest first, apart for each stretch between compactions."""
    paths = [session.path_to(leaf) for leaf in session.leaves(group)]
    paths.sort(key=lambda path: path[-1].line, reverse=True)
    segments: dict[str | None, list[list[Unit]]] = defaultdict(list)
    for path in paths:
        segments[path[0].key if path[0].is_continuation else None].append(path)
    return sorted(segments.values(), key=lambda segment: min(path[0].line for path in segment))


def _read_group(document: Document, session: Session, group: str, session_id: str, model: str | None) -> list[Run]:
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
    sessions: dict[str, Session] = defaultdict(Session)
    models: dict[str, str] = {}
    for line, record in enumerate(in_parent_order(dicts(document.records))):
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


ADAPTER = Adapter(NAME, detect, read, check=said)
