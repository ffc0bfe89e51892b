"""`Stream`, the settings of a data set that can only be iterated."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

from torch.utils.data import DataLoader

from surefoot.config.keywords import known_keywords
from surefoot.data.streams.rows import NotRecordableError, encode
from surefoot.errors import ConfigError, DataError, Setting, SurefootError, first_line
from surefoot.memory import parsed_bytes

_MIN_BYTES = 1_000_000
_SPLIT_WHEN_BUILT = ("litdata", "streaming")  # packages; the second is MosaicML's
STARTS = ("auto", "fork", "spawn", "thread")


@known_keywords
class Stream:
    """Rows of an iterable source, recorded on a tape so that a run can resume and repeat its steps.

    `source` is an `IterableDataset`, a generator function, another function that returns an
    iterator, or any iterable that can be iterated again. `encode_fn` turns a row into tensors,
    arrays, text, bytes, numbers, and dicts, lists and tuples of them; `decode_fn` turns them back.
    `decode_fn` runs whenever a row is read, seeded for (seed, epoch, row), so it may augment rows.
    `tape_size` limits the tape's bytes; the oldest rows are dropped first. `directory` holds the
    tape; it is needed on several machines. Default: a part of the run's directory. `samples` is the
    number of rows of an epoch, if it is known, or of a split. `start` says how the process that reads the source
    starts: "fork" (Linux) or "spawn", or "thread" for a thread of the process that trains; "auto"
    forks on Linux and spawns elsewhere. `same_on_ranks` says that rank 0's source has all rows, so
    the sources of several ranks are not compared.

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
        start: str = "auto",
        same_on_ranks: bool = False,
    ) -> None:
        self.source, self.encode_fn, self.decode_fn = source, encode_fn, decode_fn
        self.start, self.same_on_ranks = start, same_on_ranks
        if start not in STARTS:
            raise ConfigError(
                "stream-start-unknown",
                problem=f"start = {start!r}: {', '.join(STARTS[:-1])} or {STARTS[-1]}",
                setting="start",
                value=start,
            )
        if start == "fork" and sys.platform == "win32":
            raise ConfigError(
                "stream-start-without-fork",
                problem="start = 'fork': Windows cannot fork a process",
                remedy=Setting("start", "spawn"),
                setting="start",
                value=start,
            )
        self.tape_size, self.directory, self.samples = tape_size, directory, samples
        self.tape_bytes = parsed_bytes(tape_size, setting="tape_size")
        self.name = source.__qualname__ if inspect.isroutine(source) else type(source).__qualname__
        if self.tape_bytes < _MIN_BYTES:
            raise ConfigError(
                f'tape_size = {tape_size!r} is less than 1 MB\n  write tape_size="10 GB"'
            )
        if samples is not None and (
            isinstance(samples, bool) or not isinstance(samples, int) or samples < 1
        ):
            raise ConfigError(
                f"samples = {samples!r}: the number of rows of an epoch, 1 or more, or None"
            )
        for keyword, function in (("encode_fn", encode_fn), ("decode_fn", decode_fn)):
            if function is not None and not callable(function):
                raise ConfigError(
                    f"{keyword} = {function!r} must be a function from a row to a row"
                )
        if (problem := _not_a_source(source)) is not None:
            raise DataError(problem)

    def __iter__(self) -> Iterator[Any]:
        """Read the source once, without a tape."""
        for row in iterator_of(self.source):
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

    @property
    def start_method(self) -> str:
        """How the reader starts: "fork", "spawn" or "thread"."""
        if self.start != "auto":
            return self.start
        return "fork" if sys.platform == "linux" else "spawn"

    def for_reader(self) -> "Stream":
        """Return the part that the reader needs. Only this part is sent to a spawned process."""
        part = copy(self)
        part.decode_fn = None
        return part

    def first_rows(self, samples: int) -> "Stream":
        """Return a stream of the first rows alone."""
        part = copy(self)
        part.samples = samples
        return part

    def code(self) -> list[Any]:
        """Return the user's objects whose source text is compared at a resume."""
        return [each for each in (self.source, self.encode_fn, self.decode_fn) if each is not None]


def as_stream(train_data: Any) -> Stream:
    """Return training data as a `Stream` with the default settings, or unchanged if it is one."""
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
    if (batch_size := _batched_by(source)) is not None:
        return (
            f"the rows of this {name} are batches of {batch_size} rows, and a tape records samples\n"
            f"  leave out its batching, and write Run(batch_size={batch_size})\n"
            "  or, if such a group is one sample, give a generator function: def rows(): yield from dataset"
        )
    if isinstance(source, Iterator):
        return (
            f"{name} can be iterated only once, so a resumed run could not read it again\n"
            "  give the function that returns it, without calling it: rows instead of rows()"
        )
    if isinstance(source, set | frozenset) or not (
        callable(source) or isinstance(source, Iterable)
    ):
        return (
            f"{name} is neither an iterable with a fixed order nor a function that returns an iterator\n"
            "  give an IterableDataset, a generator function, or a data set with __getitem__ and __len__ without Stream"
        )
    return None


def _batched_by(source: Any) -> Any:
    """Return the batch size of the last stage that batches rows, in a pipeline of datasets or
    webdataset, or None.
    """
    stage = getattr(source, "_ex_iterable", None)
    while stage is not None:
        function = getattr(stage, "function", None)
        if getattr(stage, "batched", False):
            own = getattr(function, "__name__", "") in ("_batch_fn", "_batch_arrow_table")
            return (
                stage.batch_size
                if own and str(function.__module__).startswith("datasets.")
                else None
            )
        stage = getattr(stage, "ex_iterable", None)
    stages = getattr(source, "pipeline", None)
    for stage in reversed(stages if isinstance(stages, list) else []):
        if isinstance(stage, DataLoader):
            return stage.batch_size
        if (kind := getattr(getattr(stage, "f", None), "__name__", "")) in (
            "_batched",
            "_unbatched",
        ):
            return stage.args[0] if kind == "_batched" else None
    return None


def built_by_rank(source: Any) -> str | None:
    """Return the class of a data set that asked for its rank when it was built, or None."""
    inner = source.dataset if isinstance(source, DataLoader) else source
    for base in type(inner).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _SPLIT_WHEN_BUILT and "Stream" in base.__name__:
            return f"{package}.{base.__name__}"
    return None


def iterator_of(source: Any) -> Iterator[Any]:
    """Return an iterator over the rows of a source. Raises `DataError` if it is not iterable."""
    opened = source() if callable(source) and not isinstance(source, Iterable) else source
    if not isinstance(opened, Iterable):
        raise DataError(
            f"the source of a stream returned {opened!r:.60}, which is not an iterator\n  write a generator function: def rows(): yield ..."
        )
    return iter(opened)
