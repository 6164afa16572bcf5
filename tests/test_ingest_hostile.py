"""Entries that break the reading itself: links in a circle, what may not be opened, names that are no text."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ingest_inputs import first_words, line, reasons, run

from artifacts.tables import iter_rows, open_table
from schemas.config import SourceConfig
from schemas.errors import UserError
from tasks import input_files
from tasks.ingest import source_digest
from tasks.input_files import find_files


def digest(logs: Path) -> str:
    return source_digest(SourceConfig(paths=(str(logs),)), logs.parent / "store")


# entries that cannot be looked at -------------------------------------------------------------------------------


def test_links_in_a_circle_cost_only_themselves(logs: Path) -> None:
    (logs / "loopA").symlink_to("loopB")
    (logs / "loopB").symlink_to("loopA")
    result = run(logs)
    assert first_words(result) == ["good"]
    assert set(reasons(result)) == {"loopA", "loopB"}
    assert reasons(result)["loopA"] == "cannot be read: Too many levels of symbolic links"
    assert digest(logs) == digest(logs)


def test_a_link_in_a_circle_given_by_name_is_one_clear_line(logs: Path) -> None:
    (logs / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"no run found in 1 files; .*Too many levels"):
        run(logs / "loop")


def test_a_folder_that_may_not_be_opened_is_listed(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if not isinstance(path, int) and Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = run(logs)
    assert first_words(result) == ["good"]
    assert reasons(result) == {"closed": "cannot be read: Permission denied"}
    assert digest(logs) == digest(logs)


def test_a_tree_deeper_than_the_stack_is_walked(logs: Path) -> None:
    here = os.open(logs, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert first_words(run(logs)) == ["good"]
    finally:
        subprocess.run(["rm", "-r", str(logs / "d")], check=True)  # too deep for shutil


# files that cannot be read --------------------------------------------------------------------------------------


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError) -> Iterator[None]:
    """The system refuses the bytes of files called so."""
    opened = io.open

    def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and Path(file).name == name:
            raise error
        return opened(file, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", refuse)
        yield


@pytest.mark.parametrize("settled_ns", [-(10**12), 10**12])
@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(5, "I/O error"), FileNotFoundError(2, "gone")]
)
def test_a_file_that_cannot_be_read_costs_only_itself_and_is_tried_again(
    logs: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, settled_ns: int
) -> None:
    monkeypatch.setattr(input_files, "_SETTLED_NS", settled_ns)
    (logs / "bad.json").write_bytes(line("bad"))
    with unreadable(monkeypatch, "bad.json", error):
        keys = [digest(logs), digest(logs)]
        result = run(logs)
        assert first_words(result) == ["good"]
        assert reasons(result) == {"bad.json": f"cannot be read: {error.strerror}"}
        assert reasons(run(logs)) == reasons(result)
    assert keys[0] == keys[1] != digest(logs)
    assert first_words(run(logs)) == ["bad", "good"]


def test_files_of_the_kernel_are_never_opened(logs: Path) -> None:
    for name in ("kmsg", "self/environ"):
        (logs / f"{Path(name).name}.json").symlink_to(f"/proc/{name}")
    (logs / "null.json").symlink_to("/dev/null")
    found = reasons(run(logs))
    assert found["null.json"] == "not a regular file"
    assert found["environ.json"] == "a file of the kernel, not a log"
    assert {"kmsg.json", "environ.json", "null.json"} == set(found)


def test_an_empty_file_is_not_opened(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs / "empty.json").touch()
    with unreadable(monkeypatch, "empty.json", AssertionError("opened")):  # pyright: ignore[reportArgumentType]
        assert reasons(run(logs)) == {"empty.json": "empty file"}


# names that are no text -----------------------------------------------------------------------------------------


def test_names_that_differ_in_bytes_that_are_no_text_stay_apart(logs: Path) -> None:
    for name, text in ((b"bad\xff.json", "ff"), (b"bad\xfe.json", "fe")):
        Path(os.fsdecode(os.fsencode(logs) + b"/" + name)).write_bytes(line(text))
    result = run(logs)
    assert sorted(first_words(result)) == ["fe", "ff", "good"]
    paths = {Path(row["source_path"]).name for row in iter_rows(open_table(result.trajectories))}
    assert paths == {r"bad\xff.json", r"bad\xfe.json", "good.json"}
    assert len({file.name for file in find_files([str(logs)])}) == 3


def test_members_whose_names_are_no_text_are_listed(logs: Path) -> None:
    with tarfile.open(logs / "odd.tar", "w") as archive:
        for name, data in (("a\udcff.json", b"{"), ("a\udcfe.json", line("fe"))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    result = run(logs)
    assert first_words(result) == ["good", "fe"]
    assert set(reasons(result)) == {r"a\xff.json"}
