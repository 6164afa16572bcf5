"""One run of an agent, in the one shape that every log format is read into.

A trajectory is the conversation as the model saw it. Everything the model emitted keeps its exact text: tool-call
arguments stay the string the model wrote, and calls written inside the text are marked by character offsets.
"""

from typing import Literal

from pydantic import Field, model_validator

from schemas.base import Frozen

Role = Literal["system", "user", "assistant", "tool"]

Author = Literal[
    "policy",  # the model whose runs these are: the only author whose turns are trained on
    "environment",  # tool results, observations, format-error notes
    "human",
    "harness",  # system prompt, task text, notes the agent program adds
    "simulated_user",  # another model that plays the user
    "demonstration",  # somebody else's run, pasted in as an example
    "copied_context",  # turns repeated from an earlier file or from a parent
    "invented",  # a turn that no model emitted (a made-up submit)
    "other_agent",  # a turn of another agent inside this conversation
]

OutcomeStatus = Literal["resolved", "failed", "unknown"]
OutcomeSource = Literal["test_report", "reward", "scorer", "agent", "none"]


class ToolCall(Frozen):
    name: str
    arguments: str = Field(description="JSON text, exactly as the model wrote it where the log has that")
    call_id: str | None = None


class CharSpan(Frozen):
    """Characters [start, end) of a message's content."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> "CharSpan":
        if self.end <= self.start:
            raise ValueError(f"empty or reversed span [{self.start}, {self.end})")
        return self


class Message(Frozen):
    """One message. An assistant message is one whole model response, however many log lines it came from."""

    role: Role
    author: Author
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    action_spans: tuple[CharSpan, ...] = Field(
        default=(), description="where calls written as text (fences, XML, JSON) stand in `content`"
    )
    tool_call_id: str | None = Field(default=None, description="on a tool message: the call it answers")
    name: str | None = Field(default=None, description="on a tool message: the tool's name")
    failed: bool | None = Field(
        default=None,
        description="on an observation: whether the action it answers failed; None when the log does not say",
    )

    @property
    def trainable(self) -> bool:
        """Only what the policy model itself emitted may ever be scored."""
        return self.role == "assistant" and self.author == "policy"

    @model_validator(mode="after")
    def _consistent(self) -> "Message":
        if self.role != "assistant" and (self.tool_calls or self.action_spans or self.reasoning is not None):
            raise ValueError(f"a {self.role} message cannot hold calls, action spans or reasoning")
        if self.action_spans and max(span.end for span in self.action_spans) > len(self.content):
            raise ValueError("an action span reaches past the end of the content")
        return self


class Outcome(Frozen):
    status: OutcomeStatus = "unknown"
    source: OutcomeSource = "none"
    score: float | None = Field(default=None, ge=0.0, le=1.0)


class Trajectory(Frozen):
    trajectory_id: str = Field(description="stable: derived from the content, not from where the file lies")
    task_id: str = Field(description="groups the runs of one task across folders and formats")
    source_format: str
    source_path: str
    source_blake3: str
    messages: tuple[Message, ...]
    outcome: Outcome = Outcome()
    repo: str | None = Field(default=None, description="the repository the task is about; splits can be made by it")
    run_id: str | None = Field(default=None, description="the batch or trial this run belongs to")
    agent: str | None = None
    model: str | None = None
    tools_json: str | None = Field(default=None, description="tool schemas shown to the model, as a JSON array")
    exit_status: str | None = Field(
        default=None, description="what the agent program said at the end: a claim, never an outcome"
    )
    patch: str | None = None
    parent_id: str | None = None
    parent_link: Literal["subagent", "fork", "continuation"] | None = None

    @property
    def n_turns(self) -> int:
        return sum(message.trainable for message in self.messages)
