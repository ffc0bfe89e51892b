"""Records as append-only lines of JSON.

A non-finite value is null, and `nonfinite` holds its text ("NAME/NAME" for nested values). A
resumed run appends a resume record; `stream_records` then skips earlier records after the resumed
step, except events.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from surefoot.config.paths import open_regular
from surefoot.tracking.appended_file import READ_BYTES, AppendedFile
from surefoot.tracking.record import Record

_BLOCK_BYTES = 1 << 18  # of lines that are parsed together
LONGEST_LINE = 8_000_000  # bytes of one line; a longer line is not a record
_encoded = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_decoded = json.JSONDecoder().decode  # json.loads would detect the encoding of each text first


class JsonLines:
    """A file of records; a checkpoint saves the file's length and hash."""

    def __init__(self, path: Path, *, noted_bytes: int = 0) -> None:
        """Open the file and cut off an incomplete last line, unless a checkpoint's `noted_bytes`
        include the line.
        """
        self.appended, self.hash = AppendedFile(path), sha256()
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
        begin, start = sha256(), 0
        while start < length and (
            chunk := self.appended.read(start, min(length - start, READ_BYTES))
        ):
            begin.update(chunk)
            start += len(chunk)
        return start == length and begin.hexdigest() == digest

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
            plain[name] = {
                key: None if _is_strange(number) else number for key, number in value.items()
            }
            strange |= {
                f"{name}/{key}": repr(number)
                for key, number in value.items()
                if _is_strange(number)
            }
        elif _is_strange(value):
            plain[name], strange[name] = None, repr(value)
        else:
            plain[name] = value
    return _encoded(plain | ({"nonfinite": strange} if strange else {}))


def _is_strange(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def records(path: Path) -> list[Record]:
    """Return the records of a run, without incomplete lines and without records superseded by a
    resume.
    """
    return list(stream_records(path))


def stream_records(path: Path, *, size_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records of a run, without records superseded by a resume; the file is read twice.

    Incomplete lines, invalid lines, lines appended meanwhile, and bytes beyond the first
    `size_bytes` are skipped.
    """
    return chain.from_iterable(
        kept_records(*block) for block in line_blocks(path, size_bytes=size_bytes)
    )


def line_blocks(path: Path, *, size_bytes: int | None = None) -> Iterator[tuple[bytes, int | None]]:
    """Yield many lines at once, and the step after which a later resume supersedes their records,
    or None.
    """
    ends, steps, size = _resumed(path, size_bytes)
    end = 0
    for chunk in _whole_lines(path):
        yield from split_at_resumes(chunk[: max(0, size - end)], end, ends, steps)
        end += len(chunk)


def split_at_resumes(
    lines: bytes, start: int, ends: list[int], steps: list[int]
) -> Iterator[tuple[bytes, int | None]]:
    """Split lines that begin at byte `start` behind the resumes with these ends and steps; yield as
    `line_blocks` does.
    """
    while lines:
        later = bisect_right(ends, start)
        part = lines[: ends[later] - start] if later < len(ends) else lines
        yield part, min(steps[later:], default=None)
        start, lines = start + len(part), lines[len(part) :]


def kept_records(lines: bytes, last_step: int | None) -> list[Record]:
    """Parse lines; after the last step (if any), only events are kept."""
    return [
        record
        for record in parse_lines(lines)
        if record is not None
        and (last_step is None or record["step"] <= last_step or record["kind"] == "event")
    ]


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, many at once; a longer line than `LONGEST_LINE` is yielded in
    parts.
    """
    with open_regular(path) as file:
        while chunk := file.read(_BLOCK_BYTES):
            yield chunk if chunk.endswith(b"\n") else chunk + file.readline(LONGEST_LINE)


def resume_count(path: Path) -> int:
    """Return how often a run was resumed, by its records."""
    return len(_resumed(path, None)[0])


def _resumed(path: Path, most_bytes: int | None) -> tuple[list[int], list[int], int]:
    ends, steps, size = list[int](), list[int](), 0
    for block in _whole_lines(path):
        if most_bytes is None and b'"resume"' not in block:
            size += len(block)
            continue
        for text in BytesIO(block).readlines():
            if most_bytes is not None and size >= most_bytes:
                return ends, steps, size
            size += len(text)
            record = parse_record(text) if b'"resume"' in text else None
            if record is not None and record["kind"] == "resume":
                ends.append(size)
                steps.append(record["step"])
    return ends, steps, size


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
    for name, written in strange.items() if isinstance(strange, dict) else ():
        outer, _, inner = name.partition("/")
        group = record.get(outer)
        with suppress(TypeError, ValueError):
            if name in record or not isinstance(
                group, dict
            ):  # a metric's name also contains a slash
                record[name] = float(written)
            else:
                group[inner] = float(written)
    return record
