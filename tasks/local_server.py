"""A private Prefect API process for runs without a server: it boots while the caller imports, and dies with it.

Run as `python -m tasks.local_server PORT`, it serves the API on loopback until its standard input closes. The caller
holds the other end, so the process ends with the caller however that ends, `kill -9` included.
"""

import atexit
import base64
import errno
import gc
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from artifacts.locks import alone
from schemas.errors import UserError

BOOT_LIMIT_S = 180.0
STOP_LIMIT_S = 10.0
DATABASE_BYTES = 8 << 20
"""Of a new database with its journal; with less left on the disk that is why the API ended."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalServer:
    """The API process as its parent sees it."""

    def __init__(self, home: Path) -> None:
        """Starts the process and returns at once. Its database and log lie in `home`.

        While another run's API boots on the same database this waits: the first one creates or migrates it.
        """
        home.mkdir(parents=True, exist_ok=True)
        self._booting = ExitStack()
        self._booting.enter_context(alone(home / "boot.lock"))
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
                    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # into the log, whatever the caller shows
                    "PREFECT_UI_ENABLED": "0",
                    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                    "PREFECT__SERVER_EPHEMERAL": "1",
                    "PREFECT__SERVER_FINAL": "1",
                },
            )

    def wait_until_healthy(self) -> None:
        """Blocks until the API answers.

        Raises:
            OSError: the process ended on a full disk.
            UserError: it ended otherwise, or did not answer in time; it says the last line of its log.
        """
        give_up = time.monotonic() + BOOT_LIMIT_S
        while time.monotonic() < give_up:
            if self.process.poll() is not None:
                if shutil.disk_usage(self.log.parent).free < DATABASE_BYTES:  # its log then holds nothing
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.log.parent))
                raise UserError(f"the private Prefect API ended: {self._last_words()}", where=self.log)
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    self._booting.close()
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.05)
        raise UserError(f"the private Prefect API did not answer within {BOOT_LIMIT_S:.0f} s", where=self.log)

    def _last_words(self) -> str:
        """The last error in the log."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return (errors or lines or ["nothing in its log"])[-1]

    def stop(self) -> None:
        """Ends the process; harmless when it has already ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _setting(name: str) -> str | None:
    """A setting of Prefect's in the environment or in the active profile, found without importing Prefect.

    Raises:
        UserError: the file of the profiles cannot be read.
    """
    if value := os.environ.get(name):
        return value
    file = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser() / "profiles.toml"
    if not file.is_file():
        return None
    try:
        profiles = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=file, fix="mend or remove Prefect's profiles") from error
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    return profiles.get("profiles", {}).get(active, {}).get(name)


def configured_api_url() -> str | None:
    """The Prefect server that the environment or the active Prefect profile names.

    Raises:
        UserError: the file of the profiles cannot be read.
    """
    return _setting("PREFECT_API_URL")


def require_answer(url: str) -> None:
    """Asks a configured server for its version, as Prefect would, and says what is wrong before anything starts.

    Raises:
        UserError: it does not answer, or does not accept the password.
    """
    unset = "start the server, or unset PREFECT_API_URL"
    try:
        request = urllib.request.Request(f"{url}/admin/version")
        if auth := _setting("PREFECT_API_AUTH_STRING"):
            request.add_header("Authorization", f"Basic {base64.b64encode(auth.encode()).decode()}")
        if key := _setting("PREFECT_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=10):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UserError(
                "the Prefect server wants a password", where=url, fix="set PREFECT_API_AUTH_STRING as the server has it"
            ) from error
        if error.code < 500:  # another version, or a proxy: the run itself will tell
            return
        raise UserError(f"the Prefect server fails: {error}", where=url, fix=unset) from error
    except ValueError as error:
        raise UserError(f"not a URL: {error}", where="PREFECT_API_URL", fix="http://127.0.0.1:4200/api") from error
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UserError(f"the Prefect server does not answer: {reason}", where=url, fix=unset) from error


def start_unless_configured(home: Path) -> LocalServer | None:
    """Starts a private API and points Prefect at it, unless a server is configured already (then None).

    Call it before Prefect is imported: exit handlers run last in, first out, and Prefect's own must run first, so that
    it can deliver its last events to a process that is still there.

    Raises:
        UserError: the server that is configured does not answer.
    """
    if url := configured_api_url():
        require_answer(url)
        return None
    if "prefect" in sys.modules:
        return None
    server = LocalServer(home)
    atexit.register(server.stop)
    os.environ["PREFECT_HOME"] = str(home)
    os.environ["PREFECT_API_URL"] = server.url
    return server


def _exit_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent's end of the pipe closes; holds no lock of Python's
    os._exit(0)


def _serve(port: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.disable()  # the application lives to the end: collecting while it is made takes a fifth longer and finds nothing
    import uvicorn  # imported late: the thread above must watch while this takes its seconds
    from uvicorn.importer import import_from_string

    application = import_from_string("prefect.server.api.server:create_app")()
    gc.freeze()
    gc.enable()
    uvicorn.run(application, host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
