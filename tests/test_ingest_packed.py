"""Packed files that are damaged or hostile, and reward files: what is kept, and what the reasons say."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from ingest_inputs import chat, first_words, line, reasons, run

from artifacts.tables import iter_rows, open_table
from tasks.sources import SourceError, read_document
from tasks.sources.side_files import read_side_file

# gzip and tar ---------------------------------------------------------------------------------------------------

LINES = b"\n".join((line("one"), line("two")))


@pytest.mark.parametrize("end", ["checksum", "length", "garbage behind", "cut"])
def test_lines_of_a_damaged_gzip_are_kept_and_the_damage_is_listed(logs: Path, end: str) -> None:
    data = bytearray(gzip.compress(LINES))
    if end == "checksum":
        data[-8] ^= 1
    elif end == "length":
        data[-4] ^= 1
    elif end == "garbage behind":
        data += b"garbage"
    else:
        del data[-6:]
    (logs / "a.jsonl.gz").write_bytes(data)
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    (dropped,) = result.report.damaged
    assert dropped.reason.startswith("damaged archive: ")


def packed_tar(*infos: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info in infos:
            data = line(info.name) if info.isreg() else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.json", LINES)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.gz", gzip.compress(gzip.compress(LINES)), "an archive inside an archive"),
        ("b.gz", gzip.compress(zipped()), "an archive inside an archive"),
        ("c.gz", gzip.compress(b"\xfd7zXZ\0" + b"x" * 40), "compressed by xz"),
        ("d.tar", packed_tar(), "an empty archive"),
        ("e.tar.gz", gzip.compress(packed_tar()), "an empty archive"),
        ("f.gz", gzip.compress(b""), "empty file"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,  # gzip writes the second it ran in
)
def test_reasons_say_what_a_packed_file_is(logs: Path, name: str, data: bytes, reason: str) -> None:
    (logs / name).write_bytes(data)
    result = run(logs)
    assert first_words(result) == ["good"]
    assert reasons(result)[name].startswith(reason)


SPECIAL = {
    "soft": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "character": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "pipe": tarfile.FIFOTYPE,
}


@pytest.mark.parametrize("packing", ["tar", "tar.gz"])
@pytest.mark.parametrize("target", ["good.json", "../outside.json", "/etc/passwd"])
def test_links_and_devices_in_a_tar_are_neither_followed_nor_made(logs: Path, target: str, packing: str) -> None:
    (logs.parent / "outside.json").write_bytes(line("outside"))
    members = [tarfile.TarInfo("first.json")]
    for name, kind in SPECIAL.items():
        info = tarfile.TarInfo(f"{name}.json")
        info.type, info.devmajor, info.devminor = kind, 1, 3
        info.linkname = target if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
        members.append(info)
    members.append(tarfile.TarInfo("last.json"))
    data = packed_tar(*members)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:  # what the test means to write is what it wrote
        assert [info.type for info in archive][1:-1] == list(SPECIAL.values())
    (logs / f"a.{packing}").write_bytes(data if packing == "tar" else gzip.compress(data))
    before = sorted(path for path in logs.parent.rglob("*") if "store" not in path.parts)
    result = run(logs)
    assert first_words(result) == ["first.json", "last.json", "good"]
    assert reasons(result) == {f"{name}.json": "a link or device, not a file" for name in SPECIAL}
    assert sorted(path for path in logs.parent.rglob("*") if "store" not in path.parts) == before


# rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [("1e0", 1.0), ("+1", 1.0), (".5", 0.5), ("1.", 1.0), (" 0.25\n", 0.25), ("5E-1", 0.5), ("0", 0.0)],
)
def test_rewards_in_every_spelling_of_a_number_are_joined(logs: Path, text: str, score: float) -> None:
    (logs / "trial" / "verifier").mkdir(parents=True)
    (logs / "trial" / "run.json").write_bytes(line("run"))
    (logs / "trial" / "verifier" / "reward.txt").write_text(text)
    result = run(logs)
    found = {
        row["messages"][0]["content"]: row["outcome"]["score"] for row in iter_rows(open_table(result.trajectories))
    }
    assert found == {"run": score, "good": None}
    assert not result.report.quarantined


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[
            ("reward.txt", text)
            for text in ("nan", "inf", "-inf", "passed", "true", "1\n0", "1_0", "1,0", "0x1", "\u0661")
        ],
        *[("reward.json", text) for text in ('{"reward": "1"}', '{"reward": null}', "null", "[1]", '"1"', "NaN")],
        ("reward.json", '{"reward": NaN}'),
    ],
)
def test_a_reward_that_is_no_number_is_told_as_one(logs: Path, name: str, text: str) -> None:
    (logs / name).write_text(text, "utf-8")
    result = run(logs)
    assert first_words(result) == ["good"]
    assert reasons(result)[name].startswith("a reward that cannot be read: ")


@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
def test_a_number_of_another_scale_is_told_as_that(name: str) -> None:
    with pytest.raises(SourceError, match=r"where one in \[0, 1\] is expected"):
        read_side_file(read_document(b"-1", name))


def test_a_run_called_like_a_reward_is_a_run(logs: Path) -> None:
    (logs / "reward.json").write_text(json.dumps(chat("run")))
    assert set(first_words(run(logs))) == {"run", "good"}
