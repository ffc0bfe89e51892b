"""The process that reads the source of a stream.

The reader is a process, because a source may draw from the global random generators, which belong
to the training steps. It sends messages through a pipe, whose full buffer makes it wait: b"r" rows,
b"s" a state of the source, b"n" a note, b"e" the end of the stream, b"x" an error.
"""

import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import torch

from surefoot.data.streams.shards import ENTRY, chained
from surefoot.data.streams.stream import Stream, iterator_of
from surefoot.data.workers import begin_process
from surefoot.errors import DataError, SurefootError, behind, first_line
from surefoot.seeding import seed_generators, stream_key

_SENT_BYTES = 1 << 18  # rows of one message
_WAITING_BYTES = 1 << 22  # encoded rows that wait for the pipe
_STATE_S = 5.0  # between two states of the source
COMPARED = 16  # rows of the tape that are compared with the source after a resume


@runtime_checkable
class Stateful(Protocol):
    """A source that can continue where it was."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the source."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at this position."""


@runtime_checkable
class Skipping(Protocol):
    """A source that can leave out its first rows."""

    def skip(self, n: int) -> Any:
        """Return the source without its first `n` rows."""


def read_source(
    stream: Stream,
    pipe: Connection,
    parent: int,
    seed: int,
    after: tuple[int, int, bytes],
    tail: dict[int, bytes],
    states: list[Any],
) -> None:
    """Send the rows of a source through a pipe: the rows after the first `after[0]`, which end at
    byte `after[1]` of the tape.

    `tail` has hashes of the rows' bytes before these, which are compared with the source, and
    `states` its earlier states.
    """
    begin_process(parent, collects=True)
    torch.set_num_threads(1)
    outbox = _Outbox(pipe, *after[1:])
    try:
        seed_generators(stream_key(seed, "stream"))
        rows = _advanced(stream, after[0], tail, states, outbox)
        stop, saved_s = stream.samples, time.monotonic()
        number = after[0]
        while stop is None or number < stop:
            try:
                row = next(rows)
            except StopIteration:
                break
            except SurefootError:
                raise
            except Exception as problem:
                raise DataError(
                    f"row {number} of the stream cannot be read: {type(problem).__name__}: {first_line(problem)}\n"
                    "  the rows before it are on the tape: correct the source, and start the same command again"
                ) from problem
            outbox.put("r", stream.encoded(row, number=number))
            number += 1
            if (
                time.monotonic() - saved_s > _STATE_S
                and (state := _state(stream.source)) is not None
            ):
                outbox.put("s", json.dumps([number, state]).encode())
                saved_s = time.monotonic()
        outbox.put("e", b"")
    except Exception as problem:
        failure = {
            "text": str(problem),
            "trace": "".join(traceback.format_exception(behind(problem) or problem)),
        }
        if not isinstance(problem, SurefootError):
            failure["text"] = (
                f"the source of the stream cannot be read: {type(problem).__name__}: {first_line(problem)}"
            )
        outbox.put("x", json.dumps(failure).encode())
    finally:
        outbox.close()


def _advanced(
    stream: Stream, count: int, tail: dict[int, bytes], states: list[Any], outbox: "_Outbox"
) -> Iterator[Any]:
    """Return an iterator over the rows after the first `count`, and send a note if the source now
    gives other rows than before.
    """
    if not count:
        return iterator_of(stream.source)
    rows, same = iter(()), False
    for start, how, begin in _ways(stream.source, count, states):
        rows = begin()
        if same := _gives_tail(stream, rows, start, count, tail):
            outbox.put("n", f"the stream continues at row {count:,}: {how}".encode())
            break
    if not same:
        outbox.put(
            "n",
            f"WARNING: the source gives other rows than the tape has recorded before row {count:,}\n"
            "  past steps repeat, because they read the tape; further rows may repeat or miss rows of the source\n"
            "  if the source draws its order, give it a fixed seed".encode(),
        )
    return rows


def _ways(
    source: Any, count: int, states: list[Any]
) -> Iterator[tuple[int, str, Callable[[], Iterator[Any]]]]:
    """Yield the ways to reach row `count`: the row at which each begins, its description, and a
    function that begins there.
    """
    if isinstance(source, Stateful) and (beginning := _state(source)) is not None:

        def from_state(state: Any) -> Iterator[Any]:
            source.load_state_dict(state)
            return iterator_of(source)

        for number, state in reversed([each for each in states if each[0] < count]):
            yield (
                number,
                f"its source has loaded the state of row {number:,}",
                partial(from_state, state),
            )
        source.load_state_dict(beginning)
    start = max(0, count - COMPARED)
    if isinstance(source, Skipping) and start:
        yield (
            start,
            f"its source has skipped {start:,} rows",
            lambda: iterator_of(source.skip(start)),
        )
    yield 0, f"its first {count:,} rows were read again and discarded", partial(iterator_of, source)


def _gives_tail(
    stream: Stream, rows: Iterator[Any], start: int, count: int, tail: dict[int, bytes]
) -> bool:
    equal, number = True, start - 1
    for number, row in enumerate(islice(rows, count - start), start):
        if number in tail:
            equal = equal and chained(b"", stream.encoded(row, number=number)) == tail[number]
    return equal and number == count - 1


def _state(source: Any) -> dict[str, Any] | None:
    if not isinstance(source, Stateful):
        return None
    try:
        state = source.state_dict()
        return state if isinstance(state, dict) and json.loads(json.dumps(state)) == state else None
    except Exception:  # of the user's object: the rows are read again instead
        return None


class _Outbox:
    """Messages that wait for the pipe, at most a few megabytes. Rows that wait together are sent
    together.
    """

    def __init__(self, pipe: Connection, end: int, digest: bytes) -> None:
        self.pipe, self.end, self.digest = pipe, end, digest
        self.waiting: deque[tuple[str, bytes]] = deque()
        self.waiting_bytes, self.is_closed = 0, False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._send_all, daemon=True)
        self.thread.start()

    def put(self, kind: str, message: bytes) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting_bytes < _WAITING_BYTES)
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
            rows, size, other = list[bytes](), 0, None
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
            try:
                if rows:
                    self.pipe.send_bytes(self._joined(rows))
                if other is not None:
                    self.pipe.send_bytes(other)
                if not rows and other is None:
                    return
            except OSError:  # the run has ended
                os._exit(0)

    def _joined(self, rows: list[bytes]) -> bytes:
        entries = bytearray()
        for row in rows:
            self.digest, self.end = chained(self.digest, row), self.end + len(row)
            entries += ENTRY.pack(self.end, self.digest)
        return b"".join([b"r", len(rows).to_bytes(4, "little"), entries, *rows])
