"""Records as append-only lines of JSON: the truth that reports and diagnosis read.

Floats are written whole, those that are not finite as null beside `nonfinite`, which says what they were (inside of a dictionary
as "NAME/NAME"). A resumed run appends a `resumed` record; what an interrupted sitting wrote past that step is dropped by
`records`, not from the file, but for what happened to the run (`event`).
"""

from __future__ import annotations

import json
import math
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from surefoot.record import Record

_READ_BYTES = 1 << 20


class JsonLines:
    """A file of records, with the length and hash of what it holds, which a checkpoint notes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length, self.hash, last = 0, sha256(), b"\n"
        with path.open("rb") if path.exists() else BytesIO() as file:
            while held := file.read(_READ_BYTES):
                self.length, last = self.length + len(held), held
                self.hash.update(held)
        self.waiting = b""  # what the disk had no room for
        self.file = path.open("ab", buffering=0)
        if not last.endswith(b"\n"):  # a kill in the middle of a line
            self._append(b"\n")

    def write(self, record: Record) -> None:
        """Append one line; it is in the hands of the operating system when this returns.

        Where that raises `OSError`, the line waits in memory for the next call, and nothing is lost while the process lives.
        """
        self._append(line(record).encode(errors="backslashreplace") + b"\n")

    def holds(self, length: int, digest: str) -> bool:
        """Whether the file still begins with what a checkpoint noted of it."""
        begin, left = sha256(), length
        with self.path.open("rb") as file:
            while left and (held := file.read(min(left, _READ_BYTES))):
                begin.update(held)
                left -= len(held)
        return not left and begin.hexdigest() == digest

    def state(self) -> tuple[int, str]:
        """Length in bytes and SHA-256 of the file as written so far."""
        return self.length, self.hash.hexdigest()

    def close(self) -> None:
        """Close the file; `OSError` where lines are lost by that."""
        try:
            self._append(b"")
        finally:
            self.file.close()

    def _append(self, data: bytes) -> None:
        self.length += len(data)
        self.hash.update(data)
        self.waiting += data
        while self.waiting:  # one write may take only a part
            written = self.file.write(self.waiting)
            self.waiting = self.waiting[written:]


def line(record: Record) -> str:
    """A record as one line of JSON.

    >>> line({"step": 3, "loss": float("nan"), "norms": {"up": float("inf")}})
    '{"step": 3, "loss": null, "norms": {"up": null}, "nonfinite": {"loss": "nan", "norms/up": "inf"}}'
    """
    plain: Record = {}
    strange: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            plain[name] = {key: None if _is_strange(held) else held for key, held in value.items()}
            strange |= {f"{name}/{key}": repr(held) for key, held in value.items() if _is_strange(held)}
        elif _is_strange(value):
            plain[name], strange[name] = None, repr(value)
        else:
            plain[name] = value
    return json.dumps(plain | ({"nonfinite": strange} if strange else {}), allow_nan=False, ensure_ascii=False)


def records(path: Path) -> list[Record]:
    """The records of a run, one curve: without those that a later resume has superseded, nor half-written lines."""
    kept: list[Record] = []
    for text in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
            continue
        if record["kind"] == "resumed":
            kept = [held for held in kept if held["step"] <= record["step"] or held["kind"] == "event"]
        for name, value in record.pop("nonfinite", {}).items():
            outer, _, inner = name.partition("/")
            if name in record or not isinstance(record.get(outer), dict):  # a score has a slash in its name too
                record[name] = float(value)
            else:
                record[outer][inner] = float(value)
        kept.append(record)
    return kept


def _is_strange(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
