"""The appending side of a tape's files: shards, their order on the disk, the budget, and the
recovery after a kill.
"""

import json
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.config.paths import NO_LOCKS, make_no_follow, open_no_follow, write_whole
from surefoot.data.streams.shards import (
    ENTRY,
    FORMAT_VERSION,
    Shards,
    json_of,
    recorded_head,
    shard_name,
    shards_in,
)
from surefoot.errors import ConfigError, DataError

_SHARDS = 8  # of a full tape
_SHARD_BYTES = 64 << 20
_OWN_FILES = re.compile(
    r"\.?(rows-[0-9]{12}\.(bin|idx)|(tape|source|end|failed)\.json)(\.partial)?", re.ASCII
)
_RECORDED = set[Path]()  # by this process, whose locks do not exclude itself


class TapeWriter:
    """The files of one tape, locked by one process. The first shard has the `head` rows of the
    first step, and stays.

    `rows`, `end` and `digest` are the number of rows, the bytes of all rows, and the hash of all
    rows. Not thread-safe.
    """

    def __init__(self, directory: Path, *, head: int, limit_bytes: int) -> None:
        self.head = head
        self.limit_bytes = limit_bytes
        self.disk: Disk = DISK
        self.lock: IO[bytes] | None = None
        self.handles: tuple[int, int] | None = None  # rows, entries
        self._begin_in(directory)

    # --- opening ----------------------------------------------------------------------------------

    def move_to(self, directory: Path) -> None:
        """Copy the rows recorded so far to another directory without a complete tape, and continue
        there.
        """
        self._close_shard()
        try:
            make_no_follow(directory)
            names = []
            for first in shards_in(self.directory):
                names += [f"{shard_name(first)}.bin", f"{shard_name(first)}.idx"]
            for name in ("end.json", "source.json"):
                if (self.directory / name).exists():
                    names.append(name)
            names.append("tape.json")  # with it, the tape is complete
            for name in names:
                write_whole(directory / name, (self.directory / name).read_bytes())
        except OSError as problem:
            raise _unwritable(directory, problem) from problem
        self._unlock()
        self._begin_in(directory)

    def cut_damaged(self, rows: int) -> str | None:
        """Check the rows behind the first `rows` rows, cut the tape at the first damaged one, and
        return what is wrong with it.
        """
        intact, problem = Shards(self.directory).intact(rows)
        if problem is not None:
            self._go_on(intact if intact >= self.head else 0)
        return problem

    def _begin_in(self, directory: Path) -> None:
        try:
            make_no_follow(directory)
            self.lock = _locked(directory)
            self.directory = directory
            if recorded_head(directory) is None:  # cut off before its first step was complete
                for name in os.listdir(directory):
                    if _OWN_FILES.fullmatch(name):
                        (directory / name).unlink()
                described = {"format_version": FORMAT_VERSION, "head": self.head}
                write_whole(directory / "tape.json", json.dumps(described).encode())
            self._go_on()
        except OSError as problem:
            raise _unwritable(directory, problem) from problem

    def _go_on(self, rows: int | None = None) -> None:
        """Continue behind row `rows`, or behind the last recorded row. Later rows are removed or
        ignored.
        """
        self._close_shard()
        shards = Shards(self.directory)
        self.rows = shards.look() if rows is None else rows
        self.end, self.digest = shards.entry_before(self.rows)
        self.has_ended = (self.directory / "end.json").exists() and rows is None
        (self.directory / "failed.json").unlink(missing_ok=True)
        if not self.has_ended:
            (self.directory / "end.json").unlink(missing_ok=True)
            for first in shards_in(self.directory):
                if first >= self.rows:
                    self._remove(first)
        # bytes of shards by first row
        self.sizes = {first: self._size(first) for first in shards_in(self.directory)}
        # a kill left half of a new shard, or of a dropped one
        for path in self.directory.glob("rows-*.bin"):
            if _OWN_FILES.fullmatch(path.name) and not path.with_suffix(".idx").exists():
                self.disk.remove(path)
        if not self.has_ended:
            self._new_shard()  # hides torn rows at the end of the last one

    # --- appending --------------------------------------------------------------------------------

    def append(self, entries: memoryview, rows: memoryview) -> None:
        """Append rows and their entries. Raises `OSError` if the disk fails; a torn row is then
        ignored.
        """
        count = len(entries) // ENTRY.size
        if self.rows < self.head < self.rows + count:  # the first shard has the first step alone
            cut = (self.head - self.rows) * ENTRY.size
            end, _ = ENTRY.unpack_from(entries, cut - ENTRY.size)
            size = end - self.end
            self.append(entries[:cut], rows[:size])
            self.append(entries[cut:], rows[size:])
            return
        first = max(self.sizes)
        full_bytes = min(_SHARD_BYTES, self.limit_bytes // _SHARDS)
        is_complete = first > 0 and self.sizes[first] >= full_bytes
        if self.rows > first and (self.rows == self.head or is_complete):
            self._close_shard()
            self._new_shard()
            first = self.rows
        assert self.handles is not None
        self.disk.append(self.handles[0], rows)
        self.disk.append(self.handles[1], entries)  # an entry is there only behind its row
        self.sizes[first] += len(rows) + len(entries)
        self.rows += count
        self.end, self.digest = ENTRY.unpack_from(entries, len(entries) - ENTRY.size)

    def drop(self, needed_from: int) -> bool:
        """Remove the oldest shards before row `needed_from` as far as the tape is too large; return
        True if it still is.
        """
        while self.size_bytes > self.limit_bytes:
            oldest = self.oldest
            if oldest is None:
                return True
            first, first_behind = oldest
            if first_behind > needed_from:
                return True
            self._remove(first)
            del self.sizes[first]
        return False

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def oldest(self) -> tuple[int, int] | None:
        """The first row of the oldest shard that may be dropped, and the first row behind it."""
        firsts = sorted(self.sizes)
        return (firsts[1], firsts[2]) if len(firsts) > 2 else None

    def finish(self) -> None:
        """Record that the stream has ended behind the last row."""
        self.flush()
        write_whole(self.directory / "end.json", json.dumps({"rows": self.rows}).encode())
        self.has_ended = True

    def flush(self) -> None:
        """Wait until all appended rows are on the disk."""
        for handle in self.handles or ():
            self.disk.flush(handle)
        self.disk.flush_directory(self.directory)

    def states(self) -> list[Any]:
        """Return up to two states of the source, each with the number of rows before it."""
        recorded = json_of(self.directory / "source.json") or {}
        states = recorded.get("states")
        return states if isinstance(states, list) else []

    def add_state(self, state: Any) -> None:
        states = {"states": [*self.states()[-1:], state]}
        write_whole(self.directory / "source.json", json.dumps(states).encode())

    def write_failure(self, failure: dict[str, Any]) -> None:
        with suppress(OSError):  # other processes then learn of it when this one ends
            write_whole(self.directory / "failed.json", json.dumps(failure).encode())

    def close(self) -> None:
        self._close_shard()
        self._unlock()

    def _new_shard(self) -> None:
        path = self.directory / shard_name(self.rows)
        rows = self.disk.create(path.with_suffix(".bin"))
        entries = self.disk.create(path.with_suffix(".idx"))
        self.handles = (rows, entries)
        self.disk.append(entries, memoryview(ENTRY.pack(self.end, self.digest)))
        self.sizes[self.rows] = 0

    def _close_shard(self) -> None:
        handles = self.handles or ()
        self.handles = None
        for handle in handles:
            with suppress(OSError):
                self.disk.flush(handle)
            self.disk.close(handle)

    def _remove(self, first: int) -> None:
        for kind in (".idx", ".bin"):
            with suppress(FileNotFoundError):
                self.disk.remove(self.directory / f"{shard_name(first)}{kind}")

    def _size(self, first: int) -> int:
        path = self.directory / shard_name(first)
        return path.with_suffix(".idx").stat().st_size + path.with_suffix(".bin").stat().st_size

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None
            _RECORDED.discard(self.directory.resolve())


def _locked(directory: Path) -> IO[bytes]:
    other = shlex.quote(f"{directory}-2")
    refused = ConfigError(
        "stream-tape-locked",
        problem=f"another run records into {directory}",
        remedy=["wait for it", f"or choose another directory: Stream(source, directory={other!r})"],
        path=directory,
    )
    if directory.resolve() in _RECORDED:
        raise refused
    lock = os.fdopen(open_no_follow(directory / ".lock", os.O_RDWR | os.O_CREAT), "r+b")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                lock.close()
                raise refused from None
    _RECORDED.add(directory.resolve())
    return lock


def is_unlocked(directory: Path) -> bool:
    """Return True if no process records into the directory of a tape. Raises `OSError` if this
    cannot be known.
    """
    if directory.resolve() in _RECORDED or sys.platform == "win32":
        return False
    import fcntl

    with os.fdopen(open_no_follow(directory / ".lock", os.O_RDWR), "r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _unwritable(directory: Path, problem: OSError) -> DataError:
    return DataError(
        "stream-tape-unwritable",
        problem=f"the tape {directory} cannot be written: {problem.strerror or problem}",
        remedy="choose another directory: sf.data.Stream(source, directory=...)",
        path=directory,
    )
