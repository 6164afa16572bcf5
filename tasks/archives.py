"""Members of archives and pieces of files larger than memory. Nothing is ever unpacked to disk.

Every limit is on bytes after decompression, so a decompression bomb ends where the limit is reached.
"""

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, cast

import zstandard

from tasks.containers import (
    DAMAGE,
    HEAD_BYTES,
    UTF8_MARK,
    Budget,
    ReadError,
    Unpacked,
    Unreadable,
    at_least_one,
    container_kind,
    foreign_container,
    is_read_in_pieces,
    leads_outside,
    nested_container,
    one_line,
    whole_lines,
)
from tasks.content_digest import file_blake3
from tasks.input_files import path_name, unreadable, valid_name
from tasks.row_documents import parquet_documents
from tasks.sessions import COPY, HeldEvents
from tasks.sources import Document, SourceError, load_document, read_document
from tasks.sources.document import read_lines

MAX_DOCUMENT_BYTES = 256 << 20
"""A longer document, line or member is refused: parsed, it would take several times as much memory."""

Loader = Callable[..., Document]
"""`load_document` for a format."""

_PIECE_BYTES = 16 << 20
_ZIP_ZSTANDARD = 93  # Python's zipfile reads it from 3.14 on


def _read_limited(stream: IO[bytes]) -> bytes:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise SourceError(f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    return data


def _member_documents(
    members: Iterable[tuple[str, bytes] | Unreadable], load: Loader
) -> Iterator[Document | Unreadable]:
    """Documents of the members (path, content); those that are single events become sessions, after the others."""
    held = HeldEvents(MAX_DOCUMENT_BYTES)
    for member in members:
        if isinstance(member, Unreadable):
            yield member
            continue
        path, data = member
        del member  # one member in memory at a time
        try:
            if held.take(path, data):
                continue
        except SourceError as error:
            yield Unreadable(path, str(error))
            continue
        document = _member_document(data, path, load)
        del data
        yield document
        del document
    yield from held.sessions()
    for path, data, is_copy in held.pages():
        yield Unreadable(path, COPY) if is_copy else _member_document(data, path, load)


def _member_document(data: bytes, path: str, load: Loader) -> Document | Unreadable:
    container = nested_container(data[:HEAD_BYTES])
    if container:
        return Unreadable(path, container)
    try:
        return load(data, path)
    except SourceError as error:
        return Unreadable(path, str(error))


# zip ------------------------------------------------------------------------------------------------------------


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_DOCUMENT_BYTES:
        raise SourceError(f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    if info.flag_bits & 1:
        raise SourceError("protected by a password: unpack it first")
    try:
        if info.compress_type != _ZIP_ZSTANDARD:
            with archive.open(info) as stream:
                return _read_limited(stream)
        raw = archive.fp
        if raw is None:
            raise SourceError("closed archive")
        raw.seek(info.header_offset + 26)  # two lengths of the local header, which may differ from the directory's
        name_bytes, extra_bytes = (int.from_bytes(raw.read(2), "little") for _ in range(2))
        raw.seek(info.header_offset + 30 + name_bytes + extra_bytes)
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw.read(info.compress_size))) as stream:
            return _read_limited(stream)
    except (*DAMAGE, OSError, RuntimeError) as error:
        raise SourceError(f"damaged member: {one_line(error)}") from error


def _is_eval_log(names: set[str]) -> bool:
    return "header.json" in names and any(name.startswith("samples/") for name in names)


def _eval_log(archive: zipfile.ZipFile, path: str, budget: Budget) -> Iterator[Document | Unreadable]:
    """inspect_ai's `.eval`: each sample with the header that says which task and model it belongs to."""
    header = read_document(_zip_member(archive, archive.getinfo("header.json")), path).first
    for info in archive.infolist():
        if not info.filename.startswith("samples/"):
            continue
        member = f"{path}!/{info.filename}"
        try:
            data = _zip_member(archive, info)
            budget.spend(len(data))
            sample = read_document(data, member)
            del data
        except SourceError as error:
            yield Unreadable(member, str(error))
            continue
        yield Document(member, sample.blake3, "json", {**header, "plan": {}, "samples": sample.records})
        del sample


def _zip_members(archive: zipfile.ZipFile, path: str, budget: Budget) -> Iterator[tuple[str, bytes] | Unreadable]:
    for info in archive.infolist():
        member = f"{path}!/{info.filename}"
        if info.filename.endswith("/"):
            continue
        if leads_outside(info.filename):
            yield Unreadable(member, "member name leads outside the archive")
            continue
        if (info.external_attr >> 28) == 0xA:
            yield Unreadable(member, "a link, not a file")
            continue
        try:
            data = _zip_member(archive, info)
        except SourceError as error:
            yield Unreadable(member, str(error))
            continue
        budget.spend(len(data))
        yield member, data
        del data


def _zip_documents(file: Path, load: Loader) -> Iterator[Document | Unreadable]:
    path = path_name(file)
    budget = Budget(file.stat().st_size)
    with zipfile.ZipFile(file) as archive:
        if _is_eval_log(set(archive.namelist())):
            yield from at_least_one(_eval_log(archive, path, budget))
        else:
            yield from at_least_one(_member_documents(_zip_members(archive, path, budget), load))


# tar and gzip ---------------------------------------------------------------------------------------------------


def _tar_members(file: Path, stream: IO[bytes] | Unpacked) -> Iterator[tuple[str, bytes] | Unreadable]:
    path = path_name(file)
    budget = Budget(file.stat().st_size)
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:
        for info in archive:
            member = f"{path}!/{valid_name(info.name)}"
            if info.isdir():
                continue
            if not info.isreg():
                yield Unreadable(member, "a link or device, not a file")
                continue
            if leads_outside(info.name):
                yield Unreadable(member, "member name leads outside the archive")
                continue
            budget.spend(info.size)
            if info.size > MAX_DOCUMENT_BYTES:
                yield Unreadable(member, f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
                continue
            content = archive.extractfile(info)
            yield member, content.read() if content else b""


def _gzip_documents(file: Path, source_format: str, blake3: str | None) -> Iterator[Document | Unreadable]:
    n_bytes = file.stat().st_size
    with gzip.open(file) as probe:
        head = Unpacked(probe, Budget(n_bytes)).read(HEAD_BYTES)
    is_tar = container_kind(head) == "tar"
    container = None if is_tar else nested_container(head)
    if container:
        raise SourceError(container)
    with gzip.open(file) as packed:
        stream = Unpacked(packed, Budget(n_bytes))
        if is_tar:
            load = partial(load_document, source_format=source_format)
            yield from at_least_one(_member_documents(_tar_members(file, stream), load))
            if stream.problem:
                raise SourceError(f"damaged archive: {stream.problem}")
        else:
            yield from _gzip_lines(file, stream, source_format, blake3)


def _gzip_lines(
    file: Path, stream: Unpacked, source_format: str, blake3: str | None
) -> Iterator[Document | Unreadable]:
    """Of a file that was cut, what stands before the cut; the cut is a problem of the last document."""
    last: Document | Unreadable | None = None
    try:
        for document in _stream_documents(file, stream, stream.read(_PIECE_BYTES + 1), source_format, blake3):
            if last is not None:
                yield last
            last = document
    except SourceError as error:
        raise SourceError(f"damaged archive: {stream.problem}" if stream.problem else str(error)) from error
    if stream.problem and isinstance(last, Document):
        last = replace(last, problems=(*last.problems, f"damaged archive: {stream.problem}"))
    if last is not None:
        yield last


# files larger than memory ---------------------------------------------------------------------------------------


def _stream_documents(
    file: Path, stream: IO[bytes] | Unpacked, head: bytes, source_format: str, blake3: str | None
) -> Iterator[Document | Unreadable]:
    """One document, or pieces of it where every line is a run of its own. `head`: what was read so far."""
    path = path_name(file)
    if len(head) <= _PIECE_BYTES:
        yield load_document(head, path, blake3=blake3, source_format=source_format)
        return
    blake3 = blake3 or file_blake3(file)
    if is_read_in_pieces(path, head, source_format):
        problems: list[str] = []
        for number, piece in whole_lines(stream, head, problems, MAX_DOCUMENT_BYTES, _PIECE_BYTES):
            lines = read_lines(piece.removeprefix(UTF8_MARK), number)
            if lines.values or lines.problems or problems:
                yield lines.document(path, blake3, problems)
            problems.clear()
        if problems:
            yield Document(path, blake3, "jsonl", [], tuple(problems))
        return
    rest = stream.read(MAX_DOCUMENT_BYTES + 1 - len(head))
    if len(head) + len(rest) > MAX_DOCUMENT_BYTES:
        raise SourceError(f"one document larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    yield load_document(head + rest, path, blake3=blake3, source_format=source_format)


def file_documents(
    file: Path, source_format: str = "auto", blake3: str | None = None
) -> Iterator[Document | Unreadable]:
    """The documents of one file, in order, one in memory at a time. What the file is, is told by its first bytes.

    `blake3` is the file's, where it is known.

    Raises:
        SourceError: the file as a whole cannot be read; documents given before that are good.
    """
    load = partial(load_document, source_format=source_format)
    try:
        with file.open("rb", buffering=0) as stream:
            n_bytes = os.fstat(stream.fileno()).st_size
            head = stream.read(min(n_bytes, _PIECE_BYTES) + 1) or b""  # a buffer of the file's size, not of the limit's
            foreign = foreign_container(head[:HEAD_BYTES])
            if foreign:
                raise SourceError(foreign)
            kind = container_kind(head[:HEAD_BYTES])
            if kind == "zip":
                yield from _zip_documents(file, load)
            elif kind == "gzip":
                yield from _gzip_documents(file, source_format, blake3)
            elif kind == "tar":
                stream.seek(0)
                yield from at_least_one(_member_documents(_tar_members(file, stream), load))
            elif kind == "parquet":
                yield from parquet_documents(file, blake3)
            else:
                yield from _stream_documents(file, stream, head, source_format, blake3)
    except DAMAGE as error:
        raise SourceError(f"damaged archive: {one_line(error)}") from error
    except OSError as error:
        raise ReadError(unreadable(error)) from error
