"""The files of a tape, and how they are read while another process or thread appends to them.

    tape.json                    format_version and `head`, the rows of the first step, which are never dropped
    rows-000000000000.bin        the bytes of consecutive rows (`rows.py`); the name has the number of the first row
    rows-000000000000.idx        24 bytes for the shard and for each row: the end of the row, counted from the first byte of the
                                 tape, and a hash of this row and of all rows before it; the shard's own entry is that of the
                                 row before it
    source.json                  states of the source, if it has `state_dict`: the rows before each, and the state
    end.json                     the number of rows, once the stream has ended
    failed.json                  the error of the source, for the other processes; removed when a session begins

Files of rows only grow, and an entry follows its row: any process may read them at any time. A torn
end is ignored, because a resumed run writes a new shard behind the last intact row.
"""

import json
import os
import re
import struct
import sys
import weakref
from bisect import bisect_right
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.config.paths import open_regular, read_regular
from surefoot.data.scan import unreadable
from surefoot.errors import DataError, Setting, first_line

FORMAT_VERSION = 1
ENTRY = struct.Struct("<Q16s")
ZERO = bytes(16)  # the hash before row 0
_NAME = re.compile(r"rows-([0-9]{12})\.idx", re.ASCII)
_OPEN_SHARDS = 4


class DroppedError(DataError):
    """A row that is no longer on the tape."""


def chained(digest: bytes, row: bytes | memoryview | bytearray) -> bytes:
    """Return the hash of a row and of all rows before it, whose hash is `digest`."""
    together = sha256(digest)
    together.update(row)
    return together.digest()[: len(ZERO)]


class Shards:
    """The files of rows in a directory, to which another process or thread may append."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows = 0
        self.firsts: list[int] = []  # numbers of the shards' first rows, in order
        self.opened: dict[int, _Shard] = {}

    def look(self) -> int:
        """Look at the files again, and return the number of rows."""
        self.firsts = shards_in(self.directory)
        if self.firsts:
            self.rows = self.firsts[-1] + self._shard(self.firsts[-1]).count()
        return self.rows

    def row(self, row: int) -> bytearray:
        """Return the bytes of a row. Raises `DroppedError` if it was dropped, and `DataError` if it
        is damaged.
        """
        try:
            shard = self._shard(self._first(row))
            before = shard.entry(row - shard.first)
            entry = shard.entry(row - shard.first + 1)
            if before is None or entry is None:
                raise FileNotFoundError
            recorded = shard.read(before[0], entry[0])
        except FileNotFoundError:
            self.look()
            raise self._dropped(row) from None
        except OSError as problem:
            raise unreadable(self.directory, problem) from problem
        if recorded is None or chained(before[1], recorded) != entry[1]:
            raise damaged(shard.path.with_suffix(".bin"), f"the hash of row {row} differs", row=row)
        return recorded

    def entry_before(self, row: int) -> tuple[int, bytes]:
        """Return the end of the row before `row`, counted in bytes from the beginning of the tape,
        and its hash.
        """
        if row == 0:
            return 0, ZERO
        if row >= self.rows:
            self.look()
        for near in (row - 1, row):  # the shard's own entry is that of the row before it
            with suppress(FileNotFoundError):
                shard = self._shard(self._first(near))
                entry = shard.entry(row - shard.first) if shard.first <= row else None
                if entry is not None:
                    return entry
        raise self._dropped(row - 1)

    def intact(self, start: int = 0) -> tuple[int, str | None]:
        """Check the rows from `start` on; return how many rows precede the first damaged one, and
        what is wrong with it.
        """
        self.look()
        row = max(start, self.first_kept()) if start else 0
        while row < self.rows:
            try:
                self.row(row)
            except DroppedError:  # between the first step and the oldest other row
                row = max(row, self.first_kept() - 1)
            except DataError as problem:
                return row, first_line(problem)
            row += 1
        for before, first in pairwise(self.firsts):
            if first < start:
                continue
            last_entry = self._shard(before).entry(first - before)
            if last_entry is not None and last_entry != self._shard(first).entry(0):
                return first, (
                    f"{shard_name(first)}.idx is damaged: its first entry is not that of the row"
                    " before it"
                )
        return self.rows, None

    def first_kept(self) -> int:
        """Return the row from which on no row has been dropped."""
        if not self.firsts:
            return 0
        first = self.firsts[0]
        if len(self.firsts) == 1 or self.firsts[1] == first + self._shard(first).count():
            return first
        return self.firsts[1]

    def _dropped(self, row: int) -> DroppedError:
        kept = self.first_kept()
        return DroppedError(
            "stream-row-dropped",
            problem=f"row {row} is no longer on the tape {self.directory}: tape_size dropped the rows"
            f" before {kept}",
            reason="only later steps can be repeated",
            remedy=("a larger", Setting("tape_size")),
            row=row,
            first=kept,
            path=self.directory,
        )

    def _first(self, row: int) -> int:
        """Return the first row of the shard that has a row."""
        index = bisect_right(self.firsts, row)
        if index == 0:
            raise FileNotFoundError
        return self.firsts[index - 1]

    def _shard(self, first: int) -> "_Shard":
        if first not in self.opened:
            while len(self.opened) >= _OPEN_SHARDS:
                del self.opened[next(iter(self.opened))]
            self.opened[first] = _Shard(self.directory, first)
        return self.opened[first]


class _Shard:
    def __init__(self, directory: Path, first: int) -> None:
        self.first = first
        self.path = directory / shard_name(first)
        self.index = bytearray()  # of the entries that were read
        self.size = 0  # of the file of rows, as last seen
        with ExitStack() as unless_complete:
            self.entry_file = unless_complete.enter_context(
                open_regular(self.path.with_suffix(".idx"))
            )
            self.row_file = open_regular(self.path.with_suffix(".bin"))
            unless_complete.pop_all()
            weakref.finalize(self, _close, self.entry_file, self.row_file).atexit = False

    def count(self) -> int:
        return max(0, os.fstat(self.entry_file.fileno()).st_size // ENTRY.size - 1)

    def entry(self, index: int) -> tuple[int, bytes] | None:
        """Return (end, hash) of row `index - 1` of this shard, or None if it is not there; 0 is the
        row before the shard.
        """
        if len(self.index) < (index + 1) * ENTRY.size:
            size = os.fstat(self.entry_file.fileno()).st_size
            self.index += _read_at(self.entry_file.fileno(), len(self.index), size)
            if len(self.index) < (index + 1) * ENTRY.size:
                return None
        end, digest = ENTRY.unpack_from(self.index, index * ENTRY.size)
        return end, digest

    def read(self, start: int, stop: int) -> bytearray | None:
        base = ENTRY.unpack_from(self.index, 0)[0]
        if stop - base > self.size:  # a file of rows only grows
            self.size = os.fstat(self.row_file.fileno()).st_size
        if not base <= start <= stop <= base + self.size:
            return None
        return bytearray(_read_at(self.row_file.fileno(), start - base, stop - base))


def _close(*files: BinaryIO) -> None:
    for file in files:
        file.close()


def shard_name(first: int) -> str:
    """Return the file name, without suffix, of the shard that begins with a row."""
    return f"rows-{first:012d}"


def shards_in(directory: Path) -> list[int]:
    """Return the numbers of the first rows of all shards in a directory, in order."""
    try:
        matches = map(_NAME.fullmatch, os.listdir(directory))
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def recorded_head(directory: Path) -> int | None:
    """Return the number of rows in the first step of a tape, or None if the directory has no
    complete first step.
    """
    tape = json_of(directory / "tape.json")
    if tape is None:
        return None
    if tape.get("format_version") != FORMAT_VERSION or not isinstance(tape.get("head"), int):
        version = tape.get("format_version")
        raise DataError(
            "stream-tape-format-unknown",
            problem=f"{directory / 'tape.json'} is of format {version!r}, but this surefoot reads"
            f" {FORMAT_VERSION}",
            remedy="update surefoot, or choose another directory",
            path=directory / "tape.json",
            version=version,
        )
    head = int(tape["head"])
    has_ended = json_of(directory / "end.json") is not None
    return head if has_ended or Shards(directory).look() >= head else None


def json_of(path: Path) -> Any:
    """Return the dictionary in a JSON file, or None if the file is missing. Raises `DataError` if
    it is damaged.
    """
    try:
        text = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise unreadable(path, problem) from problem
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise damaged(path, first_line(problem)) from problem
    return entries if isinstance(entries, dict) else {}


def damaged(path: Path, what: str, *, row: int | None = None) -> DataError:
    """Return the error for a file of a tape with other bytes than were written."""
    return DataError(
        "stream-tape-damaged",
        problem=f"{path} is damaged: {what}",
        remedy=[
            "restore an intact copy of the tape",
            ("for a new run:", Setting("run_dir", "DIR")),
        ],
        path=path,
        row=row,
    )


def not_of_checkpoint(directory: Path, *, rows: int, known: int) -> DataError:
    """Return the error for a tape without the `rows` rows that a checkpoint has read. The tape has
    `known` rows."""
    state = f"has {known:,} rows" if known else "is missing"
    if known and known >= rows:
        state += " of another hash"
    return DataError(
        "stream-tape-not-of-checkpoint",
        problem=f"the checkpoint has read {rows:,} rows of the tape {directory}, which {state}",
        remedy=["restore the tape of this run", ("for a new run:", Setting("run_dir", "DIR"))],
        path=directory,
        rows=rows,
        known=known,
    )


def _read_at(handle: int, start: int, stop: int) -> bytes:
    if sys.platform == "win32":
        os.lseek(handle, start, os.SEEK_SET)
        return os.read(handle, stop - start)
    return os.pread(handle, stop - start, start)
