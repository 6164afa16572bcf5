"""Every container on damaged bytes: what cannot be read is refused by SourceError or named, and nothing else is raised.

Time is bounded by EXAMPLES; raise it for a long run.
"""

import contextlib
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.archives import file_documents
from tasks.containers import Unreadable
from tasks.sources import SourceError, find_adapter

EXAMPLES = 60
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,  # the machine may be busy; time is bounded by the number of examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

TURNS = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone", "tool_calls": []}]
MEMBERS = {f"{number}.json": json.dumps({"messages": TURNS, "n": number}).encode() for number in range(3)}
SAMPLE = {"id": "s", "epoch": 1, "target": "t", "input": "go", "messages": TURNS, "scores": {"m": {"value": "C"}}}
EVAL = {
    "header.json": json.dumps({"version": 2, "status": "success", "eval": {"task": "t", "model": "m"}}).encode(),
    "samples/s_epoch_1.json": json.dumps(SAMPLE).encode(),
}
PARQUET_CODECS = ("none", "snappy", "zstd")


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def with_zstandard(members: dict[str, bytes]) -> bytes:
    """Stored members that say they are method 93, and are: Python's zipfile cannot write that."""
    packed = {name: zstandard.ZstdCompressor().compress(data) for name, data in members.items()}
    data = bytearray(zipped(packed, zipfile.ZIP_STORED))
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset : at + offset + 2] = (93).to_bytes(2, "little")
            at = data.find(signature, at + 1)
    return bytes(data)


def tarred(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def parquet(codec: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([json.loads(data) for data in MEMBERS.values()]), file, compression=codec)
    return file.getvalue()


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "zip": lambda: zipped(MEMBERS),
    "zip-stored": lambda: zipped(MEMBERS, zipfile.ZIP_STORED),
    "zip-lzma": lambda: zipped(MEMBERS, zipfile.ZIP_LZMA),
    "zip-zstd": lambda: with_zstandard(MEMBERS),
    "eval": lambda: zipped(EVAL),
    "eval-zstd": lambda: with_zstandard(EVAL),
    "tar": lambda: tarred(MEMBERS),
    "tar.gz": lambda: gzip.compress(tarred(MEMBERS)),
    "jsonl.gz": lambda: gzip.compress(b"\n".join(MEMBERS.values())),
    **{f"parquet-{codec}": lambda codec=codec: parquet(codec) for codec in PARQUET_CODECS},
}


def n_runs(path: Path) -> int:
    found = 0
    for document in file_documents(path):
        if isinstance(document, Unreadable):
            assert document.reason
            assert "\n" not in document.reason
            continue
        try:
            found += len(find_adapter(document).read_runs(document))
        except SourceError:
            continue
    return found


@pytest.mark.parametrize("name", CONTAINERS)
def test_whole_containers_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(CONTAINERS[name]())
    assert n_runs(path) == (1 if name.startswith("eval") else 3)


@pytest.mark.parametrize("name", CONTAINERS)
@given(data=st.data())
@BOUNDED
def test_damaged_containers_are_refused(name: str, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(CONTAINERS[name]())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        noise: Any = data.draw(st.binary(min_size=1, max_size=6))
        how = data.draw(st.sampled_from(("over", "in", "cut", "out")))
        if how == "over":
            damaged[place : place + len(noise)] = noise
        elif how == "in":
            damaged[place:place] = noise
        elif how == "cut":
            del damaged[place:]
        else:
            del damaged[place : place + len(noise)]
    path = tmp_path / name
    path.write_bytes(damaged)
    with contextlib.suppress(SourceError):
        n_runs(path)
