"""The cache of stage results: its keys, and the lock that keeps two runs from computing the same stage at once."""

import fcntl
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.transactions import IsolationLevel

from schemas.requests import Request

POLL_S = 0.2


def stage_key(stage: str, version: int, request: Request) -> str:
    """`<stage>-<sha256>` of the stage's name and version and of what its result depends on."""
    text = json.dumps([stage, version, request.identity()], sort_keys=True)
    return f"{stage}-{hashlib.sha256(text.encode()).hexdigest()}"


class FileLocks:
    """Prefect's lock protocol over `flock`: the kernel lets go when the holder dies, however it dies.

    (Prefect's own file locks have no owner, so a killed run would block every later one.)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, tuple[str, int]] = {}  # key -> (holder, file descriptor)

    def _try_lock(self, key: str) -> int | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Waits for the lock; `hold_timeout` is not needed, since a dead holder holds nothing."""
        if self.is_lock_holder(key, holder):
            return True
        give_up = None if acquire_timeout is None else time.monotonic() + acquire_timeout
        while (descriptor := self._try_lock(key)) is None:
            if give_up is not None and time.monotonic() >= give_up:
                return False
            time.sleep(POLL_S)
        self._held[key] = (holder, descriptor)
        return True

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        return await anyio.to_thread.run_sync(self.acquire_lock, key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        if not self.is_lock_holder(key, holder):
            raise ValueError(f"{holder} does not hold the lock on {key}")
        os.close(self._held.pop(key)[1])

    def is_locked(self, key: str) -> bool:
        if key in self._held:
            return True
        descriptor = self._try_lock(key)
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def is_lock_holder(self, key: str, holder: str) -> bool:
        return self._held.get(key, ("", -1))[0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        give_up = None if timeout is None else time.monotonic() + timeout
        while self.is_locked(key):
            if give_up is not None and time.monotonic() >= give_up:
                return False
            time.sleep(POLL_S)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        return await anyio.to_thread.run_sync(self.wait_for_lock, key, timeout)


@dataclass
class StageKey(CachePolicy):
    """The cache policy of one stage: digests of its inputs, its sections of the configuration, its version."""

    stage: str = ""
    version: int = 0

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        return stage_key(self.stage, self.version, inputs["request"])


def stage_policy(stage: str, version: int, store: Path | None) -> StageKey:
    """Keys of `stage`; with a store, two runs that want the same key wait for each other, and the second finds the
    first's result."""
    if store is None:
        return StageKey(stage=stage, version=version)
    return StageKey(
        stage=stage,
        version=version,
        isolation_level=IsolationLevel.SERIALIZABLE,
        lock_manager=FileLocks(store / "locks"),
    )
