"""What ingestion remembers between nights: what is damaged is made anew, other versions' is deleted, names differ."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ingest_inputs import first_words, line

from artifacts.store import Store
from schemas.config import SourceConfig
from schemas.errors import UserError
from schemas.reports import Ingested
from tasks import catalog, ingest
from tasks.input_files import valid_name


def night(tmp_path: Path) -> Ingested:
    config = SourceConfig(paths=(str(tmp_path / "logs"),))
    store = Store(tmp_path / "store")
    ingest.source_digest(config, store.root)
    return ingest.ingest(config, store)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Where a first night on two files left its memory."""
    (tmp_path / "logs").mkdir()
    for name in "ab":
        path = tmp_path / "logs" / f"{name}.json"
        path.write_bytes(line(name))
        os.utime(path, (0, 0))
    assert first_words(night(tmp_path)) == ["a", "b"]
    (folder,) = (tmp_path / "store" / "ingested").iterdir()
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def _other_columns(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        for table in ("runs", "digests"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(f"CREATE TABLE {table} (a, b)")
    connection.close()


def _no_text(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        for table in ("files", "digests"):
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                connection.execute(f"UPDATE {table} SET stamp = CAST(x'ff' AS TEXT)")
    connection.close()


@pytest.mark.parametrize("name", ["catalog.sqlite", "digests.sqlite"])
@pytest.mark.parametrize("damage", [_garbage, _half, _other_columns, _no_text])
def test_a_damaged_memory_is_made_anew(name: str, damage: Callable[[Path], None], memory: Path, tmp_path: Path) -> None:
    damage(only(memory, name))
    assert first_words(night(tmp_path)) == ["a", "b"]
    assert night(tmp_path).report.n_files_reused == 2


def test_a_memory_that_the_system_refuses_is_not_deleted(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = only(memory, "catalog.sqlite").read_bytes()

    def full(*_: object) -> bool:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(catalog.Catalog, "want", full)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        night(tmp_path)
    assert only(memory, "catalog.sqlite").read_bytes() == before


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
def test_what_cannot_be_looked_at_stops_no_night(
    error: OSError, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs" / "a.json").rename(tmp_path / "elsewhere.json")
    real = os.stat

    def stat(path: object, *rest: object, **named: object) -> os.stat_result:
        if str(path).endswith("a.json"):
            raise error
        return real(path, *rest, **named)  # pyright: ignore

    monkeypatch.setattr(catalog.os, "stat", stat)
    assert first_words(night(tmp_path)) == ["b"]
    with sqlite3.connect(only(memory, "catalog.sqlite")) as connection:
        assert len(connection.execute("SELECT file FROM files").fetchall()) == 2  # a.json may come back
    connection.close()


def test_what_another_version_read_is_deleted(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "STAGE_VERSION", ingest.STAGE_VERSION + 1)
    assert first_words(night(tmp_path)) == ["a", "b"]
    assert not memory.exists()
    assert len(list((tmp_path / "store" / "ingested").rglob("*.arrow"))) == 1


def test_files_that_may_not_be_read_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.json").write_bytes(line("a"))

    real = Path.open

    def refuse(path: Path, *rest: object, **named: object) -> object:
        if path.name == "a.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **named)  # pyright: ignore

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read: Permission denied.*run as a user who may read them"):
        night(tmp_path)


def test_two_names_never_become_one() -> None:
    names = [b"a\xff", rb"a\xff", rb"a\\xff", b"a\\\xff", rb"a\b", "ä\\xff".encode(), b"\xc3\\xa4", "ä".encode()]
    made = [valid_name(os.fsdecode(name)) for name in names]
    assert len(set(made)) == len(names)
    assert made[0] == r"a\xff"
    assert made[4] == r"a\b"
    assert made[-1] == "ä"
