"""Fifty task runs at once against the server's two databases: none is lost, none is left unfinished."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from parallel_flow import N_TASKS
from prefect_site import free_port

PREFECT = Path(sys.executable).parent / "prefect"


def postgres_programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    return found[-1].parent


@pytest.fixture
def postgres_url(tmp_path: Path) -> Iterator[str]:
    """A PostgreSQL of this test's own. It refuses to run as root, so it runs as Debian's user for it then."""
    programs, port = postgres_programs(), free_port()
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    account = pwd.getpwnam(user)
    data = Path(f"/tmp/traceforge-postgres-{port}")
    data.mkdir(mode=0o700)
    os.chown(data, account.pw_uid, account.pw_gid)
    as_user: dict[str, Any] = {"user": account.pw_uid, "group": account.pw_gid} if os.getuid() == 0 else {}
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "prefect", "--auth=trust", "-E", "UTF8"],
        check=True,
        capture_output=True,
        cwd="/",
        **as_user,
    )
    with (tmp_path / "postgres.log").open("wb") as log:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", data],
            stdout=log,
            stderr=log,
            cwd="/",
            **as_user,
        )
    try:
        deadline = time.monotonic() + 180
        while subprocess.run(
            [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)], capture_output=True
        ).returncode:
            assert time.monotonic() < deadline, "PostgreSQL did not start"
            time.sleep(0.2)
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        subprocess.run(["rm", "-rf", data], check=True)


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_fifty_task_runs_lose_nothing(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    if database == "sqlite":
        (tmp_path / "prefect").mkdir()
        shutil.copy(request.getfixturevalue("prefect_database"), tmp_path / "prefect")
    else:
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = request.getfixturevalue("postgres_url")
    log_path = tmp_path / "server.log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.3)
        flow = [sys.executable, REPOSITORY / "tests" / "parallel_flow.py"]
        result = subprocess.run(flow, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        deadline = time.monotonic() + 180  # task runs are recorded from events, a little after the fact
        while (states := count_states(url)) != {"COMPLETED": N_TASKS}:
            assert time.monotonic() < deadline, states
            time.sleep(0.5)
        assert post(f"{url}/artifacts/count") == N_TASKS
        assert [run["state_type"] for run in post(f"{url}/flow_runs/filter")] == ["COMPLETED"]
        assert "database is locked" not in log_path.read_text() + result.stderr
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def count_states(url: str) -> dict[str, int]:
    states: dict[str, int] = {}
    for run in post(f"{url}/task_runs/filter"):
        states[run["state_type"]] = states.get(run["state_type"], 0) + 1
    return states
