"""What every test may ask for."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test never waits for a hub

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_TRAJECTORIES = REPOSITORY.parent / "shared" / "data" / "trajectories"


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


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with one good log, for what is put beside it."""
    from ingest_inputs import line  # here, so that the environment above is set before any import

    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "good.json").write_bytes(line("good"))
    return folder
