"""Damaged and hostile input: nothing hangs, nothing crashes, whole records are kept, every loss is told."""

import contextlib
import io
import json
import os
import pickle
import resource
import sys
import tarfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from ingest_inputs import chat, first_words, line, reasons, run

from tasks import archives, containers
from tasks.sources import SourceError, parse, read_document


def test_truncated_json_is_quarantined(logs: Path) -> None:
    (logs / "cut.json").write_bytes(json.dumps(chat("cut"), indent=1).encode()[:-20])
    result = run(logs)
    assert first_words(result) == ["good"]
    assert "not valid JSON" in reasons(result)["cut.json"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_whole_lines_before_a_cut_are_kept(logs: Path, ending: bytes, mark: bytes) -> None:
    (logs / "cut.jsonl").write_bytes(mark + ending.join((line("one"), b"", line("two"), line("three")[:30])))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    (dropped,) = result.report.damaged
    assert dropped.reason.startswith("line 4: ")


def test_a_bad_line_in_the_middle_costs_only_itself(logs: Path) -> None:
    (logs / "a.jsonl").write_bytes(b"\n".join((line("one"), b'{"messages": [', line("two"))))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    assert result.report.damaged[0].reason.startswith("line 2: ")


def test_a_bad_record_costs_only_itself(logs: Path) -> None:
    broken = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "y"}]}).encode()
    (logs / "a.jsonl").write_bytes(b"\n".join((line("one"), broken, line("two"))))
    result = run(logs)
    assert first_words(result) == ["one", "two", "good"]
    assert "line 2: message 2: unknown message role 'wizard'" in result.report.damaged[0].reason


def test_zero_bytes_binary_and_pickle_are_refused_unopened(logs: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(logs / "owned"),))

    (logs / "empty.json").write_bytes(b"")
    (logs / "blank.jsonl").write_bytes(b"\n \n")
    (logs / "x.bin").write_bytes(b"\x7fELF\0\0\0")
    (logs / "x.pkl").write_bytes(pickle.dumps(Trap()))
    (logs / "x0.pkl").write_bytes(pickle.dumps(Trap(), protocol=0))
    result = run(logs)
    assert set(reasons(result)) == {"empty.json", "blank.jsonl", "x.bin", "x.pkl", "x0.pkl"}
    assert reasons(result)["empty.json"] == reasons(result)["blank.jsonl"] == "empty file"
    assert not (logs / "owned").exists()


def test_yaml_tags_are_never_run_and_aliases_do_not_explode(logs: Path) -> None:
    (logs / "tag.yaml").write_text(f"history: !!python/object/apply:os.mkdir ['{logs / 'owned'}']\n")
    bomb = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join(f'*a{n - 1}' for _ in range(9))}]" for n in range(1, 20)]
    (logs / "bomb.yaml").write_text("\n".join(bomb))
    result = run(logs)
    assert set(reasons(result)) == {"tag.yaml", "bomb.yaml"}
    assert not (logs / "owned").exists()


def test_lone_surrogates_become_replacement_characters(logs: Path) -> None:
    (logs / "s.json").write_bytes(line("a").replace(b'"a"', rb'"a\ud800b\udc00"'))
    (logs / "t.json").write_bytes(line("b").replace(b'"b"', b'"b\xff"'))
    result = run(logs)
    assert first_words(result) == ["good", "a\ufffdb\ufffd", "b\ufffd"]
    assert result.report.n_replaced_characters == 3


def test_a_lone_surrogate_in_yaml_is_refused(logs: Path) -> None:
    turns = '[{role: user, content: x}, {role: assistant, content: "a\\uD800b"}]'
    (logs / "s.yaml").write_text(f"history: {turns}\n")
    result = run(logs)
    assert first_words(result) == ["good"]
    assert set(reasons(result)) == {"s.yaml"}


def test_long_integers_keep_their_value() -> None:
    number = 12345678901234567890123
    calls = [{"id": "1", "function": {"name": "f", "arguments": {"n": number}}}]
    data = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]})
    (found,) = parse(data.encode())
    assert found.messages[1].tool_calls[0].arguments == f'{{"n": {number}}}'


def test_duplicate_keys_take_the_last_value_and_nan_rewards_are_unknown() -> None:
    (found,) = parse(b'{"messages": [{"role": "user", "content": "a", "content": "b"}], "reward": 1, "reward": NaN}')
    assert found.messages[0].content == "b"
    assert found.outcome.status == "unknown"


def test_argument_strings_keep_duplicate_keys_and_spaces() -> None:
    arguments = '{"a" : 1.10,"a":2 }'
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    data = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]})
    assert parse(data.encode())[0].messages[1].tool_calls[0].arguments == arguments


def test_cycles_in_parent_links_end() -> None:
    def record(uuid: str, parent: str, kind: str, **message: Any) -> bytes:
        return json.dumps(
            {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": {"role": kind, **message}}
        ).encode()

    data = b"\n".join(
        (
            record("a", "c", "user", content="hello"),
            record("b", "a", "assistant", id="m1", content=[{"type": "text", "text": "hi"}]),
            record("c", "b", "user", content="again"),
            record("a", "c", "user", content="hello"),
        )
    )
    (found,) = parse(data)
    assert sum(message.role == "assistant" for message in found.messages) == 1
    nodes = [{"node_id": n, "parent_id": (n + 1) % 3, "message": f"m{n}"} for n in range(3)]
    assert parse(json.dumps({"nodes": nodes}).encode())


def test_deep_nesting_is_refused() -> None:
    for data in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000):
        with pytest.raises(SourceError):
            parse(data)
    content = '[{"type": "text", "content": ' * 490 + '"x"' + "}]" * 490
    with contextlib.suppress(SourceError):  # legal JSON: read or refused, but no other error
        parse(f'{{"messages": [{{"role": "user", "content": {content}}}]}}'.encode())


def test_fifo_and_folder_named_like_a_file(logs: Path) -> None:
    os.mkfifo(logs / "pipe.json")
    (logs / "folder.json").mkdir()
    (logs / "folder.json" / "inner.json").write_bytes(line("inner"))
    (logs / "loop").symlink_to(logs)
    (logs / "gone.json").symlink_to(logs / "nowhere")
    result = run(logs)
    assert first_words(result) == ["inner", "good"]
    assert reasons(result)["pipe.json"] == "not a regular file"
    assert "cannot be read" in reasons(result)["gone.json"]


def test_names_that_are_no_text(logs: Path) -> None:
    (Path(os.fsdecode(os.fsencode(logs) + b"/\xff.json"))).write_bytes(line("odd"))
    assert set(first_words(run(logs))) == {"good", "odd"}


def test_archive_members_never_leave_the_archive(logs: Path) -> None:
    with zipfile.ZipFile(logs / "evil.zip", "w") as archive:
        archive.writestr("../../evil.json", line("evil"))
        archive.writestr("/abs.json", line("evil"))
        link = zipfile.ZipInfo("link.json")
        link.external_attr = 0xA1FF << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("fine.json", line("fine"))
        inner = io.BytesIO()
        with zipfile.ZipFile(inner, "w") as nested:
            nested.writestr("deep.json", line("deep"))
        archive.writestr("nested.zip", inner.getvalue())
    with tarfile.open(logs / "evil.tar", "w") as archive:
        for name, kind in (("../up.json", tarfile.REGTYPE), ("l.json", tarfile.SYMTYPE), ("d", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    before = set(logs.parent.rglob("*.json"))
    result = run(logs)
    assert first_words(result) == ["fine", "good"]
    assert set(logs.parent.rglob("*.json")) == before
    found = reasons(result)
    assert found["evil.json"] == found["abs.json"] == found["up.json"] == "member name leads outside the archive"
    assert found["link.json"] == "a link, not a file"
    assert found["l.json"] == found["d"] == "a link or device, not a file"
    assert found["nested.zip"].startswith("an archive inside an archive")


def test_cut_archives_keep_their_whole_members(logs: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("one", "two"):
            info = tarfile.TarInfo(f"{name}.json")
            info.size = len(line(name))
            archive.addfile(info, io.BytesIO(line(name)))
    (logs / "cut.tar").write_bytes(buffer.getvalue()[:1600])
    (logs / "cut.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    (logs / "cut.jsonl.gz").write_bytes(zlib.compress(b"x")[:4])
    (logs / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (logs / "cut.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    result = run(logs)
    assert first_words(result) == ["one", "good"]
    assert {"cut.tar", "cut.zip", "cut.gz", "cut.parquet"} <= set(reasons(result))


def test_decompression_bombs_end_at_the_limit(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_DOCUMENT_BYTES", 4 << 20)
    monkeypatch.setattr(containers, "_MIN_TOTAL_BYTES", 8 << 20)
    zeros = b" " * (5 << 20)
    with zipfile.ZipFile(logs / "big.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big.json", zeros)
    with zipfile.ZipFile(logs / "many.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(8):
            archive.writestr(f"{number}.json", zeros[: 3 << 20])
    result = run(logs)
    assert reasons(result)["big.json"] == "larger than 4 MiB"
    assert "decompression bomb" in reasons(result)["many.zip"]
    assert first_words(result) == ["good"]


def test_a_gzip_bomb_is_refused_in_bounded_memory(logs: Path) -> None:
    import gzip

    with gzip.open(logs / "bomb.json.gz", "wb", compresslevel=9) as file:
        file.write(b'{"messages": "')
        for _ in range(400):
            file.write(b"x" * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run(logs)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert "larger than 256 MiB" in reasons(result)["bomb.json.gz"]
    assert grown_kib < 700 << 10


def test_a_500_mb_line_costs_neither_its_neighbours_nor_the_memory(logs: Path) -> None:
    path = logs / "long.jsonl"
    with path.open("wb") as file:
        file.write(line("before") + b"\n" + b'{"messages": [{"role": "user", "content": "')
        for _ in range(500):
            file.write(b"x" * 1_000_000)
        file.write(b'"}]}\n' + line("after") + b"\n")
    started = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run(logs)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert first_words(result) == ["good", "before", "after"]
    assert "longer than 256 MiB" in result.report.damaged[0].reason
    assert grown_kib < 700 << 10
    assert time.process_time() - started < 30  # of CPU time; 2.5 measured
    path.unlink()


def test_the_recursion_limit_is_left_alone(logs: Path) -> None:
    limit = sys.getrecursionlimit()
    run(logs)
    assert sys.getrecursionlimit() == limit


def test_utf16_is_read() -> None:
    text = json.dumps(chat("ü"), ensure_ascii=False)
    document = read_document(b"\xff\xfe" + text.encode("utf-16-le"))
    assert document.value["messages"][0]["content"] == "ü"
