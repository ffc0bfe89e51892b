"""The process that reads the source of a stream.

The reader is a process, because a source may draw from the global random generators, which belong
to the training steps. A source that draws from none may be read by a thread. The reader sends messages through a pipe, whose full buffer makes it wait: b"r" rows,
b"s" a state of the source, b"n" a note, b"e" the end of the stream, b"x" an error.
"""

import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import torch

from surefoot.checkpoint.nested_state import Stateful
from surefoot.data.fingerprints import hash_of
from surefoot.data.streams.one_rank import become_one_rank
from surefoot.data.streams.shards import ENTRY, chained
from surefoot.data.streams.stream import Stream, iterator_of
from surefoot.data.workers import begin_process, leave_with_children
from surefoot.errors import DataError, SurefootError, behind, first_line
from surefoot.seeding import global_generators, seed_generators, stream_key

_SENT_BYTES = 1 << 18  # rows of one message
_WAITING_BYTES = 1 << 22  # encoded rows that wait for the pipe
_STATE_S = 5.0  # between two states of the source
COMPARED = 16  # rows of the tape that are compared with the source after a resume


@runtime_checkable
class Skipping(Protocol):
    """A source that can leave out its first rows."""

    def skip(self, n: int) -> Any:
        """Return the source without its first `n` rows."""


@dataclass(frozen=True)
class HowToRead:
    """How a run reads the source of its stream."""

    seed: int
    is_one_rank: bool  # the source sees rank 0 of 1, whatever the number of ranks


@dataclass(frozen=True)
class SourcePosition:
    """Where the reader begins: behind the first `row` rows, which end at byte `end` of the tape and
    have the hash `digest`.

    `tail` has hashes of the rows' bytes before these, which are compared with the source, and
    `states` its earlier states. `head` is the number of rows of the first step.
    """

    row: int
    end: int
    digest: bytes
    tail: dict[int, bytes]
    states: list[Any]
    head: int


def read_source(
    stream: Stream, pipe: Connection, parent: int, how: HowToRead, position: SourcePosition
) -> None:
    """Send the rows of a source through a pipe, from a process of its own."""
    begin_process(parent, collects=True)
    if hasattr(os, "register_at_fork"):  # a child of the source must not keep the pipe open
        os.register_at_fork(after_in_child=pipe.close)
    if how.is_one_rank:
        become_one_rank()
    torch.set_num_threads(1)
    seed_generators(stream_key(how.seed, "stream"))
    outbox = _Outbox(pipe, position.end, position.digest, leave_fn=leave_with_children)
    _send_rows(stream, position, outbox)


def read_source_in_thread(
    stream: Stream, pipe: Connection, position: SourcePosition, has_closed: Callable[[], bool]
) -> None:
    """Send the rows of a source through a pipe, from a thread of the process that trains."""
    outbox = _Outbox(pipe, position.end, position.digest, has_closed=has_closed)
    try:
        _send_rows(stream, position, outbox, is_thread=True)
    finally:
        pipe.close()


def _send_rows(
    stream: Stream, position: SourcePosition, outbox: "_Outbox", *, is_thread: bool = False
) -> None:
    number = position.row
    try:
        drawn_before = _states_of_generators() if is_thread else None
        rows = _advanced(stream, number, position.tail, position.states, outbox)
        stop = stream.samples
        saved_s = time.monotonic()
        while stop is None or number < stop:
            try:
                row = next(rows)
            except StopIteration:
                break
            except SurefootError:
                raise
            except (Exception, SystemExit) as problem:
                raise DataError(
                    "stream-row-failed",
                    problem=f"row {number} of the stream cannot be read: "
                    f"{type(problem).__name__}: {first_line(problem)}",
                    remedy="the rows before it are on the tape: correct the source, and start the same command again",
                    row=number,
                ) from problem
            # until it has these rows the run waits, so only the source can have drawn
            if drawn_before is not None and number < position.head:
                _refuse_draws(drawn_before, number)
            outbox.put("r", stream.encoded(row, number=number))
            number += 1
            if time.monotonic() - saved_s > _STATE_S:
                state = _state(stream.source)
                if state is not None:
                    outbox.put("s", json.dumps([number, state]).encode())
                    saved_s = time.monotonic()
        outbox.put("e", b"")
    except _ClosedError:
        return
    except (Exception, SystemExit) as problem:
        error = problem if isinstance(problem, SurefootError) else _failed(problem)
        trace = "".join(traceback.format_exception(behind(problem) or problem))
        outbox.put("x", json.dumps(failure_of(error, trace)).encode())
    finally:
        outbox.close()


def failure_of(error: SurefootError, trace: str = "") -> dict[str, Any]:
    """Return an error and the traceback of its cause as JSON, for other processes."""
    return {"trace": trace, "error": error.to_dict()}


def _failed(problem: BaseException) -> DataError:
    return DataError(
        "stream-source-failed",
        problem="the source of the stream cannot be read: "
        f"{type(problem).__name__}: {first_line(problem)}",
    )


def _states_of_generators() -> dict[str, str]:
    return {generator.name: hash_of(generator.get_state()) for generator in global_generators()}


def _refuse_draws(before: dict[str, str], number: int) -> None:
    after = _states_of_generators()
    for name, state in before.items():
        if after[name] != state:
            raise DataError(
                "stream-thread-draws",
                problem=f"the source draws from the global generator of {name} (row {number}), "
                'and start = "thread" reads it in the process that trains',
                reason="its draws would change those of the steps, so no run could be repeated",
                remedy="give the source a generator of its own, or"
                ' sf.data.Stream(source, start="spawn")',
                setting="start",
                value="thread",
                generator=name,
            )


def _advanced(
    stream: Stream, count: int, tail: dict[int, bytes], states: list[Any], outbox: "_Outbox"
) -> Iterator[Any]:
    """Return an iterator over the rows after the first `count`, and send a note if the source now
    gives other rows than before.
    """
    if not count:
        return iterator_of(stream.source)
    rows: Iterator[Any] = iter(())
    for start, how, begin in _ways(stream.source, count, states):
        rows = begin()
        if _gives_tail(stream, rows, start, count, tail):
            outbox.put("n", f"the stream continues at row {count:,}: {how}".encode())
            return rows
    warning = (
        f"WARNING: the source gives other rows than the tape has recorded before row {count:,}\n"
        "  past steps repeat, because they read the tape; further rows may repeat or miss rows of the source\n"
        "  if the source draws its order, give it a fixed seed"
    )
    outbox.put("n", warning.encode())
    return rows


def _ways(
    source: Any, count: int, states: list[Any]
) -> Iterator[tuple[int, str, Callable[[], Iterator[Any]]]]:
    """Yield the ways to reach row `count`: the row at which each begins, its description, and a
    function that begins there.
    """
    first_state = _state(source)
    if first_state is not None:
        for number, state in reversed(states):
            if number < count:
                how = f"its source has loaded the state of row {number:,}"
                yield number, how, partial(_iterator_from, source, state)
        source.load_state_dict(first_state)
    start = max(0, count - COMPARED)
    if isinstance(source, Skipping) and start:
        how = f"its source has skipped {start:,} rows"
        yield start, how, lambda: iterator_of(source.skip(start))
    how = f"its first {count:,} rows were read again and discarded"
    yield 0, how, partial(iterator_of, source)


def _iterator_from(source: Stateful, state: Any) -> Iterator[Any]:
    source.load_state_dict(state)
    return iterator_of(source)


def _gives_tail(
    stream: Stream, rows: Iterator[Any], start: int, count: int, tail: dict[int, bytes]
) -> bool:
    """Read the rows before row `count`; return False if they are not those of the tape, or too
    few.
    """
    is_equal = True
    number = start
    for row in islice(rows, count - start):
        if is_equal and number in tail:
            is_equal = chained(b"", stream.encoded(row, number=number)) == tail[number]
        number += 1
    return is_equal and number == count


def _state(source: Any) -> dict[str, Any] | None:
    """Return the state of a source, or None if it has none that is JSON."""
    if not isinstance(source, Stateful):
        return None
    try:
        state = source.state_dict()
        is_json = isinstance(state, dict) and json.loads(json.dumps(state)) == state
    except Exception:  # of the user's object: the rows are read again instead
        return None
    return state if is_json else None


class _ClosedError(Exception):
    """Nobody receives the messages of a thread any more."""


class _Outbox:
    """Messages that wait for the pipe, at most a few megabytes. Rows that wait together are sent
    together.
    """

    def __init__(
        self,
        pipe: Connection,
        end: int,
        digest: bytes,
        *,
        leave_fn: Callable[[], None] | None = None,
        has_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pipe = pipe
        self.end = end
        self.digest = digest
        self.leave_fn = leave_fn  # called when nobody listens any more; None: `put` raises
        self.has_closed = has_closed
        self.is_broken = False
        self.is_closed = False
        self.waiting: deque[tuple[str, bytes]] = deque()
        self.waiting_bytes = 0
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._send_all, daemon=True)
        self.thread.start()

    def put(self, kind: str, message: bytes) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting_bytes < _WAITING_BYTES or self.is_broken)
            if self.is_broken or self.has_closed():
                raise _ClosedError
            self.waiting.append((kind, message))
            self.waiting_bytes += len(message)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        self.thread.join()

    def _send_all(self) -> None:
        while True:
            rows, other = self._next()
            if not rows and other is None:
                return
            try:
                if rows:
                    self.pipe.send_bytes(self._joined(rows))
                if other is not None:
                    self.pipe.send_bytes(other)
            except OSError:  # the run has ended
                if self.leave_fn is not None:
                    self.leave_fn()
                with self.changed:
                    self.is_broken = True
                    self.changed.notify_all()
                return

    def _next(self) -> tuple[list[bytes], bytes | None]:
        """Wait for messages. Return the rows that wait together, and the message of another kind
        behind them; neither once the outbox is closed and empty.
        """
        rows = list[bytes]()
        other: bytes | None = None
        size = 0
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.is_closed)
            while self.waiting and size < _SENT_BYTES and other is None:
                kind, message = self.waiting.popleft()
                size += len(message)
                if kind == "r":
                    rows.append(message)
                else:
                    other = kind.encode() + message
            self.waiting_bytes -= size
            self.changed.notify_all()
        return rows, other

    def _joined(self, rows: list[bytes]) -> bytes:
        entries = bytearray()
        for row in rows:
            self.digest = chained(self.digest, row)
            self.end += len(row)
            entries += ENTRY.pack(self.end, self.digest)
        return b"".join([b"r", len(rows).to_bytes(4, "little"), entries, *rows])
