"""Records as append-only lines of JSON: the truth that reports and diagnosis read.

Numbers that are not finite are null, and `nonfinite` holds them (those of a dictionary as "NAME/NAME"). A resumed run
appends a `resumed` record; `stream_records` then drops earlier records past that step, except for events.
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
_LONGEST = 8_000_000  # bytes of one line: more is no record
_decoded = json.JSONDecoder().decode  # json.loads looks for the encoding of each text first


class AppendedFile:
    """A file that bytes are appended to; bytes that do not fit on the disk wait in memory for the next call."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        self.file = self._opened()

    def read(self, start: int, length: int) -> bytes:
        self.file.seek(start)
        return self.file.read(length)

    def append(self, content: bytes) -> None:
        """Append bytes. The operating system has them when this returns; if this raises `OSError`, they wait."""
        self.waiting += content
        while self.waiting:  # one write may take only a part
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def was_deleted(self) -> bool:
        """Whether the file's name is gone, or belongs to another file now."""
        return not is_named(self.path, self.file)

    def make_again(self) -> None:
        """Write the content of a deleted file again, under its name."""
        deleted, start = self.file, 0
        self.file = self._opened()
        self.file.truncate(0)
        deleted.seek(0)
        while chunk := deleted.read(_READ_BYTES):  # an open file stays readable after it was deleted
            start += self.file.write(chunk)
        deleted.close()

    def close(self) -> None:
        """Close the file; `OSError` if that loses bytes."""
        try:
            self.append(b"")
        finally:
            self.file.close()

    def _opened(self) -> FileIO:
        return os.fdopen(open_no_follow(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def is_named(path: Path, file: IO[bytes]) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


class JsonLines:
    """A file of records, with the length and hash of what it holds, which a checkpoint notes."""

    def __init__(self, path: Path, *, noted_bytes: int = 0) -> None:
        """Open the file to append; a torn last line is cut off, unless it is among the bytes that a checkpoint has noted."""
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
        """Append one line. If that raises `OSError`, the line waits in memory for the next call and is not lost."""
        self._append(line(record).encode(errors="backslashreplace") + b"\n")

    def holds(self, length: int, digest: str) -> bool:
        """Whether the file still begins with the bytes that a checkpoint noted."""
        begin, start = sha256(), 0
        while start < length and (chunk := self.appended.read(start, min(length - start, _READ_BYTES))):
            begin.update(chunk)
            start += len(chunk)
        return start == length and begin.hexdigest() == digest

    def state(self) -> tuple[int, str]:
        """Length in bytes and SHA-256 of the file as written so far."""
        return self.length, self.hash.hexdigest()

    def close(self) -> None:
        """Close the file; `OSError` if that loses lines."""
        self.appended.close()

    def _append(self, content: bytes) -> None:
        self.length += len(content)
        self.hash.update(content)
        self.appended.append(content)

    def _whole_lines(self) -> int:
        """Length of the file up to its last end of line."""
        end = self.length
        while end > 0:
            start = max(0, end - _READ_BYTES)
            chunk = self.appended.read(start, end - start)
            if b"\n" in chunk:
                return start + chunk.rindex(b"\n") + 1
            end = start
        return 0


def line(record: Record) -> str:
    """A record as one line of JSON.

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
    """The records of a run as one curve, without half-written lines and without those that a later resume has superseded."""
    return list(stream_records(path))


def stream_records(path: Path, *, size_bytes: int | None = None) -> Iterator[Record]:
    """The records of one curve, one at a time. The file is read twice, first to find its resumes.

    It leaves out lines appended meanwhile, bytes beyond the first `size_bytes`, half-written lines and lines that are not records.
    """
    ends, steps, size = _resumed(path, size_bytes)
    for index in range(len(steps) - 2, -1, -1):  # of all resumes from here on, the earliest step
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
    """The positions after the lines of resumes, the steps that these resumed from, and the number of bytes to read."""
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
    """The record in a line, with its non-finite numbers restored; None if the line does not hold one."""
    try:
        record = _decoded(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step")) is not int or record["step"] < 0:  # true is no step
        return None
    strange = record.pop("nonfinite", None)
    for name, written in strange.items() if isinstance(strange, dict) else ():
        outer, _, inner = name.partition("/")
        group = record.get(outer)
        with suppress(TypeError, ValueError):
            if name in record or not isinstance(group, dict):  # a score has a slash in its name too
                record[name] = float(written)
            else:
                group[inner] = float(written)
    return record
