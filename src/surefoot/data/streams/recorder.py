"""The recording of a stream: the one process that numbers the rows and appends them to the tape, at most a few steps ahead."""

import atexit
import json
import multiprocessing
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.config.paths import make_no_follow, open_no_follow, write_whole
from surefoot.data.streams.source import COMPARED, Stream, read_source
from surefoot.data.streams.tape import ENTRY, FORMAT_VERSION, Shards, chained, recorded_head, shard_name, shards_in
from surefoot.data.workers import start_of_process
from surefoot.errors import ConfigError, DataError, first_line

_AHEAD_STEPS = 16
_LATE_STEPS = 8  # by which another rank may be behind, if no checkpoint protects the rows
_SHARDS = 8  # of a full tape
_SHARD_BYTES = 64 << 20
_OWN_FILES = re.compile(r"\.?(rows-[0-9]{12}\.(bin|idx)|(tape|source|end|failed)\.json)(\.partial)?", re.ASCII)
_RECORDED = set[Path]()  # by this process, whose locks do not exclude itself


class Recorder:
    """The appending side of a tape. `demand` starts the reader; a thread appends what the reader sends.

    The thread waits while it is `_AHEAD_STEPS` steps ahead of the demand, or the tape is full, unless a step waits for the
    row. A shard is dropped if the tape is full and neither the newest checkpoint nor the current step needs its rows.
    """

    def __init__(self, stream: Stream, directory: Path, *, head: int, seed: int, ahead_steps: int = 0) -> None:
        self.stream, self.head, self.seed, self.pid = stream, head, seed, os.getpid()
        self.ahead_steps = max(_AHEAD_STEPS, ahead_steps)
        self.disk: Disk = DISK
        self.saved_step: Callable[[], int | None] | None = None  # of the newest checkpoint; None: no checkpoints
        self.stop: int | None = None  # the rows that the run needs
        self.is_repeated = False  # a later epoch reads every row again, so none is dropped
        self.notes: list[str] = []
        self.failure: tuple[str, str] | None = None  # message and traceback
        self.demanded, self.is_full, self.is_closed, self.has_ended = 0, False, False, False
        self.changed = threading.Condition()
        self.process: Any = None
        self.thread: threading.Thread | None = None
        self.lock: IO[bytes] | None = None
        self.handles: tuple[int, int] | None = None  # rows, entries
        self._begin_in(directory)

    # --- opening -------------------------------------------------------------------------------------------------

    def _begin_in(self, directory: Path) -> None:
        """Begin at the end of the tape in a directory, or begin an empty tape. Removes an incomplete one."""
        try:
            make_no_follow(directory)
            self.lock = _locked(directory)
            self.directory = directory
            if recorded_head(directory) is None:
                for name in [name for name in os.listdir(directory) if _OWN_FILES.fullmatch(name)]:
                    (directory / name).unlink()
                described = {"format_version": FORMAT_VERSION, "head": self.head}
                write_whole(directory / "tape.json", json.dumps(described).encode())
            self._go_on()
        except OSError as problem:
            raise DataError(
                f"the tape {directory} cannot be written: {problem.strerror or problem}\n"
                "  choose another directory: Stream(source, directory=...)"
            ) from problem

    def move_to(self, directory: Path) -> None:
        """Copy the rows recorded so far to another directory without a complete tape, and go on there."""
        with self.changed:
            self._close_shard()
            try:
                make_no_follow(directory)
                names = [f"{shard_name(first)}{kind}" for first in shards_in(self.directory) for kind in (".bin", ".idx")]
                names += [name for name in ("end.json", "source.json") if (self.directory / name).exists()]
                for name in [*names, "tape.json"]:  # with the last one, the tape is complete
                    write_whole(directory / name, (self.directory / name).read_bytes())
            except OSError as problem:
                raise DataError(
                    f"the tape {directory} cannot be written: {problem.strerror or problem}\n  make room, and start again"
                ) from problem
            self._unlock()
            self._begin_in(directory)

    def cut_damaged(self, rows: int) -> None:
        """Check the rows behind the first `rows` rows, and cut the tape at the first damaged one."""
        with self.changed:
            intact, problem = Shards(self.directory).intact(rows)
            if problem is not None:
                self.notes.append(f"warning: {problem}: the tape is cut, and the source is read again from there on")
                self._go_on(intact if intact >= self.head else 0)

    def _go_on(self, rows: int | None = None) -> None:
        """Continue behind row `rows`, or behind the last recorded row. What follows is removed or ignored."""
        self._close_shard()
        shards = Shards(self.directory)
        self.rows = shards.look() if rows is None else rows
        self.end, self.digest = shards.entry_before(self.rows)
        self.has_ended = (self.directory / "end.json").exists() and rows is None
        for name in ("failed.json",) if self.has_ended else ("failed.json", "end.json"):
            (self.directory / name).unlink(missing_ok=True)
        for first in shards_in(self.directory):
            if first >= self.rows and not self.has_ended:
                self._remove(first)
        self.kept_bytes = {first: self._size(first) for first in shards_in(self.directory)}
        if not self.has_ended:
            self._new_shard()  # hides torn rows at the end of the last one

    # --- the side of the training --------------------------------------------------------------------------------

    def demand(self, rows: int) -> None:
        """Say that training reads the rows before `rows`; start the reader if rows will soon be missing."""
        with self.changed:
            self.demanded = max(self.demanded, rows)
            if self.is_full:
                self._make_room()
            self.changed.notify_all()
            if self.thread is None and not self.has_ended and self.failure is None and self._is_wanted():
                self._start_reader()

    @property
    def wants_save(self) -> bool:
        """True if the tape is full, and a checkpoint of the current step would release rows."""
        firsts = sorted(self.kept_bytes) if self.is_full and not self.is_repeated else []
        return len(firsts) > 2 and self._needed_from() < firsts[2] <= self.demanded - self.head

    def flush(self) -> None:
        """Wait until all appended rows are on the disk. Called before each checkpoint is written."""
        with self.changed:
            if self.handles is not None:
                for handle in self.handles:
                    self.disk.flush(handle)
            self.disk.flush_directory(self.directory)

    def close(self) -> None:
        """End the reader and the thread. The rows stay."""
        if os.getpid() != self.pid:  # in a process forked from the one that records
            return
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        self._stop_reader()
        self._close_shard()
        self._unlock()

    def _start_reader(self) -> None:
        shards = Shards(self.directory)
        shards.look()
        tail = {row: chained(b"", shards.row(row)) for row in range(max(shards.first_kept(), self.rows - COMPARED), self.rows)}
        states = []
        with suppress(OSError, ValueError):
            states = json.loads((self.directory / "source.json").read_bytes())
        after = self.rows, self.end, self.digest
        own = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        pipe, their_end = own.Pipe(duplex=False)
        self.process = own.Process(
            target=read_source, args=(self.stream, their_end, os.getpid(), self.seed, after, tail, states)
        )
        try:
            with start_of_process():
                self.process.start()
        except (OSError, AttributeError, TypeError, ValueError) as problem:
            raise DataError(
                f"the process that reads the stream cannot start: {type(problem).__name__}: {first_line(problem)}\n"
                "  define the source and its functions at the top of a file, not inside a function"
            ) from problem
        their_end.close()
        atexit.register(self.close)  # otherwise Python would wait for the reader
        self.thread = threading.Thread(target=self._record, args=(pipe,), name="surefoot-tape", daemon=True)
        self.thread.start()

    def _stop_reader(self) -> None:
        atexit.unregister(self.close)
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
            self.thread = None

    # --- the thread ----------------------------------------------------------------------------------------------

    def _record(self, pipe: Connection) -> None:
        try:
            while not self.is_closed:
                with self.changed:
                    self.changed.wait_for(lambda: self.is_closed or self._is_wanted())
                try:
                    message = pipe.recv_bytes()
                except (EOFError, OSError):
                    if not self.is_closed:
                        self.process.join(1.0)
                        what = "the process that reads the stream has ended unexpectedly"
                        self._fail(f"{what} (status {self.process.exitcode})\n  most often its memory is full", "")
                    return
                with self.changed:
                    if self.is_closed or not self._take(message):
                        return
        except OSError as problem:
            what = f"row {self.rows} cannot be written to the tape {self.directory}: {problem.strerror or problem}"
            self._fail(what + "\n  the rows before it are kept: make room, and start the same command again", "")
        finally:
            pipe.close()

    def _take(self, message: bytes) -> bool:
        kind, content = message[:1], memoryview(message)[1:]
        if kind == b"r":
            count = int.from_bytes(content[:4], "little")
            bounds = 4 + count * ENTRY.size
            self._append(content[4:bounds], content[bounds:])
            return True
        if kind == b"n":
            self.notes.append(str(content, "utf-8"))
        elif kind == b"s":
            states = [json.loads(bytes(content))]
            with suppress(OSError, ValueError):
                states = json.loads((self.directory / "source.json").read_bytes())[-1:] + states
            write_whole(self.directory / "source.json", json.dumps(states).encode())
        elif kind == b"x":
            failure = json.loads(bytes(content))
            self._fail(failure["text"], failure["trace"])
            return False
        else:
            self.flush()
            write_whole(self.directory / "end.json", json.dumps({"rows": self.rows}).encode())
            self.has_ended = True
            return False
        return True

    def _append(self, entries: memoryview, rows: memoryview) -> None:
        count = len(entries) // ENTRY.size
        if self.rows < self.head < self.rows + count:  # the first shard has the first step alone
            cut = (self.head - self.rows) * ENTRY.size
            size = ENTRY.unpack_from(entries, cut - ENTRY.size)[0] - self.end
            self._append(entries[:cut], rows[:size])
            entries, rows, count = entries[cut:], rows[size:], count - cut // ENTRY.size
        first = max(self.kept_bytes)
        if self.rows == self.head or self.kept_bytes[first] >= min(_SHARD_BYTES, self.stream.tape_bytes // _SHARDS):
            if self.rows > first:
                self._close_shard()
                self._new_shard()
                first = self.rows
        assert self.handles is not None
        self.disk.append(self.handles[0], rows)
        self.disk.append(self.handles[1], entries)  # an entry is there only behind its row
        self.kept_bytes[first] += len(rows) + len(entries)
        self.rows += count
        self.end, self.digest = ENTRY.unpack_from(entries, len(entries) - ENTRY.size)
        self._make_room()

    def _is_wanted(self) -> bool:
        if self.rows < self.demanded:
            return True
        ahead = self.demanded + self.ahead_steps * self.head
        return self.rows < (ahead if self.stop is None else min(ahead, self.stop)) and not self._make_room()

    def _make_room(self) -> bool:
        """Drop the oldest shards that nothing needs, as far as the tape is too large; return True if it still is."""
        limit = self.stream.tape_bytes
        firsts = sorted(self.kept_bytes) if sum(self.kept_bytes.values()) > limit and not self.is_repeated else []
        while len(firsts) > 2 and firsts[2] <= self._needed_from() and sum(self.kept_bytes.values()) > limit:
            self._remove(firsts[1])
            del self.kept_bytes[firsts.pop(1)]
        self.is_full = sum(self.kept_bytes.values()) > limit
        if self.is_full and self.is_repeated:
            self._fail(
                f"the tape is full after {self.rows:,} rows (tape_size = {self.stream.tape_size!r}), and later epochs read them again\n"
                "  choose a larger tape_size, or a length of one epoch",
                "",
            )
        return self.is_full

    def _needed_from(self) -> int:
        if self.saved_step is None:
            return self.demanded - (1 + _LATE_STEPS) * self.head
        return (self.saved_step() or 0) * self.head

    def _fail(self, text: str, trace: str) -> None:
        self.failure = text, trace
        with suppress(OSError):  # other processes then learn of it when this one ends
            write_whole(self.directory / "failed.json", json.dumps({"text": text, "trace": trace}).encode())

    # --- files ---------------------------------------------------------------------------------------------------

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None
            _RECORDED.discard(self.directory.resolve())

    def _new_shard(self) -> None:
        path = self.directory / shard_name(self.rows)
        rows = self.disk.create(path.with_suffix(".bin"))
        self.handles = rows, self.disk.create(path.with_suffix(".idx"))
        self.disk.append(self.handles[1], memoryview(ENTRY.pack(self.end, self.digest)))
        self.kept_bytes[self.rows] = 0

    def _close_shard(self) -> None:
        for handle in self.handles or ():
            with suppress(OSError):
                self.disk.flush(handle)
            self.disk.close(handle)
        self.handles = None

    def _remove(self, first: int) -> None:
        for kind in (".idx", ".bin"):
            with suppress(FileNotFoundError):
                self.disk.remove(self.directory / f"{shard_name(first)}{kind}")

    def _size(self, first: int) -> int:
        return sum((self.directory / f"{shard_name(first)}{kind}").stat().st_size for kind in (".idx", ".bin"))


def _locked(directory: Path) -> IO[bytes]:
    refused = ConfigError(
        f"another run records into {directory}\n"
        f"  wait for it, or choose another directory: Stream(source, directory={shlex.quote(str(directory) + '-2')!r})"
    )
    if directory.resolve() in _RECORDED:
        raise refused
    lock = os.fdopen(open_no_follow(directory / ".lock", os.O_RDWR | os.O_CREAT), "r+b")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise refused from None
        except OSError:  # a file system without locks
            pass
    _RECORDED.add(directory.resolve())
    return lock
