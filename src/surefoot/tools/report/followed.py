"""The records of a run that may go on, and their file among the reader's caches; only new bytes of
metrics.jsonl are read.

The cache has a head in JSON (the position in the file, and what a row of a page shows) and the
content of `RunRecords` as arrays. Each part has a hash. A file with another hash, format, version or
run is ignored. Nothing is written into the run's directory.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypedDict
from zipfile import BadZipFile

import numpy as np

from surefoot.checkpoint.state_json import misshapen
from surefoot.config.paths import open_regular, user_cache, write_whole
from surefoot.tracking.jsonl import LONGEST_LINE, RecordReader
from surefoot.tracking.run_reader import surefoot_version
from surefoot.tracking.run_records import RunRecords

SLICE_BYTES = 2_000_000  # read at once
_FORMAT = f"surefoot run cache 4 {surefoot_version()}"
_MOST_FILES = 2_000  # of the cache; the oldest are deleted
_POSITION = (
    "file",
    "offset",
    "searched",
    "size_and_time",
    "resumed_at",
    "resumed_steps",
    "last_step",
)
BROKEN = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    BadZipFile,
)


class RunRow(TypedDict):
    """The values of a run on the page of a directory, without its curves."""

    step: int
    planned: int | None
    state: str
    records: int
    eta_s: float | None
    metric: str | None
    last: float | None
    best: float | None
    best_step: int | None
    spark: list[list[float]]  # points of the main metric
    findings: list[dict[str, Any]]
    alerted: list[str]  # names of findings that were sent


class Head(TypedDict):
    """The first line of a cache file: the position in the run's records, and the row."""

    format: str
    run: str
    file: list[int]  # device and inode
    offset: int
    searched: int
    size_and_time: list[int]  # size and time of the last change
    tail: str  # hexadecimal
    rest: str  # hash of the other lines
    resumed_at: list[int]
    resumed_steps: list[int]
    last_step: int
    row: RunRow


@dataclass(eq=False)
class FollowedRun:
    """The records of a run, to which `advance` adds the next ones."""

    path: Path
    reader: RecordReader = field(init=False)
    records: RunRecords = field(default_factory=RunRecords)

    def __post_init__(self) -> None:
        self.reader = RecordReader(self.path / "metrics.jsonl")

    def advance(self, *, most_bytes: int = SLICE_BYTES) -> bool:
        """Read the next lines; return True if there are more. Raises `OSError` if the file cannot
        be read.
        """
        news = self.reader.read(most_bytes=most_bytes)
        if news.starts_over:
            self.records = RunRecords()
        self.records.extend(news.records)
        return news.has_more

    def save(self, row: RunRow) -> None:
        """Write the cache; a failure is ignored."""
        arrays = {}
        states = {}
        for name, table in self.records.tables().items():
            states[name] = table.state()
            for array, values in table.arrays().items():
                arrays[f"{name}/{array}"] = values
        state = json.dumps({"records": self.records.state(), "tables": states})
        content = BytesIO()
        np.savez(content, state=np.frombuffer(state.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        rest = content.getvalue()
        head = {
            "format": _FORMAT,
            "run": str(self.path.resolve()),
            "row": row,
            "tail": self.reader.tail.hex(),
            "rest": _digest(rest),
        }
        for name in _POSITION:
            head[name] = getattr(self.reader, name)
        first = json.dumps(head).encode()
        with suppress(OSError):
            file = _cache_file(self.path)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(file, b"\n".join([_digest(first).encode(), first, rest]))


def read_head(path: Path) -> Head | None:
    """Return the head of a run's cache, or None without a cache that this version wrote for this
    run.
    """
    with suppress(*BROKEN), open_regular(_cache_file(path)) as file:
        return _head(path, file)
    return None


def read_followed(path: Path) -> FollowedRun:
    """Return a run with the content of its cache, or without records if the cache is absent or
    unusable.
    """
    with suppress(*BROKEN), open_regular(_cache_file(path)) as file:
        head = _head(path, file)
        rest = file.read()
        if head is not None and _digest(rest) == head["rest"]:
            return _restored(path, head, rest)
    return FollowedRun(path)


def _restored(path: Path, head: Head, rest: bytes) -> FollowedRun:
    run = FollowedRun(path)
    with np.load(BytesIO(rest)) as arrays:
        state = json.loads(arrays["state"].tobytes())
        run.records.restore(state["records"])
        for name, table in run.records.tables().items():
            content = {array: arrays[f"{name}/{array}"] for array in table.arrays()}
            table.restore(content, state["tables"][name])
    for name in _POSITION:
        setattr(run.reader, name, head[name])  # type: ignore[literal-required]
    run.reader.tail = bytes.fromhex(head["tail"])
    return run


def prune_cache() -> None:
    """Delete the oldest files of the cache beyond a limit."""
    with suppress(OSError):
        files = sorted(user_cache("runs").glob("*.cache"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST_FILES]:
            file.unlink()


def _head(path: Path, file: IO[bytes]) -> Head | None:
    digest = file.readline(100).strip()
    first = file.readline(LONGEST_LINE).rstrip(b"\n")
    if _digest(first).encode() != digest:
        return None
    head: Head = json.loads(first)
    if head["format"] != _FORMAT or head["run"] != str(path.resolve()):
        return None
    return None if misshapen(head, Head, "head") else head


def _cache_file(path: Path) -> Path:
    return user_cache("runs") / f"{_digest(os.fsencode(path.resolve()))[:32]}.cache"


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
