"""A private Prefect API process for runs without a server: it boots while the caller imports, and dies with it.

Run as `python -m tasks.local_server PORT`, it serves the API on loopback until its standard input closes. The caller
holds the other end, so the process ends with the caller however that ends, `kill -9` included.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

BOOT_LIMIT_S = 180.0
STOP_LIMIT_S = 10.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalServer:
    """The API process as its parent sees it."""

    def __init__(self, home: Path) -> None:
        """Starts the process and returns at once. Its database and log lie in `home`."""
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "server.log"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.local_server", str(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the caller, which still has to report its last state
                env={
                    **os.environ,
                    "PREFECT_HOME": str(home),
                    "PREFECT_UI_ENABLED": "0",
                    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                    "PREFECT__SERVER_EPHEMERAL": "1",
                    "PREFECT__SERVER_FINAL": "1",
                },
            )

    def wait_until_healthy(self) -> None:
        """Blocks until the API answers.

        Raises:
            RuntimeError: the process ended, or did not answer in time; the text names its log.
        """
        give_up = time.monotonic() + BOOT_LIMIT_S
        while time.monotonic() < give_up:
            if self.process.poll() is not None:
                raise RuntimeError(f"the local Prefect API ended with code {self.process.returncode}: see {self.log}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError(f"the local Prefect API did not answer within {BOOT_LIMIT_S:.0f} s: see {self.log}")

    def stop(self) -> None:
        """Ends the process; harmless when it has already ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def configured_api_url() -> str | None:
    """The Prefect server that the environment or the active Prefect profile names, found without importing Prefect."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    file = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser() / "profiles.toml"
    if not file.is_file():
        return None
    profiles = tomllib.loads(file.read_text(encoding="utf-8"))
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    return profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")


def start_unless_configured(home: Path) -> LocalServer | None:
    """Starts a private API and points Prefect at it, unless a server is configured already (then None).

    Call it before Prefect is imported: exit handlers run last in, first out, and Prefect's own must run first, so that
    it can deliver its last events to a process that is still there.
    """
    if configured_api_url() or "prefect" in sys.modules:
        return None
    server = LocalServer(home)
    atexit.register(server.stop)
    os.environ["PREFECT_HOME"] = str(home)
    os.environ["PREFECT_API_URL"] = server.url
    return server


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()  # returns when the parent's end of the pipe closes
    os._exit(0)


def _serve(port: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import uvicorn  # imported late: the thread above must watch while this takes its seconds

    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="on",
    )


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
