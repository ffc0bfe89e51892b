"""The records of a run one at a time, however many there are.

Those that a later resume has superseded are left out, but for what happened to the run.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from surefoot.config.paths import open_regular
from surefoot.record import Record

_decoded = json.JSONDecoder().decode  # json.loads looks for the encoding of each text first
_LONGEST = 8_000_000  # bytes of one line: more is no record


def records(path: Path) -> list[Record]:
    """The records of a run, one curve: without those that a later resume has superseded, nor half-written lines."""
    return list(streamed(path))


def streamed(path: Path, *, size_bytes: int | None = None) -> Iterator[Record]:
    """What `records` gives, without holding it: the file is read twice, first for where it was gone on from.

    What is appended meanwhile is not read, nor, where that is given, what stands behind the first `size_bytes`. Half-written
    lines, and what is no record, are left out.
    """
    ends, steps, size = _resumed(path, size_bytes)
    for place in range(len(steps) - 2, -1, -1):  # of all resumes from here on, the earliest step
        steps[place] = min(steps[place], steps[place + 1])
    end = 0
    with open_regular(path) as file:
        while end < size:
            text = file.readline(_LONGEST)
            if not text:
                return
            end += len(text)
            record = parse_record(text)
            if record is None:
                continue
            later = bisect_right(ends, end)
            if later < len(steps) and record["step"] > steps[later] and record["kind"] != "event":
                continue
            yield record


def _resumed(path: Path, most_bytes: int | None) -> tuple[list[int], list[int], int]:
    """Where in the file lines of a resume end, the steps that these went on from, and how much of the file there is to read."""
    ends, steps, size = list[int](), list[int](), 0
    with open_regular(path) as file:
        while (most_bytes is None or size < most_bytes) and (text := file.readline(_LONGEST)):
            size += len(text)
            if b'"resumed"' in text:
                record = parse_record(text)
                if record is not None and record["kind"] == "resumed":
                    ends.append(size)
                    steps.append(record["step"])
    return ends, steps, size


def parse_record(text: bytes) -> Record | None:
    """The record in a line, with its numbers that are not finite put back; None where there is none."""
    try:
        record = _decoded(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return None
    strange = record.pop("nonfinite", None)
    for name, written in strange.items() if isinstance(strange, dict) else ():
        outer, _, inner = name.partition("/")
        try:
            value = float(written)
        except (TypeError, ValueError):
            continue
        held = record.get(outer)
        if name in record or not isinstance(held, dict):  # a score has a slash in its name too
            record[name] = value
        else:
            held[inner] = value
    return record
