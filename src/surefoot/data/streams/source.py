"""The source of a stream, and the process that reads it.

The reader is a process, because a source may draw from the global random generators, which belong to the training steps. It
sends messages through a pipe, whose full buffer makes it wait: b"r" rows, b"s" a state of the source, b"n" a note, b"e" the
end of the stream, b"x" an error.
"""

import inspect
import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from surefoot.config.keywords import known_keywords
from surefoot.data.streams.rows import NotRecordableError, encode
from surefoot.data.streams.tape import ENTRY, chained
from surefoot.data.workers import begin_process
from surefoot.errors import ConfigError, DataError, SurefootError, first_line
from surefoot.memory import parsed_bytes
from surefoot.seeding import seed_generators, stream_key

_MIN_BYTES = 1_000_000
_SENT_BYTES = 1 << 18  # rows of one message
_WAITING_BYTES = 1 << 22  # encoded rows that wait for the pipe
_STATE_S = 5.0  # between two states of the source
COMPARED = 16  # rows of the tape that are compared with the source after a resume


@runtime_checkable
class Stateful(Protocol):
    """A source that can go on where it was."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the source."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at this position."""


@runtime_checkable
class Skipping(Protocol):
    """A source that can leave out its first rows."""

    def skip(self, n: int) -> Any:
        """Return the source without its first `n` rows."""


@known_keywords
class Stream:
    """Rows of an iterable source, recorded on a tape so that a run can resume and repeat its steps.

    `source` is an `IterableDataset`, a generator function, another function that returns an iterator, or any iterable that can
    be iterated again. `encode_fn` turns a row into tensors, arrays, text, bytes, numbers, and dicts, lists and tuples of them;
    `decode_fn` turns them back. `decode_fn` runs whenever a row is read, seeded for (seed, epoch, row), so it may augment rows.
    `tape_size` limits the tape's bytes; the oldest rows are dropped first. `directory` holds the tape; it is needed on several
    machines. Default: a part of the run's directory. `samples` is the number of rows of an epoch, if it is known.

    >>> def rows():
    ...     for number in range(1_000_000):
    ...         yield {"x": number / 2}
    >>> stream = Stream(rows, tape_size="10 GB")
    >>> next(iter(stream))
    {'x': 0.0}
    """

    def __init__(
        self,
        source: Any,
        *,
        encode_fn: Callable[[Any], Any] | None = None,
        decode_fn: Callable[[Any], Any] | None = None,
        tape_size: str = "10 GB",
        directory: str | os.PathLike[str] | None = None,
        samples: int | None = None,
    ) -> None:
        self.source, self.encode_fn, self.decode_fn = source, encode_fn, decode_fn
        self.tape_size, self.directory, self.samples = tape_size, directory, samples
        self.tape_bytes = parsed_bytes(tape_size, setting="tape_size")
        self.name = source.__qualname__ if inspect.isroutine(source) else type(source).__qualname__
        if self.tape_bytes < _MIN_BYTES:
            raise ConfigError(f'tape_size = {tape_size!r} is less than 1 MB\n  write tape_size="10 GB"')
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise ConfigError(f"samples = {samples!r}: the number of rows of an epoch, 1 or more, or None")
        for keyword, function in (("encode_fn", encode_fn), ("decode_fn", decode_fn)):
            if function is not None and not callable(function):
                raise ConfigError(f"{keyword} = {function!r} must be a function from a row to a row")
        if (problem := _not_a_source(source)) is not None:
            raise DataError(problem)

    def __iter__(self) -> Iterator[Any]:
        """Read the source once, without a tape."""
        for row in _iterator(self.source):
            recorded = row if self.encode_fn is None else self.encode_fn(row)
            yield recorded if self.decode_fn is None else self.decode_fn(recorded)

    def encoded(self, row: Any, *, number: int) -> bytes:
        """Return the bytes of a row. Raises `DataError` with the number of the row."""
        try:
            return encode(row if self.encode_fn is None else self.encode_fn(row))
        except NotRecordableError as problem:
            returned = "" if self.encode_fn is None else " that encode_fn returned"
            raise DataError(
                f"row {number} of the stream{returned} cannot be recorded: {problem}\n"
                "  a tape holds tensors, NumPy arrays, text, bytes, numbers, and dicts, lists and tuples of them, and no pickle\n"
                "  convert other objects: sf.data.Stream(source, encode_fn=lambda row: {...}, decode_fn=lambda recorded: ...)"
            ) from None
        except SurefootError:
            raise
        except Exception as problem:
            text = f"row {number} of the stream: encode_fn raises {type(problem).__name__}: {first_line(problem)}"
            raise DataError(text) from problem

    def code(self) -> list[Any]:
        """Return the user's objects whose source text is compared at a resume."""
        return [each for each in (self.source, self.encode_fn, self.decode_fn) if each is not None]


def as_stream(train_data: Any) -> Stream:
    return train_data if isinstance(train_data, Stream) else Stream(train_data)


def _not_a_source(source: Any) -> str | None:
    name = type(source).__name__
    if inspect.isclass(source):
        return f"a stream's source is the class {source.__name__}\n  give an object: {source.__name__}(...)"
    if isinstance(source, DataLoader):
        if source.batch_size is None and source.batch_sampler is None:
            return None
        return (
            f"the stream is a DataLoader that makes batches (batch_size={source.batch_size}), and a tape records samples\n"
            "  give its data set: train_data=loader.dataset, with Run(batch_size=..., collate_fn=loader.collate_fn)\n"
            "  or keep its workers: DataLoader(dataset, batch_size=None, num_workers=...)"
        )
    if isinstance(source, Iterator) or (isinstance(source, Iterable) and iter(source) is source):
        return (
            f"{name} can be iterated only once, so a resumed run could not read it again\n"
            "  give the function that returns it, without calling it: Stream(rows) instead of Stream(rows())"
        )
    if isinstance(source, set | frozenset) or not (callable(source) or isinstance(source, Iterable)):
        return (
            f"{name} is neither an iterable with a fixed order nor a function that returns an iterator\n"
            "  give an IterableDataset, a generator function, or a data set with __getitem__ and __len__ without Stream"
        )
    return None


def _iterator(source: Any) -> Iterator[Any]:
    opened = source() if callable(source) and not isinstance(source, Iterable) else source
    if not isinstance(opened, Iterable):
        raise DataError(
            f"the source of a stream returned {opened!r:.60}, which is not an iterator\n  write a generator function: def rows(): yield ..."
        )
    return iter(opened)


def read_source(
    stream: Stream,
    pipe: Connection,
    parent: int,
    seed: int,
    after: tuple[int, int, bytes],
    tail: dict[int, bytes],
    states: list[Any],
) -> None:
    """Send the rows of a source through a pipe: the rows after the first `after[0]`, which end at byte `after[1]` of the tape.

    `tail` has hashes of the rows' bytes before these, which are compared with the source, and `states` earlier states of it.
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
            if time.monotonic() - saved_s > _STATE_S and (state := _state(stream.source)) is not None:
                outbox.put("s", json.dumps([number, state]).encode())
                saved_s = time.monotonic()
        outbox.put("e", b"")
    except Exception as problem:
        failure = {"text": str(problem), "trace": "".join(traceback.format_exception(problem))}
        if not isinstance(problem, SurefootError):
            failure["text"] = f"the source of the stream cannot be read: {type(problem).__name__}: {first_line(problem)}"
        outbox.put("x", json.dumps(failure).encode())
    finally:
        outbox.close()


def _advanced(
    stream: Stream, count: int, tail: dict[int, bytes], states: list[Any], outbox: "_Outbox"
) -> Iterator[Any]:
    """Return an iterator over the rows after the first `count`, and send a note if the source now gives other rows than before."""
    if not count:
        return _iterator(stream.source)
    rows, same = iter(()), False
    for start, how, begin in _ways(stream.source, count, states):
        rows = begin()
        if same := _gives_tail(stream, rows, start, count, tail):
            outbox.put("n", f"the stream goes on at row {count:,}: {how}".encode())
            break
    if not same:
        outbox.put(
            "n",
            f"WARNING: the source gives other rows than the tape has recorded before row {count:,}\n"
            "  past steps repeat, because they read the tape; further rows may repeat or miss rows of the source\n"
            "  if the source draws its order, give it a fixed seed".encode(),
        )
    return rows


def _ways(source: Any, count: int, states: list[Any]) -> Iterator[tuple[int, str, Callable[[], Iterator[Any]]]]:
    """Yield the ways to reach row `count`: the row at which each begins, its description, and a function that begins there."""
    if isinstance(source, Stateful) and (beginning := _state(source)) is not None:

        def from_state(state: Any) -> Iterator[Any]:
            source.load_state_dict(state)
            return _iterator(source)

        for number, state in reversed([each for each in states if each[0] < count]):
            yield number, f"its source has loaded the state of row {number:,}", partial(from_state, state)
        source.load_state_dict(beginning)
    start = max(0, count - COMPARED)
    if isinstance(source, Skipping) and start:
        yield start, f"its source has skipped {start:,} rows", lambda: _iterator(source.skip(start))
    yield 0, f"its first {count:,} rows were read again and discarded", partial(_iterator, source)


def _gives_tail(stream: Stream, rows: Iterator[Any], start: int, count: int, tail: dict[int, bytes]) -> bool:
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
    """Messages that wait for the pipe, at most a few megabytes. Rows that wait together are sent together."""

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
