"""The tape of a stream as a data set: row numbers are sample ids. `shards.py` reads its files, and
`recorder.py` writes them.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from surefoot.data.loader import StoppedError
from surefoot.data.order import NOTHING_PASSED, Ids, Passed
from surefoot.data.streams.recorder import HALTED, Recorder
from surefoot.data.streams.rows import decode
from surefoot.data.streams.shards import ZERO, Shards, damaged, json_of, not_of_checkpoint
from surefoot.data.streams.stream import Stream
from surefoot.errors import DataError, Setting, SurefootError, error_of_dict

_PAUSE_S = 0.0005  # between the first two looks at the files
_LONGEST_PAUSE_S = 0.02
_SLOW_S = 10.0  # before a message that a row is awaited
_START_S = 30.0  # before a message that the first row is awaited


class Arrival:
    """Order of a stream: rows as they arrive. An epoch has `samples` rows, or all rows until the
    stream ends.

    A step before the present batch size is only looked at: it has rows of the first step, `head`
    rows, which stay on the tape. `end_of_stream(row)` waits for a row, and returns the number of rows of an epoch if the stream
    has ended before it.

    >>> Arrival(lambda row: 5, samples=5, batch_size=3).ids(1)
    (array([3, 4, 0]), array([0, 0, 1]))
    """

    def __init__(
        self,
        end_of_stream: Callable[[int], int | None],
        *,
        samples: int,
        batch_size: int,
        head: int = 1,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        self.end_of_stream = end_of_stream
        self.samples = samples
        self.batch_size = batch_size
        self.head = head
        self.passed = passed

    def ids(self, step: int) -> tuple[Ids, Ids]:
        rows_of_step = np.arange(self.batch_size, dtype=np.int64)
        if step < self.passed.steps:
            return rows_of_step % self.head, np.zeros_like(rows_of_step)
        positions = self.passed.position(step, self.batch_size) + rows_of_step
        rows = self.end_of_stream(int(positions[-1]))
        if rows is None:
            return positions, np.zeros_like(positions)
        epochs, ids = np.divmod(positions, rows)
        return ids, epochs

    def to_dict(self) -> dict[str, Any]:
        return {"order": "arrival"}


class Tape:
    """The rows of a stream by number. `tape[row]` waits until the row has arrived; `is_live` means
    that rows may still arrive.
    """

    def __init__(
        self,
        stream: Stream,
        directory: Path,
        *,
        head: int,
        samples: int,
        is_live: bool,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        self.stream = stream
        self.head = head  # rows of the first step
        self.passed = passed  # by steps of other batch sizes
        self.samples = samples  # of an epoch: as declared, or all that the run reads
        self.recorder: Recorder | None = None  # in the one process that records
        self.record_in: Callable[[Path], Recorder]  # set for training
        self.discard: Callable[[], Any] | None = None  # removes a temporary tape
        self.say: Callable[[str], None] | None = None
        self.is_repeat_said = False
        # looked at while a step waits for a row
        self.stop_requested: Callable[[], bool] | None = None
        self.move_to(directory, is_live=is_live)

    def move_to(self, directory: Path, *, is_live: bool) -> None:
        self.directory = directory
        self.is_live = is_live
        self.shards = Shards(directory)
        self.length: int | None = None  # once the stream has ended

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "recorder": None,
            "discard": None,
            "say": None,
            "stop_requested": None,
            "shards": Shards(self.directory),
        }

    def __getitem__(self, row: int) -> Any:
        if not self.wait(row):
            raise self._ended_before(row)
        try:
            recorded = decode(self.shards.row(row))
        except ValueError as problem:
            raise damaged(self.directory, f"row {row} is {problem}", row=row) from problem
        decode_fn = self.stream.decode_fn
        return recorded if decode_fn is None else decode_fn(recorded)

    def arrival(self, batch_size: int) -> Arrival:
        return Arrival(
            self.end_of_stream,
            samples=self.samples,
            batch_size=batch_size,
            head=self.head,
            passed=self.passed,
        )

    def end_of_stream(self, last: int) -> int | None:
        """Wait until row `last` has arrived; return the rows of an epoch if the stream ended before
        it, or if they are declared.
        """
        declared = self.stream.samples
        needed = last if declared is None else min(last, declared - 1)
        if self.wait(needed):
            return declared
        if declared is not None or not self.length:
            raise self._ended_before(needed)
        dropped = self.first_kept()
        if dropped:
            raise DataError(
                "stream-repeats-dropped-rows",
                problem=f"the stream ended after {self.length} rows, and its second epoch needs the"
                f" rows before {dropped}, which the tape has dropped",
                remedy=[
                    f"keep all rows: Stream(source, tape_size=...), now {self.stream.tape_size!r};"
                    " or end the run earlier",
                    "or let the source begin again by itself: while True: yield from ...",
                ],
                rows=self.length,
                first=dropped,
            )
        self._say_that_rows_repeat()
        return self.length

    def _ended_before(self, row: int) -> DataError:
        """Return the error for a row behind the end of the stream."""
        if not self.length:
            return DataError(
                "stream-empty",
                problem="the stream is empty: its source ended before its first row",
                remedy="check the path, and any filter; an iterator that was read once gives no more"
                " rows: give a generator function",
            )
        return DataError(
            "stream-ended-early",
            problem=f"the stream ended after {self.length} rows, before row {row}",
            remedy=f"give Stream(source, samples={self.length})",
            rows=self.length,
            row=row,
            samples=self.stream.samples,
        )

    def wait(self, row: int) -> bool:
        """Wait until a row has arrived; return False if the stream ended before it.

        Raises `DataError` if the source failed, and `StoppedError` on all ranks if rank 0 is to
        stop before the row arrives.
        """
        recorder = self.recorder
        if recorder is not None and recorder.pid != os.getpid():
            recorder = None
        if recorder is not None:
            recorder.demand(row + 1)
            while self.say is not None and recorder.notes:
                self.say(recorder.notes.pop(0))
        if row < self.shards.rows:
            return True
        return self._wait_for_arrival(row, recorder)

    def _wait_for_arrival(self, row: int, recorder: Recorder | None) -> bool:
        pause_s = _PAUSE_S
        began_s = time.monotonic()
        slow_s = began_s + _SLOW_S
        no_start_s = began_s + _START_S
        while True:
            if self.length is None:
                end = json_of(self.directory / "end.json")
                if end is not None:
                    self.length = int(end["rows"])
            arrived = self.shards.look()
            if row < arrived:
                return True
            if self.length is not None and arrived >= self.length:
                return False
            if recorder is not None and self.stop_requested is not None and self.stop_requested():
                recorder.halt()
            failure = self._failure(recorder)
            if failure is not None:  # no further row is appended
                if row < self.shards.look():
                    return True
                error = failed_source(failure)
                raise StoppedError if error.code == HALTED else error
            if not self.is_live:
                raise DataError(
                    "stream-row-not-recorded",
                    problem=f"row {row} is not on the tape {self.directory}, which has {arrived}"
                    " rows",
                    reason="only the training run itself reads further rows of its stream",
                    row=row,
                    rows=arrived,
                    path=self.directory,
                )
            if self.say is not None and time.monotonic() > slow_s:
                self.say(f"waiting for row {row:,} of the stream: its source gives no row")
                slow_s += 10 * _SLOW_S
            if recorder is not None and not arrived and time.monotonic() > no_start_s:
                self._say_that_no_row_came()
                no_start_s = math.inf
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def tell(self, text: str) -> None:
        """Say something, unless the run has no console or this is not rank 0."""
        if self.say is not None:
            self.say(text)

    def _failure(self, recorder: Recorder | None) -> dict[str, Any] | None:
        """Return the failure that ended the recording, in this process or in another one."""
        if recorder is not None and recorder.failure is not None:
            return recorder.failure
        failure: dict[str, Any] = json_of(self.directory / "failed.json") or {}
        return failure if "error" in failure else None  # version 0.1.0 wrote a text alone

    def _say_that_rows_repeat(self) -> None:
        is_recording = self.recorder is not None and self.recorder.pid == os.getpid()
        if is_recording and self.say is not None and not self.is_repeat_said:
            self.is_repeat_said = True
            self.say(f"note: {self._repeated(self.length or 0)}")

    def _say_that_no_row_came(self) -> None:
        text = (
            f"the source of the stream has given no row for {_START_S:.0f} s; the run waits for it"
        )
        if self.stream.start_method == "fork":
            text += (
                "\n  several libraries do not work in a forked process (lance, ray, gRPC):"
                ' sf.data.Stream(source, start="spawn")'
            )
        if self.say is not None:
            self.say(f"warning: {text}")
        else:
            warnings.warn(text, stacklevel=2)

    def beginning(self) -> "Subset[Any]":
        """Return the rows of the first step, which stay on the tape. Raises `DataError` for an
        empty stream.
        """
        rows = self.head if self.wait(self.head - 1) else self.length
        if not rows:
            raise self._ended_before(0)
        return Subset(self, range(rows))  # type: ignore[arg-type]

    def facts(self, step: int, batch_size: int) -> dict[str, Any]:
        """Return the number of rows that the first `step` steps have read (at least the first
        step's), and their hash.
        """
        rows = self.passed.position(max(step, 1), batch_size)
        if self.stream.samples is not None:
            rows = min(rows, self.stream.samples)
        if self.length is not None:
            rows = min(rows, self.length)
        if not self.wait(rows - 1):
            rows = min(rows, self.length or 0)
        return {"rows": rows, "sha256": self._digest_before(rows)}

    def require(self, facts: Mapping[str, Any] | None) -> None:
        """Raise `DataError` if the tape does not begin with the rows that a checkpoint has read, as
        `facts` describes them.
        """
        rows = 0 if facts is None else facts["rows"]
        digest = ZERO.hex() if facts is None else facts["sha256"]
        known = self.shards.look()
        if known < rows or self._digest_before(rows) != digest:
            raise not_of_checkpoint(self.directory, rows=rows, known=known)

    def _digest_before(self, row: int) -> str:
        """Return the hash of all rows before a row."""
        _, digest = self.shards.entry_before(row)
        return digest.hex()

    def first_kept(self) -> int:
        """Return the row from which on no row has been dropped."""
        self.shards.look()
        return self.shards.first_kept()

    def first_step(self, batch_size: int) -> int:
        """Return the step from which on all rows are on the tape."""
        dropped = self.first_kept()
        if dropped < self.passed.samples:
            return self.passed.steps if dropped > 0 else 0
        return self.passed.steps - (self.passed.samples - dropped) // batch_size

    def in_words(self) -> str:
        """Describe the stream in a few words."""
        epoch = "one epoch is the run"
        if self.stream.samples is not None:
            epoch = f"{self.stream.samples:,} rows per epoch, every epoch in this order"
        else:
            end = json_of(self.directory / "end.json")
            rows = 0 if end is None else int(end["rows"])
            if 0 < rows < self.samples:
                self.is_repeat_said = True
                epoch = self._repeated(rows)
        return f"the stream {self.stream.name} in the order of arrival, {epoch}; a tape of at most {self.stream.tape_size}"

    def _repeated(self, rows: int) -> str:
        """Say how often the run reads the rows of a stream that ends before the run."""
        times = self.samples / rows
        return (
            f"the stream ended after {rows:,} rows, read {times:.1f} times by this run, every epoch"
            " in this order"
        )

    def refuse_dropped(self, start: int, step: int, batch_size: int) -> None:
        """Raise `DataError` if rows of the steps from `start` to `step` are no longer on the tape.
        Those of step 0 always are.
        """
        if step == 0:
            return
        first = self.first_step(batch_size)
        if first > start:
            raise DataError(
                "stream-steps-dropped",
                problem=f"the rows of step {max(start, 1)} are no longer on the tape"
                f" {self.directory}: tape_size = {self.stream.tape_size!r}",
                reason=f"steps can be repeated from a checkpoint at step {first} or later",
                remedy=("a larger", Setting("tape_size")),
                step=max(start, 1),
                first=first,
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the declared number of rows of an epoch, and the hash of the first row."""
        digest = self._digest_before(1) if self.wait(0) else None
        return {"samples": self.stream.samples, "sha256": digest}

    def close(self) -> None:
        """Stop recording. Recorded rows can still be read."""
        recorder = self.recorder
        if recorder is not None and recorder.pid == os.getpid():
            self.recorder = None
            self.is_live = False
            recorder.close()
            for note in recorder.notes:
                self.tell(note)
        # of the session, which ends
        self.say = None
        self.stop_requested = None
        self.shards = Shards(self.directory)  # closes the files; rows can still be read

    def abandon(self) -> None:
        """Stop recording, and remove a temporary tape, because the run is not built. Its error may
        live long, and would keep the tape alive.
        """
        self.close()
        if self.discard is not None:
            self.discard()


def failed_source(failure: Mapping[str, Any]) -> SurefootError:
    """Return the error of a source, as `failure_of` described it in the process that read the
    source.
    """
    problem = error_of_dict(failure["error"])
    if failure["trace"]:  # of the user's code
        problem.add_note(str(failure["trace"]))
        problem.of_user = True
    return problem
