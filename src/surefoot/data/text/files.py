"""Training text from the user's files, or from the source of Python's standard library."""

import codecs
import gzip
import os
import shlex
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from surefoot.config.extras import needed_for
from surefoot.config.file_kinds import FileKind, cure_of, kind_of_bytes
from surefoot.config.paths import open_regular
from surefoot.data.scan import TEXT, scan_as_before, unreadable
from surefoot.errors import Command, DataError, Remedy, Setting
from surefoot.tokenizers.tokenizer import Tokenizer

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TABLES = {
    "encodings",
    "pydoc_data",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}  # generated tables and text, drawings
_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_LFS = b"version https://git-lfs.github.com/spec/v1"
_SAMPLE = 1 << 14  # bytes of a text that show its encoding
_WIDE = {"utf-32le": 4, "utf-32be": 4, "utf-16le": 2, "utf-16be": 2}  # and the bytes of a character
UNPACKED_BYTES = 1 << 28  # of a compressed file are always read
UNPACKED_RATIO = 200  # and of a larger one, at most so many times the bytes of the file
_PACKED_BYTES = 1 << 13  # of a compressed file, read at once: they may hold 30,000 times as much

Part = TypeVar("Part", str, np.ndarray)


def is_utf_16(data: bytes) -> bool:
    """Return True if text begins with the byte order mark of UTF-16."""
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def check_parts(training: int, held_out: int, val_fraction: float, *, what: str, cure: str) -> None:
    """Raise `DataError` if a split leaves no text for training or validation. `what` is the counted
    unit, `cure` a fraction to try.
    """
    if not 0 < val_fraction < 1 or not training or not held_out:
        raise DataError(
            "part-without-data",
            problem=f"val_fraction = {val_fraction} of {training + held_out} {what} leaves"
            f" {training} for training and {held_out} for validation",
            remedy=f"give a fraction between 0 and 1, such as {cure}",
            setting="val_fraction",
            value=val_fraction,
            training=training,
            validation=held_out,
        )


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


def wrong_size(path: Path, size: int, expected: int) -> DataError:
    """Return the error for a file of tokens with more or fewer bytes than it is to have."""
    return DataError(
        "file-of-wrong-size",
        problem=f"{path} has {size:,} bytes, and its tokens need {expected:,}",
        remedy="copy it again, or write it again",
        path=path,
        size=size,
        expected=expected,
    )


def not_json(where: str, text: str | bytes, problem: Exception) -> DataError:
    """Return the error for a line that is not JSON."""
    return DataError(
        "line-not-json",
        problem=f"{where} is not JSON: {problem}",
        reason=f"it is {text[:60]!r}; expected one JSON object per line",
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
    raise DataError(
        "text-with-nul",
        problem=f"{path}, line {line} has a NUL byte, so it is no plain text",
        reason="it is binary data, or a text that was damaged or padded",
        remedy=[
            "if it is text, remove these bytes: tr -d '\\000' < FILE > clean.txt",
        ],
        path=path,
        line=line,
    )


def _wide_encoding(data: bytes) -> str | None:
    """Return the encoding of two or four bytes in which the beginning is text with ASCII in it."""
    best, most_ascii = None, 0
    for encoding, width in _WIDE.items():
        text = data[: min(len(data), _SAMPLE) // width * width].decode(encoding, errors="replace")
        odd = sum(not (letter.isprintable() or letter.isspace()) for letter in text)
        of_ascii = sum(letter.isascii() for letter in text)
        if odd <= len(text) // 20 and "\0" not in text and of_ascii > most_ascii:
            best, most_ascii = encoding, of_ascii
    return best


def texts_as_before(path: Path) -> dict[str, str]:
    """Read text files as runs did that began before behavior 10: every kind of file that is named,
    and the text files of a directory.
    """
    if path.is_dir():
        documents = _read(scan_as_before(path, TEXT).files, below=path)
    else:
        documents = {path.name: _read_text(path)}
    if not any(text.strip() for text in documents.values()):
        raise without_text(path)
    return documents


def without_text(path: Path) -> DataError:
    """Return the error for files without a character."""
    return DataError(
        "no-text", problem=f"{path} holds no text: it is empty or only white space", path=path
    )


def stdlib_documents() -> dict[str, str]:
    """Return the source of the running Python's standard library as {name: text}: about 10 MB in
    500 files, without tests.

    >>> "json/decoder.py" in stdlib_documents()
    True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_source_files(root), key=lambda file: file.parts)
    if not files:
        raise DataError(
            "stdlib-without-source",
            problem=f"this Python has no source files of its standard library in {root}",
            remedy=("give a text file or a directory:", Setting("data.path")),
            path=root,
        )
    return _read(files, below=root)


def split_documents(
    documents: Mapping[str, str], *, val_fraction: float
) -> tuple[list[str], list[str]]:
    """Split documents into training and validation documents by a hash of their names; a single
    document is cut near its end.

    The validation documents hold about `val_fraction` of the characters, and at most 2 *
    `val_fraction`. If every document is too large, the smallest is chosen. If documents are added,
    most choices stay the same. Raises `DataError` if a part is empty.

    >>> split_documents({"a": "abcdefghij"}, val_fraction=0.2)
    (['abcdefgh'], ['ij'])
    """
    if len(documents) == 1:
        beginning, end = split_sequence(next(iter(documents.values())), val_fraction=val_fraction)
        return [beginning], [end]
    wanted = val_fraction * sum(len(text) for text in documents.values())
    held_out: set[str] = set()
    so_far = 0
    for name in sorted(
        documents, key=lambda name: blake2b(name.encode(errors="surrogateescape")).digest()
    ):
        if so_far >= wanted:
            break
        if so_far + len(documents[name]) <= 2 * wanted:  # a very large document stays in training
            held_out.add(name)
            so_far += len(documents[name])
    if not held_out:
        held_out.add(min(documents, key=lambda name: (len(documents[name]), name)))
    check_parts(
        len(documents) - len(held_out),
        len(held_out),
        val_fraction,
        what="documents",
        cure="0.1, or add documents",
    )
    training = [text for name, text in documents.items() if name not in held_out]
    return training, [text for name, text in documents.items() if name in held_out]


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all documents in one array, with `eos_id` (if the tokenizer has one)
    after each document.

    >>> from surefoot.tokenizers import ByteTokenizer
    >>> encode_documents(["ab", "c"], ByteTokenizer()).tolist()
    [97, 98, 256, 99, 256]
    """
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    parts = [
        part
        for tokens in tokenizer.encode_all(documents)
        for part in (tokens, np.array(end, dtype=tokens.dtype))
    ]
    return np.concatenate(parts)


def split_sequence(sequence: Part, *, val_fraction: float = 0.1) -> tuple[Part, Part]:
    """Split text or tokens into a training part and a validation part; the last `val_fraction` is
    for validation.

    >>> split_sequence("abcdefghij", val_fraction=0.2)
    ('abcdefgh', 'ij')
    """
    cut = len(sequence) - round(len(sequence) * val_fraction) if 0 < val_fraction < 1 else 0
    what = "characters" if isinstance(sequence, str) else "tokens"
    check_parts(cut, len(sequence) - cut, val_fraction, what=what, cure="0.1, or add text")
    return sequence[:cut], sequence[cut:]


def _source_files(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [
            name for name in below if name not in _NOT_SOURCE | _TABLES
        ]  # site-packages may be very large
        # _sysconfigdata is generated when Python is built, and differs between machines
        yield from (
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _read_text(file: Path) -> str:
    with open_unpacked(file) as source:
        return decode_utf8(source.read(), str(file))


def _read(files: Iterable[Path], *, below: Path) -> dict[str, str]:
    texts = {file.relative_to(below).as_posix(): _read_text(file) for file in files}
    return {
        name: text if text.endswith("\n") else text + "\n" for name, text in texts.items() if text
    }
