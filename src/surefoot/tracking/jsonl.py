"""Records as append-only lines of JSON, read by reports and diagnosis.

A non-finite value is null, and `nonfinite` holds its text ("NAME/NAME" for nested values). A resumed run
appends a resume record. `stream_records` then drops earlier records after that step, except events.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import IO

from surefoot.config.paths import open_no_follow, open_regular
from surefoot.tracking.record import Record

_READ_BYTES = 1 << 20
_LONGEST = 8_000_000  # bytes of one line; a longer line is not a record
_decoded = json.JSONDecoder().decode  # json.loads would detect the encoding of each text first


class AppendedFile:
    """A file opened for appending. Bytes that do not fit on the disk stay in memory until the next call."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        self.file = self._opened()

    def read(self, start: int, length: int) -> bytes:
        self.file.seek(start)
        return self.file.read(length)

    def append(self, content: bytes) -> None:
        """Append bytes and hand them to the operating system. If `append` raises `OSError`, the bytes stay in memory."""
        self.waiting += content
        while self.waiting:  # one write may accept only a part
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def was_deleted(self) -> bool:
        """Return whether the file's path is missing or belongs to another file."""
        return not is_named(self.path, self.file)

    def make_again(self) -> None:
        """Recreate a deleted file with its content at the same path."""
        deleted, start = self.file, 0
        self.file = self._opened()
        self.file.truncate(0)
        deleted.seek(0)
        while chunk := deleted.read(_READ_BYTES):  # an open file stays readable after its deletion
            start += self.file.write(chunk)
        deleted.close()

    def close(self) -> None:
        """Close the file. Raises `OSError` if bytes are lost."""
        try:
            self.append(b"")
        finally:
            self.file.close()

    def _opened(self) -> FileIO:
        return os.fdopen(open_no_follow(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def is_named(path: Path, file: IO[bytes]) -> bool:
    """Return whether an open file is still the file at this path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


class JsonLines:
    """A file of records. A checkpoint saves the file's length and hash."""

    def __init__(self, path: Path, *, noted_bytes: int = 0) -> None:
        """Open the file for appending. A torn last line is cut off, unless a checkpoint's `noted_bytes` include the line."""
        self.appended, self.hash = AppendedFile(path), sha256()
        self.length = os.fstat(self.appended.file.fileno()).st_size
        whole_lines = self._whole_lines()
        if noted_bytes <= whole_lines < self.length:
            self.appended.file.truncate(whole_lines)
            self.length = whole_lines
        for start in range(0, self.length, _READ_BYTES):
            self.hash.update(self.appended.read(start, min(_READ_BYTES, self.length - start)))
        if whole_lines < self.length:
            self._append(b"\n")

    def write(self, record: Record) -> None:
        """Append one line. If `write` raises `OSError`, the line stays in memory until the next call and is not lost."""
        self._append(line(record).encode(errors="backslashreplace") + b"\n")

    def holds(self, length: int, digest: str) -> bool:
        """Return whether the file still begins with the bytes that a checkpoint recorded."""
        begin, start = sha256(), 0
        while start < length and (chunk := self.appended.read(start, min(length - start, _READ_BYTES))):
            begin.update(chunk)
            start += len(chunk)
        return start == length and begin.hexdigest() == digest

    def state(self) -> tuple[int, str]:
        """Return the length in bytes and the SHA-256 of all lines written so far."""
        return self.length, self.hash.hexdigest()

    def close(self) -> None:
        """Close the file. Raises `OSError` if lines are lost."""
        self.appended.close()

    def _append(self, content: bytes) -> None:
        self.length += len(content)
        self.hash.update(content)
        self.appended.append(content)

    def _whole_lines(self) -> int:
        """Return the length of the file up to its last line break."""
        end = self.length
        while end > 0:
            start = max(0, end - _READ_BYTES)
            chunk = self.appended.read(start, end - start)
            if b"\n" in chunk:
                return start + chunk.rindex(b"\n") + 1
            end = start
        return 0


def line(record: Record) -> str:
    """Format a record as one line of JSON.

    >>> line({"step": 3, "loss": float("nan"), "norms": {"up": float("inf")}})
    '{"step": 3, "loss": null, "norms": {"up": null}, "nonfinite": {"loss": "nan", "norms/up": "inf"}}'
    """
    plain: Record = {}
    strange: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            plain[name] = {key: None if _is_strange(number) else number for key, number in value.items()}
            strange |= {f"{name}/{key}": repr(number) for key, number in value.items() if _is_strange(number)}
        elif _is_strange(value):
            plain[name], strange[name] = None, repr(value)
        else:
            plain[name] = value
    return json.dumps(plain | ({"nonfinite": strange} if strange else {}), allow_nan=False, ensure_ascii=False)


def _is_strange(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def records(path: Path) -> list[Record]:
    """Read the records of a run as one curve, without incomplete lines and without records superseded by a later resume."""
    return list(stream_records(path))


def stream_records(path: Path, *, size_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records of one curve one at a time. The file is read twice, first to find the resume records.

    Skips lines appended meanwhile, bytes beyond the first `size_bytes`, incomplete lines and lines that are not records.
    """
    ends, steps, size = _resumed(path, size_bytes)
    for index in range(len(steps) - 2, -1, -1):  # the earliest step of all resumes from here on
        steps[index] = min(steps[index], steps[index + 1])
    end = 0
    with open_regular(path) as file:
        while end < size and (text := file.readline(_LONGEST)):
            end += len(text)
            record, later = parse_record(text), bisect_right(ends, end)
            if record is None:
                continue
            if later == len(steps) or record["step"] <= steps[later] or record["kind"] == "event":
                yield record


def _resumed(path: Path, most_bytes: int | None) -> tuple[list[int], list[int], int]:
    """Return the byte positions after the resume records, their steps, and the number of bytes to read."""
    ends, steps, size = list[int](), list[int](), 0
    with open_regular(path) as file:
        while (most_bytes is None or size < most_bytes) and (text := file.readline(_LONGEST)):
            size += len(text)
            record = parse_record(text) if b'"resume"' in text else None
            if record is not None and record["kind"] == "resume":
                ends.append(size)
                steps.append(record["step"])
    return ends, steps, size


def parse_record(text: bytes) -> Record | None:
    """Parse the record in a line and restore its non-finite values. Returns None if the line is not a record."""
    try:
        record = _decoded(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step")) is not int or record["step"] < 0:  # true is not a step
        return None
    strange = record.pop("nonfinite", None)
    for name, written in strange.items() if isinstance(strange, dict) else ():
        outer, _, inner = name.partition("/")
        group = record.get(outer)
        with suppress(TypeError, ValueError):
            if name in record or not isinstance(group, dict):  # a metric's name also contains a slash
                record[name] = float(written)
            else:
                group[inner] = float(written)
    return record
