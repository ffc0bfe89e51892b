"""The records of a run in bounded memory, and their file among the reader's caches; only new bytes
of metrics.jsonl are read.

The cache holds JSON: a head (what a row of a page shows), the curves, and the records of
`diagnose`. Each part has a hash. A file with another hash, format, version or run is ignored.
Nothing is written into the run's directory.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypedDict

from surefoot.checkpoint.state_json import misshapen
from surefoot.config.paths import open_regular, user_cache, write_whole
from surefoot.diagnose.reading import RecordCollector
from surefoot.report.curves import Curve
from surefoot.report.series import Recorded, data_check_in
from surefoot.tracking.columns import Columns, in_columns
from surefoot.tracking.jsonl import LONGEST_LINE, line, parse_record, split_at_resumes
from surefoot.tracking.record import Record
from surefoot.tracking.run_reader import surefoot_version

SLICE_BYTES = 2_000_000  # read at once
_FORMAT = f"surefoot run cache 3 {surefoot_version()}"
_TAIL_BYTES = 256  # compared to notice that a file was replaced
_MOST_FILES = 2_000  # of the cache; the oldest are deleted
_POSITION = ("file", "offset", "searched", "size_and_time", "resumed_at", "resumed_steps")
_UNDRAWN = ("sample", "layer_stats")
_CURVES = ("train", "users", "scores")
_SCALARS = ("skipped", "last_step", "count", "eta_s", "over")
BROKEN = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


class Row(TypedDict):
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
    row: Row


@dataclass(eq=False)
class ThinnedRun:
    """The curves and the history of a run's records, continued by `advance`."""

    path: Path
    recorded: Recorded = field(default_factory=Recorded)
    collected: RecordCollector = field(default_factory=lambda: RecordCollector(times=1))
    file: list[int] = field(default_factory=lambda: [0, 0])
    offset: int = 0  # bytes of the lines in `recorded`
    searched: int = 0  # bytes in which all resumes are known
    size_and_time: list[int] = field(default_factory=lambda: [0, 0])
    tail: bytes = b""  # the last bytes before `offset`
    resumed_at: list[int] = field(default_factory=list)
    resumed_steps: list[int] = field(default_factory=list)
    # also with samples, layer statistics and the data check, and thinned as by `diagnose`; not
    # saved
    is_full: bool = False
    data: Record = field(default_factory=dict)  # the data check
    fault: Exception | None = None  # of `collected`

    def __post_init__(self) -> None:
        if self.is_full:
            self.collected = RecordCollector()

    def advance(self, *, most_bytes: int = SLICE_BYTES) -> bool:
        """Read the next lines; return True if there are more. Raises `OSError` if the file cannot
        be read.
        """
        with open_regular(self.path / "metrics.jsonl") as file:
            status = os.fstat(file.fileno())
            identity, size = [status.st_dev, status.st_ino], status.st_size
            file.seek(max(0, self.offset - len(self.tail)))
            if (
                self.file != identity
                or self.offset > size
                or file.read(len(self.tail)) != self.tail
            ):
                self._start_over()
                self.resumed_at, self.resumed_steps, self.searched = [], [], 0
            self.file, self.size_and_time = identity, [size, status.st_mtime_ns]
            if size - self.offset > most_bytes and self.searched < size:
                file.seek(self.searched)
                if self._search(iter(lambda: file.readline(LONGEST_LINE), b""), self.searched):
                    self._start_over()
            file.seek(self.offset)
            chunk = file.read(most_bytes)
        is_full = len(chunk) == most_bytes
        end = chunk.rfind(b"\n") + 1
        if not end and is_full:
            if most_bytes < LONGEST_LINE:
                return self.advance(most_bytes=LONGEST_LINE)
            end = len(chunk)  # no record
        chunk = chunk[:end]
        lines = BytesIO(chunk) if b'"resume"' in chunk else [chunk]
        if self._search(lines, self.offset):
            self._start_over()
            return True
        self._add(chunk)
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        return is_full and self.offset < size

    def _search(self, lines: Iterable[bytes], position: int) -> bool:
        """Note the resumes in lines from a position of the file; return True if one supersedes
        records that were read.
        """
        supersedes = False
        for text in lines:
            position += len(text)
            if position <= self.searched or not text.endswith(b"\n"):
                continue
            self.searched = position
            record = parse_record(text) if b'"resume"' in text else None
            if record is not None and record["kind"] == "resume":
                self.resumed_at.append(position)
                self.resumed_steps.append(record["step"])
                supersedes |= record["step"] < self.recorded.last_step
        return supersedes

    def _add(self, lines: bytes) -> None:
        blocks = split_at_resumes(lines, self.offset, self.resumed_at, self.resumed_steps)
        self.offset += len(lines)
        for part in in_columns(blocks):
            if isinstance(part, Columns) or self.is_full:
                self.recorded.add_part(part)
            else:
                self.recorded.add_part(
                    [
                        {"kind": "", "step": each["step"]} if each["kind"] in _UNDRAWN else each
                        for each in part
                    ]
                )
            self.data = data_check_in(part) or self.data
            try:
                if self.fault is None:
                    self.collected.add_part(part)
            except Exception as problem:
                if not self.is_full:
                    raise
                self.fault = problem

    def _start_over(self) -> None:
        self.recorded, self.collected, self.offset, self.tail = (
            Recorded(),
            RecordCollector(times=1),
            0,
            b"",
        )
        self.data, self.fault = {}, None
        self.__post_init__()

    def save(self, row: Row) -> None:
        """Write the cache; a failure is ignored."""
        series = {
            kind: {name: curve.to_json() for name, curve in getattr(self.recorded, kind).items()}
            for kind in _CURVES
        }
        series["scalars"] = {name: getattr(self.recorded, name) for name in _SCALARS}
        records = [line(record) for kind in self.collected.by_kind().values() for record in kind]
        rest = "\n".join([json.dumps(series), *records]).encode(errors="backslashreplace")
        head = {
            "format": _FORMAT,
            "run": str(self.path.resolve()),
            "row": row,
            "tail": self.tail.hex(),
            "rest": _digest(rest),
        }
        first = json.dumps(head | {name: getattr(self, name) for name in _POSITION}).encode()
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


def read_thinned(path: Path) -> ThinnedRun:
    """Return a run with the content of its cache, or without records if the cache is absent or
    unusable.
    """
    with suppress(*BROKEN), open_regular(_cache_file(path)) as file:
        head, rest = _head(path, file), file.read()
        if head is not None and _digest(rest) == head["rest"]:
            first, *records = rest.split(b"\n")
            series = json.loads(first)
            recorded = Recorded(**series["scalars"])
            for kind in _CURVES:
                setattr(
                    recorded,
                    kind,
                    {name: Curve.from_json(curve) for name, curve in series[kind].items()},
                )
            collected = RecordCollector(times=1)
            values: dict[str, Any] = {name: head[name] for name in _POSITION}  # type: ignore[literal-required]
            for record in map(parse_record, records):
                if record is not None:  # added without `add`, which would thin the records again
                    collected.kinds.setdefault(record["kind"], []).append(record)
            return ThinnedRun(path, recorded, collected, tail=bytes.fromhex(head["tail"]), **values)
    return ThinnedRun(path)


def prune_cache() -> None:
    """Delete the oldest files of the cache beyond a limit."""
    with suppress(OSError):
        files = sorted(user_cache("runs").glob("*.cache"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST_FILES]:
            file.unlink()


def _head(path: Path, file: IO[bytes]) -> Head | None:
    digest, first = file.readline(100).strip(), file.readline(LONGEST_LINE).rstrip(b"\n")
    if _digest(first).encode() != digest:
        return None
    head = json.loads(first)
    if (
        head["format"] != _FORMAT
        or head["run"] != str(path.resolve())
        or misshapen(head, Head, "head")
    ):
        return None
    return head  # type: ignore[no-any-return]


def _cache_file(path: Path) -> Path:
    return user_cache("runs") / f"{_digest(os.fsencode(path.resolve()))[:32]}.cache"


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
