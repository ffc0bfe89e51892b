"""The recording of a stream: the one process that numbers the rows and appends them to the tape, at
most a few steps ahead.
"""

import atexit
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.data.order import NOTHING_PASSED, Passed
from surefoot.data.streams.reader import COMPARED, HowToRead, SourcePosition, failure_of
from surefoot.data.streams.shards import ENTRY, Shards, chained, recorded_head
from surefoot.data.streams.source_reader import SourceReader
from surefoot.data.streams.stream import Stream
from surefoot.data.streams.writer import TapeWriter
from surefoot.errors import DataError

_AHEAD_STEPS = 16
# the code of the failure that ends the recording of a session, on all ranks before the same step
HALTED = "stream-halted"
_END_S = 10.0  # for which `close` waits for the thread
_LATE_STEPS = 8  # by which another rank may be behind, if no checkpoint protects the rows


class Recorder:
    """The side of a tape that appends. `demand` starts the reader; a thread appends what the reader
    sends.

    The thread waits while it is `_AHEAD_STEPS` steps ahead of the demand, or the tape is full,
    unless a step waits for the row. A shard is dropped if the tape is full and neither the newest
    checkpoint nor the current step needs its rows.
    """

    def __init__(
        self,
        stream: Stream,
        directory: Path,
        *,
        batch_size: int,
        how: HowToRead,
        workers: int,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.passed = passed
        self.how = how
        self.pid = os.getpid()
        self.ahead_steps = max(_AHEAD_STEPS, 2 * workers + 2)
        head = recorded_head(directory) or batch_size  # a run may begin with another batch size
        self.writer = TapeWriter(directory, head=head, limit_bytes=stream.tape_bytes)
        self.stop: int | None = None  # the rows that the run needs
        self.is_repeated = False  # a later epoch reads every row again, so none is dropped
        # of the newest checkpoint; None: no checkpoints
        self.saved_step: Callable[[], int | None] | None = None
        self.notes: list[str] = []
        self.failure: dict[str, Any] | None = None  # see `failure_of`
        self.demanded = 0
        self.is_closed = False
        # of `demanded` and `is_closed`; never owned for long, because steps need it
        self.changed = threading.Condition()
        self.writing = threading.Lock()  # owned while the disk works
        self.reader: SourceReader | None = None
        self.thread: threading.Thread | None = None

    def move_to(self, directory: Path) -> None:
        """Copy the rows recorded so far to another directory, and continue there."""
        with self.writing:
            self.writer.move_to(directory)
            if self.failure is not None:  # which workers look for in the new directory
                self.writer.write_failure(self.failure)

    def cut_damaged(self, rows: int) -> None:
        """Cut the tape at the first damaged row behind the first `rows` rows."""
        problem = self.writer.cut_damaged(rows)
        if problem is not None:
            self.notes.append(
                f"warning: {problem}: the tape is cut, and the source is read again from there on"
            )

    def demand(self, rows: int) -> None:
        """Say that training reads the rows before `rows`; start the reader if rows will soon be
        missing.
        """
        # each row of a step asks, and waking the thread takes longer than reading the row
        if rows <= self.demanded:
            return
        with self.changed:
            self.demanded = rows
            self.changed.notify_all()
            is_over = self.writer.has_ended or self.failure is not None
            if self.thread is None and not is_over and self._is_wanted():
                self._start_reader()

    @property
    def wants_save(self) -> bool:
        """True if the tape is full, and a checkpoint of the current step would release rows."""
        if self.is_repeated or not self._is_full():
            return False
        oldest = self.writer.oldest
        if oldest is None:
            return False
        _, first_behind = oldest
        return self._needed_from() < first_behind <= self.demanded - self.batch_size

    def flush(self) -> None:
        """Wait until all appended rows are on the disk. Called before each checkpoint is
        written.
        """
        with self.writing:
            self.writer.flush()

    def halt(self) -> None:
        """Append no further row in this session."""
        with self.writing:
            if self.failure is None:
                self._fail(DataError("stream-halted", problem="the run was stopped"))

    def close(self) -> None:
        """End the reader and the thread. The rows stay."""
        if os.getpid() != self.pid:  # in a process forked from the one that records
            return
        atexit.unregister(self.close)
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self.reader is not None:
            self.reader.close()
        if self.thread is not None:
            self.thread.join(_END_S)
            self.thread = None
        if self.reader is not None:
            note = self.reader.join()
            if note is not None:
                self.notes.append(note)
            self.reader = None
        self.saved_step = None
        self.writer.close()

    def _start_reader(self) -> None:
        writer = self.writer
        shards = Shards(writer.directory)
        shards.look()
        first = max(shards.first_kept(), writer.rows - COMPARED)
        tail = {row: chained(b"", shards.row(row)) for row in range(first, writer.rows)}
        position = SourcePosition(
            writer.rows,
            writer.end,
            writer.digest,
            tail=tail,
            states=writer.states(),
            head=writer.head,
        )
        self.reader = SourceReader(self.stream, self.how, position)
        atexit.register(self.close)  # otherwise Python would wait for the reader
        self.thread = threading.Thread(
            target=self._record, args=(self.reader,), name="surefoot-tape", daemon=True
        )
        self.thread.start()

    # --- the thread -------------------------------------------------------------------------------

    def _record(self, reader: SourceReader) -> None:
        is_over = False
        while not is_over:
            with self.changed:
                self.changed.wait_for(lambda: self.is_closed or self._is_wanted())
            message = reader.receive()
            if message is None:
                if not self.is_closed:
                    self._fail(reader.how_it_ended(self.writer.rows))
                break
            with self.writing:
                try:
                    is_over = self.is_closed or self.failure is not None or self._take(message)
                except Exception as problem:  # training would wait forever for a thread that ended
                    self._fail(self._unwritten(problem))
                    is_over = True

    def _unwritten(self, problem: Exception) -> DataError:
        strerror = problem.strerror if isinstance(problem, OSError) else None
        return DataError(
            "stream-tape-not-written",
            problem=f"row {self.writer.rows} cannot be written to the tape {self.writer.directory}: "
            f"{strerror or repr(problem)}",
            remedy="the rows before it stay: make room, and start the same command again",
            row=self.writer.rows,
            path=str(self.writer.directory),
        )

    def _take(self, message: bytes) -> bool:
        kind = message[:1]
        content = memoryview(message)[1:]
        match kind:
            case b"r":
                count = int.from_bytes(content[:4], "little")
                entries_end = 4 + count * ENTRY.size
                self.writer.append(content[4:entries_end], content[entries_end:])
                self._make_room()
            case b"n":
                self.notes.append(str(content, "utf-8"))
            case b"s":
                self.writer.add_state(json.loads(bytes(content)))
            case b"x":
                self._note_failure(json.loads(bytes(content)))
            case _:
                self.writer.finish()
        return kind in (b"x", b"e") or self.failure is not None

    def _is_wanted(self) -> bool:
        if self.writer.rows < self.demanded:
            return True
        limit = self.demanded + self.ahead_steps * self.batch_size
        if self.stop is not None:
            limit = min(limit, self.stop)
        return self.writer.rows < limit and not self._is_full()

    def _is_full(self) -> bool:
        """Return True if the tape is too large, and none of its rows may be dropped."""
        if self.writer.size_bytes <= self.stream.tape_bytes:
            return False
        oldest = self.writer.oldest
        if oldest is None or self.is_repeated:
            return True
        _, first_behind = oldest
        return first_behind > self._needed_from()

    def _make_room(self) -> None:
        is_full = self.writer.drop(0 if self.is_repeated else self._needed_from())
        if is_full and self.is_repeated:
            self._fail(
                DataError(
                    "stream-tape-full",
                    problem=f"the tape is full after {self.writer.rows:,} rows "
                    f"(tape_size = {self.stream.tape_size!r}), and later epochs read them again",
                    remedy="choose a larger tape_size, or a length of one epoch",
                    setting="tape_size",
                    value=self.stream.tape_size,
                )
            )

    def _needed_from(self) -> int:
        if self.saved_step is None:
            return self.demanded - (1 + _LATE_STEPS) * self.batch_size
        return self.passed.position(self.saved_step() or 0, self.batch_size)

    def _fail(self, error: DataError) -> None:
        self._note_failure(failure_of(error))

    def _note_failure(self, failure: dict[str, Any]) -> None:
        self.failure = failure
        self.writer.write_failure(failure)
