"""Records as append-only lines of JSON.

A non-finite value is null, and `nonfinite` holds its text ("NAME/NAME" for nested values). A
resumed run appends a resume record; earlier records after the resumed step are then skipped, except
events.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from surefoot.config.paths import open_regular
from surefoot.tracking.appended_file import READ_BYTES, AppendedFile
from surefoot.tracking.record import Record

BLOCK_BYTES = 1 << 18  # of lines that are parsed together
_TAIL_BYTES = 256  # compared to notice that a file was replaced
LONGEST_LINE = 8_000_000  # bytes of one line; a longer line is not a record
_encoded = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_decoded = json.JSONDecoder().decode  # json.loads would detect the encoding of each text first


class JsonLines:
    """A file of records; a checkpoint saves the file's length and hash."""

    def __init__(self, path: Path, *, noted_bytes: int = 0) -> None:
        """Open the file and cut off an incomplete last line, unless a checkpoint's `noted_bytes`
        include the line.
        """
        self.appended = AppendedFile(path)
        self.hash = sha256()
        self.length = os.fstat(self.appended.file.fileno()).st_size
        whole_lines = self._whole_lines()
        if noted_bytes <= whole_lines < self.length:
            self.appended.file.truncate(whole_lines)
            self.length = whole_lines
        for start in range(0, self.length, READ_BYTES):
            self.hash.update(self.appended.read(start, min(READ_BYTES, self.length - start)))
        if whole_lines < self.length:
            self._append(b"\n")

    def write(self, record: Record) -> None:
        """Append one line; if `write` raises `OSError`, the line stays in memory until the next
        call.
        """
        self._append(line(record).encode(errors="backslashreplace") + b"\n")

    def holds(self, length: int, digest: str) -> bool:
        """Return True if the file still begins with the bytes that a checkpoint recorded."""
        hash_of_begin = sha256()
        start = 0
        while start < length:
            chunk = self.appended.read(start, min(length - start, READ_BYTES))
            if not chunk:
                return False
            hash_of_begin.update(chunk)
            start += len(chunk)
        return hash_of_begin.hexdigest() == digest

    def state(self) -> tuple[int, str]:
        return self.length, self.hash.hexdigest()

    def close(self) -> None:
        """Close the file; raise `OSError` if lines are lost."""
        self.appended.close()

    def _append(self, content: bytes) -> None:
        self.length += len(content)
        self.hash.update(content)
        self.appended.append(content)

    def _whole_lines(self) -> int:
        end = self.length
        while end > 0:
            start = max(0, end - READ_BYTES)
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
    with suppress(ValueError):  # nearly every record is finite
        return _encoded(record)
    plain: Record = {}
    strange: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            plain[name] = dict(value)
            for key, number in value.items():
                if _is_strange(number):
                    plain[name][key] = None
                    strange[f"{name}/{key}"] = repr(number)
        elif _is_strange(value):
            plain[name] = None
            strange[name] = repr(value)
        else:
            plain[name] = value
    if strange:
        plain["nonfinite"] = strange
    return _encoded(plain)


def _is_strange(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def records(path: Path) -> list[Record]:
    """Return all records of a run, as `read_records` yields them."""
    return list(read_records(path))


def read_records(path: Path, *, size_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records of a run, without records superseded by a resume. Nothing is yielded if
    there is no file.

    Incomplete lines, invalid lines, lines appended meanwhile, and bytes beyond the first
    `size_bytes` are skipped. Raises `OSError` if the file cannot be read.
    """
    if not path.exists():
        return
    size = path.stat().st_size
    reader = RecordReader(path, size_bytes=size if size_bytes is None else min(size, size_bytes))
    has_begun = False
    while True:
        news = reader.read()
        if news.starts_over and has_begun:  # another file has its name now
            return
        yield from news.records
        has_begun = True
        if not news.has_more:
            return


class News(NamedTuple):
    """The next records of a run. `starts_over`: they follow no earlier ones."""

    records: list[Record]
    starts_over: bool
    has_more: bool


@dataclass(eq=False)
class RecordReader:
    """Reads the records of a file that grows. Only new bytes are read, unless a resume supersedes
    records that were read, or another file has the same name.
    """

    path: Path
    size_bytes: int | None = None  # further bytes are not read
    file: list[int] = field(default_factory=lambda: [0, 0])  # device and inode
    offset: int = 0  # bytes of the lines that were read
    searched: int = 0  # bytes in which all resumes are known
    size_and_time: list[int] = field(default_factory=lambda: [0, 0])  # of the last change
    tail: bytes = b""  # the last bytes before `offset`
    resumed_at: list[int] = field(default_factory=list)
    resumed_steps: list[int] = field(default_factory=list)
    last_step: int = 0  # of the records that were read

    def read(self, *, most_bytes: int = BLOCK_BYTES) -> News:
        """Read the next lines. Raises `OSError` if the file cannot be read."""
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            size = status.st_size if self.size_bytes is None else self.size_bytes
            file.seek(max(0, self.offset - len(self.tail)))
            is_same = self.file == [status.st_dev, status.st_ino] and self.offset <= size
            if not is_same or file.read(len(self.tail)) != self.tail:
                self._start_over()
                self.resumed_at = []
                self.resumed_steps = []
                self.searched = 0
            self.file = [status.st_dev, status.st_ino]
            self.size_and_time = [status.st_size, status.st_mtime_ns]
            starts_over = not self.offset
            file.seek(self.offset)
            lines = _whole_lines(file, size, most_bytes=most_bytes)
            has_more = bool(lines) and self.offset + len(lines) < size
            supersedes = self._search(lines, self.offset)
            while self.searched < size and has_more:
                file.seek(self.searched)
                block = _whole_lines(file, size, most_bytes=most_bytes)
                if not block:
                    break
                supersedes |= self._search(block, self.searched)
        if supersedes:
            self._start_over()
            return News([], starts_over=True, has_more=True)
        news = list[Record]()
        for part, last_step in split_at_resumes(
            lines, self.offset, self.resumed_at, self.resumed_steps
        ):
            news += kept_records(part, last_step)
        self.offset += len(lines)
        self.tail = (self.tail + lines)[-_TAIL_BYTES:]
        self.last_step = max([self.last_step, *(record["step"] for record in news)])
        return News(news, starts_over, has_more)

    def _start_over(self) -> None:
        self.offset = 0
        self.tail = b""
        self.last_step = 0

    def _search(self, lines: bytes, start: int) -> bool:
        """Note the resumes in lines that begin at byte `start`; return True if one supersedes
        records that were read.
        """
        supersedes = False
        position = start
        for text in BytesIO(lines) if b'"resume"' in lines else ():
            position += len(text)
            record = parse_record(text) if b'"resume"' in text else None
            if record is not None and record["kind"] == "resume" and position > self.searched:
                self.resumed_at.append(position)
                self.resumed_steps.append(record["step"])
                supersedes |= record["step"] < self.last_step
        self.searched = max(self.searched, start + len(lines))
        return supersedes


def _whole_lines(file: BinaryIO, size: int, *, most_bytes: int) -> bytes:
    """Read the next lines up to byte `size` of a file, without a last one that is not complete. A
    line longer than `LONGEST_LINE` is read in parts.
    """
    left = size - file.tell()
    chunk = file.read(min(most_bytes, left))
    if b"\n" not in chunk and len(chunk) < left:
        chunk += file.read(min(LONGEST_LINE, left) - len(chunk))
    end = chunk.rfind(b"\n") + 1
    is_at_end = len(chunk) >= left
    if is_at_end and parse_record(chunk[end:]) is not None:  # only its line feed is missing
        return chunk
    if end == 0 and not is_at_end:  # a part of a longer line
        return chunk
    return chunk[:end]


def split_at_resumes(
    lines: bytes, start: int, ends: list[int], steps: list[int]
) -> Iterator[tuple[bytes, int | None]]:
    """Split lines that begin at byte `start` behind the resumes with these ends and steps; yield
    each part with the step after which a later resume supersedes its records, or None.
    """
    while lines:
        later = bisect_right(ends, start)
        part = lines[: ends[later] - start] if later < len(ends) else lines
        yield part, min(steps[later:], default=None)
        start += len(part)
        lines = lines[len(part) :]


def kept_records(lines: bytes, last_step: int | None) -> list[Record]:
    """Parse lines; after the last step (if any), only events are kept."""
    records = [record for record in parse_lines(lines) if record is not None]
    if last_step is None:
        return records
    return [
        record for record in records if record["step"] <= last_step or record["kind"] == "event"
    ]


def resume_count(path: Path) -> int:
    """Return how often a run was resumed, by its records."""
    reader = RecordReader(path)
    reader.read()  # which finds the resumes of the whole file
    return len(reader.resumed_at)


def parse_lines(lines: bytes) -> list[Record | None]:
    """Parse each line as `parse_record` does. Lines as surefoot writes them are parsed together,
    which takes half the time.
    """
    count = lines.count(b"\n")
    if lines.startswith(b"{") and lines.endswith(b"}\n") and lines.count(b"}\n{") == count - 1:
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            together: list[Any] = orjson.loads(b"[" + lines[:-1].replace(b"\n", b",") + b"]")
            if len(together) == count:
                steps = [record["step"] for record in together]
                kinds = [record["kind"] for record in together]
                are_usual = (
                    b'"nonfinite"' not in lines
                    and set(map(type, kinds)) == {str}
                    and set(map(type, steps)) == {int}
                    and min(steps) >= 0
                )
                return together if are_usual else [_checked(record) for record in together]
    return [parse_record(text) for text in BytesIO(lines).readlines()]


def parse_record(text: bytes) -> Record | None:
    """Parse a line as a record and restore its non-finite values; return None if the line is not a
    record.
    """
    try:
        return _checked(_decoded(text.decode()))
    except (ValueError, RecursionError):
        return None


def _checked(record: Any) -> Record | None:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step")) is not int or record["step"] < 0:  # excludes booleans
        return None
    strange = record.pop("nonfinite", None)
    if not isinstance(strange, dict):
        return record
    for name, text in strange.items():
        outer, _, inner = name.partition("/")
        group = record.get(outer)
        with suppress(TypeError, ValueError):
            # a metric's name also contains a slash
            if name in record or not isinstance(group, dict):
                record[name] = float(text)
            else:
                group[inner] = float(text)
    return record
