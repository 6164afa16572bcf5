"""What every test may ask for."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread would spin while it waits, at the other tests' cost
os.environ["HF_HUB_OFFLINE"] = "1"  # a test never waits for a hub
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes compiles for the CPU as it is imported: a second each

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_TRAJECTORIES = REPOSITORY.parent / "shared" / "data" / "trajectories"

LONGEST_FIRST = (
    *("test_crashes", "test_site", "test_faults", "test_faults_stop", "test_cli_hostile", "test_flow"),
    *("test_render_engines", "test_preference_plans", "test_cli", "test_sample", "test_model", "test_render_shared"),
    *("test_parallel_runs", "test_preference", "test_scorers", "test_preference_trl", "test_sft", "test_sources_fuzz"),
    "test_engine_staging",
)
"""Files that take 10 s or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """So that no process is left alone with a long file at the end."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What its imports make lives to the end: looking through it for garbage, now and later, costs as much again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="folder to keep pictures of the Prefect UI in")


@pytest.fixture
def screenshots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where pictures of the UI go: kept if asked for, else gone with the test."""
    folder = request.config.getoption("--screenshots") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Real agent runs that lie beside the checkout; they are not part of the repository."""
    if not SHARED_TRAJECTORIES.is_dir():
        pytest.skip(f"real agent runs are not beside the checkout ({SHARED_TRAJECTORIES})")
    return SHARED_TRAJECTORIES


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Path]:
    """`made_once(name, make)` is a folder that `make` fills, once for all test processes. Nobody writes into it."""
    from artifacts.locks import alone

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder(name: str, make: Callable[[Path], Any]) -> Path:
        done = shared / f"{name}.done"
        with alone(shared / f"{name}.lock"):
            if not done.exists():
                make(shared / name)
                done.touch()
        return shared / name

    return folder


@pytest.fixture(scope="session")
def samples(made_once: Callable[[str, Callable[[Path], Any]], Path]) -> Path:
    """Eight sample runs of four tasks."""
    from tasks.sample.generate import generate_samples

    return made_once(
        "samples", lambda out: generate_samples(out, n_tasks=4, seed=0, runs_per_task=2, target_tokens=2_000)
    )


@pytest.fixture(scope="session")
def prefect_database(made_once: Callable[[str, Callable[[Path], Any]], Path]) -> Path:
    """A new database of Prefect's. Copied into a PREFECT_HOME it saves a server some seconds of migrations."""

    def migrate(home: Path) -> None:
        home.mkdir()
        prefect = Path(sys.executable).parent / "prefect"
        environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        subprocess.run([prefect, "server", "database", "upgrade", "--yes"], env=environment, check=True)

    return made_once("prefect", migrate) / "prefect.db"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with one good log, for what is put beside it."""
    from ingest_inputs import line  # here, so that the environment above is set before any import

    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "good.json").write_bytes(line("good"))
    return folder
