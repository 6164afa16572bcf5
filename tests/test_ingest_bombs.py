"""Bombs, cut and foreign containers, and values that no reader can take: refused in bounded time and memory, in one
clear line.
"""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from ingest_inputs import first_words, line, reasons, run

from tasks import containers
from tasks.sources import SourceError, document, parse, read_document

# bombs ----------------------------------------------------------------------------------------------------------


def peak_mib(source: str) -> float:
    """Peak memory of a fresh process that runs the source (ru_maxrss would begin at what the forking process had)."""
    peak = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    code = f"from tasks.sources import *\n{source}\n{peak}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout.split()[-1]) / 1024


REFUSED = """
try:
    read_document({data})
except SourceError as error:
    assert "small values" in str(error), error
else:
    raise SystemExit("read")
"""


@pytest.mark.parametrize("data", ['b"[" + b"[]," * (66 << 20) + b"1]"', """b'{"a":1}\\n' * (25 << 20)"""])
def test_many_small_values_are_refused_before_they_are_parsed(data: str) -> None:
    assert peak_mib(REFUSED.format(data=data)) < 1024  # 510 measured: the text, twice; parsed it takes 5.5 GiB


def test_a_long_log_of_tiny_messages_is_read() -> None:
    item = {"role": "assistant", "content": "x, [y] {z}: done, then more, and so on", "n": 1}
    data = json.dumps({"messages": [item] * 400_000}).encode()
    assert len(data) > 32 << 20
    assert len(read_document(data).value["messages"]) == 400_000


def test_brackets_inside_strings_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_WEIGHED_FROM_BYTES", 0)
    monkeypatch.setattr(document, "_FEW_MARKS", 0)
    monkeypatch.setattr(document, "_MAX_PARSED_BYTES", 1000)
    assert read_document(rb'{"a": "%s\" [[,,{{"}' % (b"[{,\\n" * 1000)).value
    for data in (b"[" + b"{}," * 20 + b"{}]", b'{"a": "' + b'\\"[' * 20 + b'", "b": [' + b"1," * 100):
        with pytest.raises(SourceError, match="small values"):
            read_document(data)


def test_yaml_has_a_limit_of_its_own() -> None:
    turn = "- {role: user, content: x}\n- {role: assistant, content: y}\n"
    assert read_document(("history:\n" + turn).encode()).kind == "yaml"
    with pytest.raises(SourceError, match="YAML larger than 4 MiB: write it as JSON"):
        read_document(("history:\n" + turn * (5 << 20 >> 5)).encode())


def test_blank_lines_of_a_gzip_are_passed_over(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(logs / "blank.jsonl.gz", "wb") as file:
        file.write(line("one") + b"\n")
        for _ in range(100):
            file.write(b"\n" * (1 << 20))
        file.write(line("two") + b"\n")
    started = time.process_time()
    assert first_words(run(logs)) == ["one", "two", "good"]
    assert time.process_time() - started < 10  # 0.7 s measured; a step for each line would be 20 s
    monkeypatch.setattr(containers, "_MIN_TOTAL_BYTES", 1 << 20)
    (logs / "blank.jsonl.gz").touch()
    assert "decompression bomb" in reasons(run(logs))["blank.jsonl.gz"]


def test_line_numbers_count_blank_lines() -> None:
    found = read_document(b"\n \n".join([line("one"), b"{", line("two")]))
    assert [problem.partition(":")[0] for problem in found.problems] == ["line 3"]
    assert len(found.value) == 2


# cut and foreign containers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_chars", [4_000, 200_000])  # one piece, and several
def test_whole_lines_before_the_cut_of_a_gzip_are_kept(logs: Path, n_chars: int) -> None:
    n_lines, text = 100, os.urandom(n_chars).hex()
    lines = (line(f"{number} {text[number : number + n_chars]}") for number in range(n_lines))
    data = gzip.compress(b"\n".join(lines), compresslevel=1)
    (logs / "cut.jsonl.gz").write_bytes(data[: len(data) * 9 // 10])
    result = run(logs)
    words = first_words(result)
    assert [word.split()[0] for word in words if word != "good"] == [str(number) for number in range(len(words) - 1)]
    assert len(words) - 1 >= n_lines // 2
    damaged = [dropped.reason for dropped in result.report.damaged if dropped.what.endswith("cut.jsonl.gz")]
    assert "damaged archive: Compressed file ended before the end-of-stream marker was reached" in damaged


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\xfd7zXZ\0", "compressed by xz: unpack it first"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
        (b"BZh91AY&SY", "compressed by bzip2: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"),
        (b"PK\x05\x06" + bytes(18), "an empty archive"),
    ],
)
def test_containers_that_are_not_read_are_named(logs: Path, head: bytes, reason: str) -> None:
    (logs / "foreign").write_bytes(head + b"\0" * 20)
    with zipfile.ZipFile(logs / "all.zip", "w") as archive:
        archive.writestr("member", head + b"\0" * 20)
    found = reasons(run(logs))
    assert found == {"foreign": reason, "member": reason}


def test_archives_without_a_file_are_named(logs: Path) -> None:
    with zipfile.ZipFile(logs / "folders.zip", "w") as archive:
        archive.mkdir("folder")
    with tarfile.open(logs / "folders.tar.gz", "w:gz") as archive:
        archive.add(logs.parent, "folder", recursive=False)
    assert set(reasons(run(logs)).values()) == {"an empty archive"}


def test_a_member_with_a_password_is_told_plainly(logs: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("secret.json", line("secret"))
    data = bytearray(packed.getvalue())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(signature) + offset] |= 1
    (logs / "locked.zip").write_bytes(data)
    assert reasons(run(logs)) == {"secret.json": "protected by a password: unpack it first"}
    assert containers.one_line(RuntimeError("File <ZipInfo filename='a' mode='x'> is\nodd")) == "File the member is odd"


# values ---------------------------------------------------------------------------------------------------------


def test_integers_too_long_for_python_are_told_in_our_words(logs: Path) -> None:
    (logs / "long.json").write_bytes(b'{"messages": [], "n": ' + b"1" * 5000 + b"}")
    (reason,) = reasons(run(logs)).values()
    assert reason == "not valid JSON: an integer of more than 4300 digits"
    call = [{"id": "1", "function": {"name": "f", "arguments": {"n": "N"}}}]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": call}]
    data = json.dumps({"messages": turns}).replace('"N"', "1" * 4000)
    assert parse(data.encode())[0].messages[1].tool_calls[0].arguments == f'{{"n": {"1" * 4000}}}'


def test_an_unknown_role_is_told_with_its_place() -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "wizard", "content": "z"},
    ]
    with pytest.raises(SourceError, match=r"message 3: unknown message role 'wizard'.*one of"):
        parse(json.dumps({"messages": turns}).encode())
