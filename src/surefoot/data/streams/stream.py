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
from surefoot.errors import (
    ConfigError,
    DataError,
    Setting,
    SurefootError,
    first_line,
    out_of_range,
)
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
        self.source = source
        self.encode_fn = encode_fn
        self.decode_fn = decode_fn
        self.tape_size = tape_size
        self.directory = directory
        self.samples = samples
        self.start = start
        self.same_on_ranks = same_on_ranks
        if start not in STARTS:
            raise out_of_range("start", start, f"{', '.join(STARTS[:-1])} or {STARTS[-1]}")
        if start == "fork" and sys.platform == "win32":
            raise ConfigError(
                "stream-start-without-fork",
                problem="start = 'fork': Windows cannot fork a process",
                remedy=Setting("start", "spawn"),
                setting="start",
                value=start,
            )
        self.tape_bytes = parsed_bytes(tape_size, setting="tape_size")
        self.name = source.__qualname__ if inspect.isroutine(source) else type(source).__qualname__
        if self.tape_bytes < _MIN_BYTES:
            raise ConfigError(
                "stream-tape-too-small",
                problem=f"tape_size = {tape_size!r} is less than 1 MB",
                remedy=Setting("tape_size", "10 GB"),
                setting="tape_size",
                value=tape_size,
            )
        if samples is not None:
            is_number = isinstance(samples, int) and not isinstance(samples, bool)
            if not is_number or samples < 1:
                raise out_of_range("samples", samples, "the number of rows of an epoch, or None")
        for keyword, function in (("encode_fn", encode_fn), ("decode_fn", decode_fn)):
            if function is not None and not callable(function):
                raise out_of_range(keyword, function, "a function from a row to a row")
        _check_source(source)

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
                "stream-row-not-recordable",
                problem=f"row {number} of the stream{returned} cannot be recorded: {problem}",
                reason="a tape holds tensors, NumPy arrays, text, bytes, numbers, and dicts, lists"
                " and tuples of them, and no pickle",
                remedy="convert other objects: sf.data.Stream(source, encode_fn=lambda row: {...},"
                " decode_fn=lambda recorded: ...)",
                row=number,
            ) from None
        except SurefootError:
            raise
        except Exception as problem:
            raise DataError(
                "stream-encode-fn-failed",
                problem=f"row {number} of the stream: encode_fn raises {type(problem).__name__}:"
                f" {first_line(problem)}",
                row=number,
            ) from problem

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
        objects = (self.source, self.encode_fn, self.decode_fn)
        return [value for value in objects if value is not None]


def as_stream(train_data: Any) -> Stream:
    """Return training data as a `Stream` with the default settings, or unchanged if it is one."""
    return train_data if isinstance(train_data, Stream) else Stream(train_data)


def _check_source(source: Any) -> None:
    """Raise `DataError` if a source gives no rows, or cannot be read again."""
    name = type(source).__name__
    if inspect.isclass(source):
        raise DataError(
            "stream-source-is-class",
            problem=f"a stream's source is the class {source.__name__}",
            remedy=f"give an object: {source.__name__}(...)",
            source=source.__name__,
        )
    if isinstance(source, DataLoader):
        makes_batches = source.batch_size is not None or source.batch_sampler is not None
        batch_size = source.batch_size if makes_batches else None
        cures = [
            "give its data set: train_data=loader.dataset, with Run(batch_size=...,"
            " collate_fn=loader.collate_fn)",
            "or keep its workers: DataLoader(dataset, batch_size=None, num_workers=...)",
        ]
    else:
        batch_size = _batched_by(source)
        makes_batches = batch_size is not None
        cures = [
            f"leave out its batching, and write Run(batch_size={batch_size})",
            "or, if such a group is one sample, give a generator function: def rows(): yield from"
            " dataset",
        ]
    if makes_batches:
        raise DataError(
            "stream-source-of-batches",
            problem=f"the rows of this {name} are batches (batch_size={batch_size}), and a tape"
            " records samples",
            remedy=cures,
            source=name,
            batch_size=batch_size,
        )
    if isinstance(source, Iterator):
        raise DataError(
            "stream-source-read-once",
            problem=f"{name} can be iterated only once, so a resumed run could not read it again",
            remedy="give the function that returns it, without calling it: rows instead of rows()",
            source=name,
        )
    has_rows = callable(source) or isinstance(source, Iterable)
    if not has_rows or isinstance(source, set | frozenset):
        raise DataError(
            "stream-source-unordered",
            problem=f"{name} is neither an iterable with a fixed order nor a function that returns"
            " an iterator",
            remedy="give an IterableDataset, a generator function, or a data set with __getitem__"
            " and __len__ without Stream",
            source=name,
        )


def _batched_by(source: Any) -> Any:
    """Return the batch size of the last stage that batches rows, in a pipeline of datasets or
    webdataset, or None.
    """
    # datasets: `batch` is a map over batches with a function of its own
    stage = getattr(source, "_ex_iterable", None)
    while stage is not None:
        if getattr(stage, "batched", False):
            function = getattr(stage, "function", None)
            name = getattr(function, "__name__", "")
            if name not in ("_batch_fn", "_batch_arrow_table"):
                return None
            return stage.batch_size if str(function.__module__).startswith("datasets.") else None
        stage = getattr(stage, "ex_iterable", None)
    # webdataset: a list of stages
    stages = getattr(source, "pipeline", None)
    if not isinstance(stages, list):
        return None
    for stage in reversed(stages):
        if isinstance(stage, DataLoader):
            return stage.batch_size
        name = getattr(getattr(stage, "f", None), "__name__", "")
        if name == "_batched":
            return stage.args[0]
        if name == "_unbatched":
            return None
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
    rows = source
    if callable(source) and not isinstance(source, Iterable):
        rows = source()
    if not isinstance(rows, Iterable):
        raise DataError(
            "stream-source-not-iterable",
            problem=f"the source of a stream returned {rows!r:.60}, which is not an iterator",
            remedy="write a generator function: def rows(): yield ...",
        )
    return iter(rows)
