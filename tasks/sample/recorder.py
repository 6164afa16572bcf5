"""One run as a `mini-swe-agent-1.1` trajectory: messages, observation text, and the file's JSON."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.sample.bugs import SampleTask
from tasks.sample.sandbox import COMMAND_TIMEOUT_S, SHELL, SHOWN_ENV, WORKDIR_SHOWN, CommandResult, Sandbox

TRAJECTORY_FORMAT = "mini-swe-agent-1.1"
FOLLOWS_MINI_VERSION = "2.2.7"  # the version whose file layout is followed
CHARS_PER_TOKEN = 4  # the usual estimate; real tokenizers give 3 to 4 characters a token on such text
MAX_OUTPUT_CHARS = 10_000
SUBMIT_MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_EPOCH_S = 1_750_000_000
_LONG_OUTPUT_WARNING = """\
The output of your last command was too long.
Please try a different command that produces less output.
If you're looking at a file you can try use head, tail or sed to view a smaller number of lines selectively.
If you're using grep or find and it produced too much output, you can use a more selective search pattern.
If you really need to see something from the full command's output, you can redirect output to a file \
and then search in that file."""

SYSTEM_TEMPLATE = "You are a helpful assistant that can interact with a computer shell to solve programming tasks."
INSTANCE_TEMPLATE = """\
<pr_description>
Consider the following PR description:
{{task}}
</pr_description>

<instructions>
Fix the issue by changing non-test files in the current directory, {{cwd}}.
Do not change tests or configuration files.

1. Read the code and reproduce the problem.
2. Change the source and check your change with the tests: python -m pytest
3. Every response has a short thought and one bash tool call. Every command runs in a new subshell.
   Interactive tools do not work; give pdb its commands on standard input.

When you are done, submit in two separate commands:
1. {{patch_command}} {{package}} > patch.txt && cat patch.txt
2. echo {{submit_marker}} && cat patch.txt
You cannot go on working after that.
</instructions>"""


@dataclass
class Recording:
    """The messages of one run in the making. `n_chars` counts what a model reads or writes, once."""

    instance_id: str
    seed_text: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    n_chars: int = 0
    n_calls: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed_text}/clock")
        self._rng = rng
        self._clock_s = _EPOCH_S + rng.randint(0, 20_000_000) + rng.randint(0, 999) / 1000

    def tick(self) -> float:
        """The next time stamp in seconds: made from the seed, for real ones would differ on every run."""
        self._clock_s = round(self._clock_s + self._rng.randint(200, 9_000) / 1000, 3)
        return self._clock_s

    def identifier(self, prefix: str) -> str:
        return f"{prefix}{self._rng.getrandbits(96):024x}"


def observation_text(result: CommandResult) -> str:
    """What the model is shown, after mini-swe-agent's observation template: long output is cut in the middle."""
    head = f"<returncode>{result.returncode}</returncode>\n"
    output = result.output
    if len(output) < MAX_OUTPUT_CHARS:
        # Jinja trims the newline before `-%}`; so does the template of the real runs.
        return f"{head}<output>\n{output}</output>"
    half = MAX_OUTPUT_CHARS // 2
    return (
        f"{head}<warning>\n{_LONG_OUTPUT_WARNING}\n</warning>"
        f"<output_head>\n{output[:half]}\n</output_head>\n"
        f"<elided_chars>\n{len(output) - MAX_OUTPUT_CHARS} characters elided\n</elided_chars>\n"
        f"<output_tail>\n{output[-half:]}\n</output_tail>"
    )


def start_recording(task: SampleTask, sandbox: Sandbox, *, seed_text: str) -> Recording:
    """A recording that holds the system and the task message; these depend on the task alone."""
    recording = Recording(task.instance_id, seed_text)
    prompt = _fill(
        INSTANCE_TEMPLATE,
        {
            "task": task.problem_statement,
            "cwd": WORKDIR_SHOWN,
            "patch_command": sandbox.patch_command,
            "package": task.domain.package,
            "submit_marker": SUBMIT_MARKER,
        },
    )
    for role, content in (("system", SYSTEM_TEMPLATE), ("user", prompt)):
        recording.messages.append({"role": role, "content": content})
        recording.n_chars += len(content)
    return recording


def record_call(recording: Recording, thought: str, command: str) -> str:
    """Append an assistant message with one tool call; returns the call's id."""
    call_id = recording.identifier("call_")
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    tool_calls = [{"index": 0, "function": {"arguments": arguments, "name": "bash"}, "id": call_id, "type": "function"}]
    message = {"content": thought, "role": "assistant", "tool_calls": tool_calls, "function_call": None}
    timestamp = recording.tick()
    response = {
        "id": recording.identifier("sample-"),
        "created": int(timestamp),
        "object": "chat.completion",
        "choices": [{"finish_reason": "tool_calls", "index": 0, "message": message}],
    }
    extra = {
        "actions": [{"command": command, "tool_call_id": call_id}],
        "response": response,
        "cost": 0.0,
        "timestamp": timestamp,
    }
    recording.messages.append({**message, "provider_specific_fields": None, "extra": extra})
    recording.n_chars += len(thought) + len(arguments)
    recording.n_calls += 1
    return call_id


def record_observation(recording: Recording, call_id: str, result: CommandResult) -> None:
    """Append the tool message that answers a call."""
    content = observation_text(result)
    extra = {
        "raw_output": result.output,
        "returncode": result.returncode,
        "timestamp": recording.tick(),
        "exception_info": "",
    }
    recording.messages.append({"content": content, "extra": extra, "tool_call_id": call_id, "role": "tool"})
    recording.n_chars += len(content)


def submitted_patch(result: CommandResult) -> str | None:
    """The patch behind the submit marker, or None when this output does not submit."""
    first, _, rest = result.output.lstrip().partition("\n")
    return rest if first.strip() == SUBMIT_MARKER and result.returncode == 0 else None


def finish_recording(
    recording: Recording, *, exit_status: str, submission: str, policy: str, step_limit: int
) -> dict[str, Any]:
    """The whole trajectory as the object that goes into the file."""
    content = submission if exit_status == "Submitted" else exit_status
    end = {"role": "exit", "content": content, "extra": {"exit_status": exit_status, "submission": submission}}
    return {
        "info": {
            "model_stats": {"instance_cost": 0.0, "api_calls": recording.n_calls},
            "config": _config(policy, step_limit),
            "mini_version": FOLLOWS_MINI_VERSION,
            "exit_status": exit_status,
            "submission": submission,
        },
        "messages": [*recording.messages, end],
        "trajectory_format": TRAJECTORY_FORMAT,
        "instance_id": recording.instance_id,
    }


def _config(policy: str, step_limit: int) -> dict[str, Any]:
    """Says plainly that a script acted, so that nobody takes such a run for a model's."""
    return {
        "agent": {
            "system_template": SYSTEM_TEMPLATE,
            "instance_template": INSTANCE_TEMPLATE,
            "step_limit": step_limit,
            "cost_limit": 0.0,
        },
        "agent_type": "tasks.sample.episode.run_episode",
        "model": {"model_name": f"scripted/{policy}", "model_kwargs": {}},
        "model_type": f"tasks.sample.policies.{policy}",
        "environment": {
            "cwd": WORKDIR_SHOWN,
            "env": SHOWN_ENV,
            "timeout": COMMAND_TIMEOUT_S,
            "interpreter": [SHELL, "-c"],
        },
        "environment_type": "tasks.sample.sandbox.Sandbox",
    }


def _fill(template: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        template = template.replace("{{" + name + "}}", value)
    return template
