"""One run: a policy works in a sandbox until it submits or reaches its step limit; then the result is graded."""

import json
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import UserError
from tasks.sample.bugs import SampleTask
from tasks.sample.policies import POLICIES
from tasks.sample.reading import Brief
from tasks.sample.recorder import (
    CHARS_PER_TOKEN,
    finish_recording,
    record_call,
    record_observation,
    start_recording,
    submitted_patch,
)
from tasks.sample.sandbox import Sandbox, open_sandbox, run_command, write_files

_BASE_STEPS = 16
_TOKENS_PER_STEP = 1_600  # with reads of at most 9,400 characters a run needs a step per 1,800 tokens
_PYTEST_OUTCOMES = {0, 1, 2}  # all passed, some failed, collection failed (the module no longer imports)


@dataclass(frozen=True)
class Episode:
    """How one run ended. `n_tokens` is an estimate: characters of the conversation / 4."""

    instance_id: str
    exit_status: str
    submission: str
    resolved: bool
    n_tokens: int


class RunStoppedError(Exception):
    """The run was given up on the caller's request."""


def step_limit(target_tokens: int) -> int:
    """How many calls a run of this length may make."""
    return _BASE_STEPS + target_tokens // _TOKENS_PER_STEP


def run_episode(
    task: SampleTask,
    policy: str,
    *,
    seed_text: str,
    target_tokens: int,
    root: Path,
    git: str | None,
    stop: threading.Event,
) -> tuple[Episode, dict[str, Any]]:
    """Let `policy` work on `task` in the new folder `root`; returns the outcome and the trajectory.

    Every command truly runs. `seed_text` decides all of the policy's choices and every time stamp.
    Raises UserError when a command hangs, RunStoppedError once `stop` is set.
    """
    sandbox = open_sandbox(root, task.files, git=git)
    recording = start_recording(task, sandbox, seed_text=seed_text)
    brief = Brief(
        task=task,
        rng=random.Random(f"{seed_text}/policy"),
        recording=recording,
        target_chars=target_tokens * CHARS_PER_TOKEN,
        step_limit=step_limit(target_tokens),
        patch_command=sandbox.patch_command,
    )
    steps = POLICIES[policy](brief)
    exit_status, submission = "LimitsExceeded", ""
    thought, command = next(steps)
    while True:
        if stop.is_set():
            raise RunStoppedError(seed_text)
        call_id = record_call(recording, thought, command)
        result = run_command(sandbox, command)
        patch = submitted_patch(result)
        if patch is not None:
            exit_status, submission = "Submitted", patch
            break
        record_observation(recording, call_id, result)
        if recording.n_calls >= brief.step_limit:
            break
        thought, command = steps.send(result)
    steps.close()
    trajectory = finish_recording(
        recording, exit_status=exit_status, submission=submission, policy=policy, step_limit=brief.step_limit
    )
    resolved = bool(submission) and passes_tests(sandbox, task)
    n_tokens = recording.n_chars // CHARS_PER_TOKEN
    return Episode(task.instance_id, exit_status, submission, resolved, n_tokens), trajectory


def passes_tests(sandbox: Sandbox, task: SampleTask) -> bool:
    """Run the original and the hidden tests on the tree as it is, after taking back changes to test files.

    Raises UserError when the tests cannot be run at all, which is not an outcome.
    """
    originals = {name: text for name, text in task.files.items() if name.startswith("tests/")}
    write_files(sandbox.workdir, {**originals, **task.hidden_files})
    tests = " ".join((task.test_path, *task.hidden_files))
    result = run_command(sandbox, f"python -m pytest -q --tb=no {tests}")
    if result.returncode not in _PYTEST_OUTCOMES:
        raise UserError(
            f"pytest ended with code {result.returncode}: {result.output.strip()[-300:]}",
            where=task.instance_id,
            fix="check that pytest works in this environment",
        )
    return result.returncode == 0


def trajectory_json(trajectory: dict[str, Any]) -> str:
    """The text of a trajectory file: indented by two, as mini-swe-agent writes it."""
    return json.dumps(trajectory, indent=2)
