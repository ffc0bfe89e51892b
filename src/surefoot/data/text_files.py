"""Files of text: opened, unpacked and decoded, and their errors."""

import codecs
import gzip
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from surefoot.config.extras import needed_for
from surefoot.config.file_kinds import FileKind, cure_of, kind_of_bytes
from surefoot.config.paths import open_regular
from surefoot.data.scan import unreadable
from surefoot.errors import Command, DataError, Remedy, first_line

_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_LFS = b"version https://git-lfs.github.com/spec/v1"
_SAMPLE = 1 << 14  # bytes of a text that show its encoding
_WIDE = {"utf-32le": 4, "utf-32be": 4, "utf-16le": 2, "utf-16be": 2}  # and the bytes of a character
UNPACKED_BYTES = 1 << 28  # of a compressed file are always read
UNPACKED_RATIO = 200  # and of a larger one, at most so many times the bytes of the file
_PACKED_BYTES = 1 << 13  # of a compressed file, read at once: they may hold 30,000 times as much


def is_utf_16(data: bytes) -> bool:
    """Return True if text begins with the byte order mark of UTF-16."""
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


@contextmanager
def open_unpacked(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for reading, which may be compressed by gzip or zstandard; convert errors to a
    `DataError` with the path.

    Raises `ConfigError` for zstandard without its package.
    """
    try:
        with open_regular(path) as file:
            start = file.read(len(_LFS))
            file.seek(0)
            if start == _LFS:
                raise _lfs_pointer(path)
            if start.startswith(_GZIP):
                with gzip.open(file) as unzipped, _limited(unzipped, path) as limited:
                    yield limited
            elif start.startswith(_ZSTANDARD):
                with _open_zstandard(file, path) as unpacked, _limited(unpacked, path) as limited:
                    yield limited
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise truncated(path, problem) from problem
    except OSError as problem:
        raise unreadable(path, problem) from problem


def truncated(path: Path, why: object) -> DataError:
    """Return the error for a file that does not hold what its form promises."""
    return DataError(
        "file-truncated",
        problem=f"{path} is truncated or damaged: {why}",
        remedy="was a download or a copy interrupted? Fetch it again",
        path=path,
    )


def not_json(
    where: str, text: str | bytes, problem: Exception, *, remedy: str | None = None
) -> DataError:
    """Return the error for a line that is not JSON."""
    return DataError(
        "line-not-json",
        problem=f"{where} is not JSON: {first_line(problem)}",
        reason=f"it is {text[:60]!r}; expected one JSON object per line",
        remedy=remedy,
        where=where,
    )


def not_an_object(where: str, row: Any, *, remedy: str | None = None) -> DataError:
    """Return the error for a line of JSON that is no object."""
    return DataError(
        "row-not-an-object",
        problem=f"{where} is a {type(row).__name__}, not a JSON object",
        remedy=remedy,
        where=where,
    )


def text_with_nul(where: str) -> DataError:
    """Return the error for a text with a NUL character. `where` names its file and line."""
    return DataError(
        "text-with-nul",
        problem=f"{where} has a NUL character, so it is no plain text",
        reason="it is binary data, UTF-16 without a byte order mark, or a text that was damaged or"
        " padded",
        remedy="if it is text, remove the character: tr -d '\\000' < FILE > clean.txt",
        where=where,
    )


class _Unpacked(RawIOBase):
    """The content of a compressed file. Raises `DataError` where it becomes so much larger than the
    file that it is no text, but a bomb: a few bytes that fill the memory.
    """

    def __init__(self, source: BufferedIOBase, path: Path) -> None:
        self._source = source
        self._path = path
        self._count = 0
        self._limit = max(UNPACKED_BYTES, UNPACKED_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._source.readinto(buffer)
        self._count += count
        if self._count > self._limit:
            raise DataError(
                "unpacked-too-large",
                problem=f"{self._path} unpacks to more than {self._limit:,} bytes, more than"
                f" {UNPACKED_RATIO} times its size",
                reason="text does not shrink so much: the file may be made to fill the memory",
                remedy="if it is right, unpack it yourself",
                path=self._path,
                limit_bytes=self._limit,
            )
        return count


def _limited(source: BufferedIOBase, path: Path) -> BufferedReader:
    return BufferedReader(_Unpacked(source, path), buffer_size=1 << 17)


def _lfs_pointer(path: Path) -> DataError:
    return DataError(
        "git-lfs-pointer",
        problem=f"{path} is a pointer of Git LFS, not the file that it stands for",
        reason="the repository was cloned without its large files",
        remedy=Command("git lfs pull"),
        path=path,
    )


@contextmanager
def _open_zstandard(file: BufferedReader, path: Path) -> Iterator[BufferedIOBase]:
    with needed_for(f"the compressed file {path}", "zstandard"):
        import zstandard
    try:
        with BufferedReader(_ZstandardFrames(file)) as reader:
            yield reader
    except zstandard.ZstdError as problem:
        raise EOFError(str(problem)) from problem


class _ZstandardFrames(RawIOBase):
    """The content of the frames in a file, one after another. Raises `EOFError` for a frame that
    ends early, which zstandard's own reader takes for the end.
    """

    def __init__(self, file: BufferedReader) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(_PACKED_BYTES)
            if not packed:
                if self._frame.eof:
                    return 0
                raise EOFError("its last frame ends early")
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._unread = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count


def decode_utf8(data: bytes, where: str, *, first_line: int = 1) -> str:
    """Decode UTF-8 and drop the byte order mark; raise `DataError` with line and byte, both counted
    from 1.

    `where` is the file's name in the message. `first_line` is the line number of the first byte.

    >>> decode_utf8(b"caf" + bytes([0xE9]), "menu.txt")
    Traceback (most recent call last):
    surefoot.errors.DataError: menu.txt, line 1 is not UTF-8 text: byte 4 of the line is 0xe9
      it may be text of another encoding
      type: iconv -f latin1 -t utf-8 menu.txt > utf-8.txt
      [text-not-utf-8]
    """
    kind = kind_of_bytes(data) if first_line == 1 else None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        # `problem.start` excludes the byte order mark: convert it to a position in `data`
        position = problem.start + len(data) - len(problem.object)
        before = data[:position]
        line = before.count(b"\n") + first_line
        byte = position - before.rfind(b"\n")
        value = f"0x{data[position]:02x}"
        reason = "it may be text of another encoding"
        cure: Remedy = Command(f"iconv -f latin1 -t utf-8 {shlex.quote(where)} > utf-8.txt")
        if kind is not None:
            reason = f"by its first bytes it is {kind.name}"
            cure = cure_of(kind, where)
        raise DataError(
            "text-not-utf-8",
            problem=f"{where}, line {line} is not UTF-8 text: byte {byte} of the line is {value}",
            reason=reason,
            remedy=cure,
            path=where,
            line=line,
            byte=byte,
        ) from problem
    if kind is not None and kind.name == "a PDF":  # which may be UTF-8 by chance
        raise _other_kind(kind, where)
    return text


def _other_kind(kind: FileKind, where: str) -> DataError:
    return DataError(
        "text-of-other-kind",
        problem=f"{where} is {kind.name}, by its first bytes",
        remedy=cure_of(kind, where),
        path=where,
    )


def refuse_nul(data: bytes, path: Path) -> None:
    """Raise `DataError` for text with NUL bytes: binary data, or UTF-16 or UTF-32 without a mark."""
    first = data.find(b"\0")
    if first < 0 or is_utf_16(data):
        return
    kind = kind_of_bytes(data)
    if kind is not None:
        raise _other_kind(kind, str(path))
    encoding = _wide_encoding(data)
    if encoding is not None:
        raise DataError(
            "text-of-wide-characters",
            problem=f"{path} is {encoding.upper()} text without a byte order mark, not UTF-8",
            remedy=Command(f"iconv -f {encoding} -t utf-8 {shlex.quote(str(path))} > utf-8.txt"),
            path=path,
            encoding=encoding,
        )
    line = data.count(b"\n", 0, first) + 1
    raise text_with_nul(f"{path}, line {line}")


def _wide_encoding(data: bytes) -> str | None:
    """Return the encoding of two or four bytes in which the beginning is text with ASCII in it."""
    best = None
    most_ascii = 0
    for encoding, width in _WIDE.items():
        size = min(len(data), _SAMPLE) // width * width
        text = data[:size].decode(encoding, errors="replace")
        is_text = "\0" not in text and sum(map(_is_odd, text)) <= len(text) // 20
        ascii_count = sum(map(str.isascii, text))
        if is_text and ascii_count > most_ascii:
            best = encoding
            most_ascii = ascii_count
    return best


def _is_odd(letter: str) -> bool:
    return not letter.isprintable() and not letter.isspace()
