"""The records of one kind as a table of numbers in bounded memory: recent records as they are, and
earlier ones as stretches of equally many adjacent records.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.tracking.record import Record

Numbers = NDArray[np.float64]

Summary = Literal["last", "mean", "total", "lowest", "highest"]
"""What a stretch says of a value: its last one, or its mean, sum, minimum or maximum."""

# The statistics of a stretch, of the finite values of one name; steps are those of the records
FIRST_AT, FIRST, LAST_AT, LAST, LOW_AT, LOW, HIGH_AT, HIGH, STEPS, TOTAL, COUNT, STRANGE = range(12)

Stretches = NDArray[np.float64]
"""Statistics x names x stretches."""

_WAITING = 512  # records that become numbers at once
_MOST_STRANGE = 50  # steps with a value that is not finite, of each name
_MISSING = ""  # no number
_MOST_NAMES = 20_000  # further ones are left out


class Table:
    """The numbers of records: a row for each name, a column for each record or stretch.

    NaN is a missing value, and infinity one that is not finite. The last `recent` records stay as
    they are. Earlier ones are at most `stretches` stretches of `size` records, an even number: if
    there are more, neighbors are merged and `size` doubles. The table depends on the records alone, and not on how
    many are added at once.

    `places` names for a value another one that holds its step, such as that of the largest loss of
    a record.
    """

    def __init__(
        self, *, recent: int, stretches: int, places: Mapping[str, str] | None = None
    ) -> None:
        self.most_recent = recent
        self.most_stretches = stretches
        self.places = places or {}
        self.row_of: dict[str, int] = {"step": 0}
        self.count = 0  # records
        self.size = 1
        self.stretches: Stretches = np.zeros((12, 1, 0))
        self.recent: Numbers = np.zeros((1, 0))
        self.waiting: list[Record] = []  # after `recent`
        self.strange: dict[str, list[int]] = {}  # the first steps with a value that is not finite

    def append(self, record: Record) -> None:
        """Add a record, whose step is not before that of the last one."""
        self.waiting.append(record)
        self.count += 1
        if len(self.waiting) >= _WAITING:
            self.join()

    def mark_strange(self, name: str, step: int) -> None:
        """Note a value that is not finite, but stands in no row."""
        steps = self.strange.setdefault(name, [])
        if len(steps) < _MOST_STRANGE:
            steps.append(step)

    def join(self) -> None:
        """Make numbers of the records that wait, and stretches of those that are not recent."""
        if not self.waiting:
            return
        columns = columns_of(self.waiting)
        self.waiting = []
        for name in columns:
            if name not in self.row_of and len(self.row_of) < _MOST_NAMES:
                self.row_of[name] = len(self.row_of)
        missing = len(self.row_of) - len(self.recent)
        if missing:
            self._add_rows(missing)
        steps = columns["step"]
        numbers = np.full((len(self.row_of), len(steps)), np.nan)
        for name, column in columns.items():
            if name in self.row_of:
                numbers[self.row_of[name]] = column
                for step in steps[np.isinf(column)][:_MOST_STRANGE].tolist():
                    self.mark_strange(name, int(step))
        self.recent = np.concatenate([self.recent, numbers], axis=1)
        self._fold()

    def _add_rows(self, count: int) -> None:
        recent = np.full((count, self.recent.shape[1]), np.nan)
        old = np.full((count, self.stretches.shape[2], 1), np.nan)
        self.recent = np.concatenate([self.recent, recent])
        self.stretches = np.concatenate([self.stretches, stretches_of(old, old)], axis=1)

    def _fold(self) -> None:
        while self.recent.shape[1] > self.most_recent:
            room = self.most_stretches - self.stretches.shape[2]
            if room == 0:
                self.stretches = merged_pairs(self.stretches)
                self.size *= 2
                continue
            many = min(room, (self.recent.shape[1] - self.most_recent) // self.size)
            if many == 0:
                break
            shape = (len(self.row_of), many, self.size)
            old = many * self.size
            values = self.recent[:, :old].reshape(shape)
            steps = self._recent_steps()[:, :old].reshape(shape)
            self.stretches = np.concatenate([self.stretches, stretches_of(values, steps)], axis=2)
            self.recent = self.recent[:, old:].copy()  # a view would keep all records

    def _recent_steps(self) -> Numbers:
        """Return the step of each recent value."""
        steps = np.tile(self.recent[0], (len(self.row_of), 1))
        for name, place in self.places.items():
            if name in self.row_of and place in self.row_of:
                row = self.recent[self.row_of[place]]
                steps[self.row_of[name]] = np.where(np.isfinite(row), row, self.recent[0])
        return steps

    @property
    def names(self) -> list[str]:
        """The names with a number in some record, in the order of their first ones."""
        self.join()
        return [name for name in self.row_of if name != "step"]

    @property
    def steps(self) -> NDArray[np.int64]:
        """The last step of each stretch, and the step of each recent record."""
        _, steps = self.values(["step"], "last")
        return np.asarray(steps[0], np.int64)

    def values(self, names: Sequence[str], summary: Summary) -> tuple[Numbers, Numbers]:
        """Return the steps and the values of names, of which the table has all: a row for each
        name, a column for each of `steps`. A missing value is NaN.
        """
        self.join()
        rows = [self.row_of[name] for name in names]
        old = self.stretches[:, rows]
        is_missing = old[COUNT] == 0
        ends = np.broadcast_to(self.stretches[LAST, 0], is_missing.shape)
        steps, values = {
            "last": (ends, old[LAST]),
            "mean": (ends, old[TOTAL] / np.maximum(old[COUNT], 1)),
            "total": (ends, old[TOTAL]),
            "lowest": (old[LOW_AT], old[LOW]),
            "highest": (old[HIGH_AT], old[HIGH]),
        }[summary]
        recent = self.recent[rows]
        recent_steps = np.broadcast_to(self.recent[0], recent.shape)
        if summary == "highest":
            recent_steps = self._recent_steps()[rows]
        return (
            np.concatenate([np.where(is_missing, ends, steps), recent_steps], axis=1),
            np.concatenate([np.where(is_missing, np.nan, values), recent], axis=1),
        )

    def total(self, name: str) -> float:
        """Return the sum of all finite values, added in their order."""
        if name not in self.names:
            return 0.0
        row = self.row_of[name]
        recent = self.recent[row]
        parts = [self.stretches[TOTAL, row], recent[np.isfinite(recent)]]
        return float(np.add.accumulate(np.concatenate([[0.0], *parts]))[-1])

    def last(self, name: str) -> float:
        """Return a value of the last record, or NaN if it is missing."""
        if name not in self.names:
            return math.nan
        return float(self.recent[self.row_of[name], -1])

    def curve(self, name: str, *, most: int) -> Stretches:
        """Return at most `most` stretches of the finite values of a name, without those that have
        none: statistics x stretches.
        """
        if name not in self.names:
            return np.zeros((12, 0))
        row = self.row_of[name]
        old = self.stretches[:, row]
        is_finite = np.isfinite(self.recent[row])
        values = self.recent[row, is_finite][:, None]
        steps = self.recent[0, is_finite][:, None]
        return self._merged(old[:, old[COUNT] > 0], stretches_of(values, steps), most)

    def grid(self, *, most: int) -> Stretches:
        """Return all names in at most `most` stretches, each of equally many records but the last."""
        self.join()
        steps = np.broadcast_to(self.recent[0], self.recent.shape)[:, :, None]
        singles = stretches_of(self.recent[:, :, None], steps)
        return self._merged(self.stretches, singles, most)

    def _merged(self, old: Stretches, singles: Stretches, most: int) -> Stretches:
        new = merged_until(singles, math.ceil(singles.shape[-1] / self.size))
        return merged_until(np.concatenate([old, new], axis=-1), most)

    def strange_steps(self, name: str) -> list[int]:
        """Return the first steps with a value that is not finite."""
        self.join()
        return sorted(set(self.strange.get(name, ())))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the content as arrays, from which `restore` makes the same table."""
        self.join()
        return {"stretches": self.stretches, "recent": self.recent}

    def state(self) -> dict[str, Any]:
        """Return the rest of the content as JSON values."""
        self.join()
        return {
            "names": [*self.row_of],
            "count": self.count,
            "size": self.size,
            "strange": self.strange,
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        """Replace the content by that of `arrays` and `state`."""
        self.stretches = arrays["stretches"]
        self.recent = arrays["recent"]
        self.row_of = {name: row for row, name in enumerate(state["names"])}
        self.count = state["count"]
        self.size = state["size"]
        self.strange = state["strange"]


def columns_of(records: Sequence[Record]) -> dict[str, Numbers]:
    """Return the numbers of records by name, without names that have none. NaN is a missing value,
    and infinity one that is not finite.

    >>> columns_of([{"step": 1, "loss": float("nan")}, {"step": 2, "text": "a"}])
    {'step': array([1., 2.]), 'loss': array([inf, nan])}
    """
    first = tuple(records[0])
    values: Iterable[Sequence[Any]]
    if all(tuple(record) == first for record in records):
        names: Iterable[str] = first
        values = zip(*map(dict.values, records), strict=True)
    else:
        names = dict.fromkeys(chain.from_iterable(records))
        values = ([record.get(name, _MISSING) for record in records] for name in names)
    columns = {}
    for name, of_name in zip(names, values, strict=True):
        numbers = _numbers(of_name)
        if not np.isnan(numbers).all():
            columns[name] = numbers
    return columns


def _numbers(values: Sequence[Any]) -> Numbers:
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):  # an integer beyond all floating-point numbers
            numbers = np.array(values, np.float64)
            numbers[np.isnan(numbers)] = np.inf
            return numbers
    return np.array([_number(value) for value in values])


def _number(value: Any) -> float:
    if value is None:  # as a value that is not finite is written
        return math.inf
    if type(value) not in (int, float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(number) else number


def stretches_of(values: Numbers, steps: Numbers) -> Stretches:
    """Return the statistics of each stretch, which is the last dimension of values and steps."""
    is_finite = np.isfinite(values)
    lowest = np.where(is_finite, values, np.inf)
    highest = np.where(is_finite, values, -np.inf)
    size = values.shape[-1]
    first = is_finite.argmax(axis=-1)
    last = size - 1 - is_finite[..., ::-1].argmax(axis=-1)

    def at(index: NDArray[np.int64], array: Numbers) -> Numbers:
        return np.take_along_axis(array, index[..., None], axis=-1)[..., 0]

    low = lowest.argmin(axis=-1)
    high = highest.argmax(axis=-1)
    statistics = np.stack(
        [
            at(first, steps),
            at(first, values),
            at(last, steps),
            at(last, values),
            at(low, steps),
            at(low, lowest),
            at(high, steps),
            at(high, highest),
            np.where(is_finite, steps, 0.0).sum(axis=-1),
            np.where(is_finite, values, 0.0).sum(axis=-1),
            is_finite.sum(axis=-1),
            np.isinf(values).sum(axis=-1),
        ]
    ).astype(np.float64)
    is_empty = statistics[COUNT] == 0
    for statistic in (FIRST_AT, FIRST, LAST_AT, LAST, LOW_AT, HIGH_AT):
        statistics[statistic, is_empty] = np.nan
    return statistics


def merged_pairs(stretches: Stretches) -> Stretches:
    """Return each stretch merged with the next one, of an even number."""
    one = stretches[..., ::2]
    other = stretches[..., 1::2]
    with np.errstate(invalid="ignore"):
        merged = one + other  # the sums; the other statistics are chosen below
    choices = {
        FIRST_AT: one[COUNT] == 0,
        LAST_AT: other[COUNT] > 0,
        LOW_AT: other[LOW] < one[LOW],
        HIGH_AT: other[HIGH] > one[HIGH],
    }
    for at, from_other in choices.items():  # a step and its value are adjacent
        merged[at : at + 2] = np.where(from_other, other[at : at + 2], one[at : at + 2])
    return merged


def merged_until(stretches: Stretches, count: int) -> Stretches:
    """Merge neighbors until there are at most so many. The last one stays alone if they are odd."""
    while stretches.shape[-1] > max(1, count):
        pairs = stretches.shape[-1] // 2
        merged = merged_pairs(stretches[..., : 2 * pairs])
        stretches = np.concatenate([merged, stretches[..., 2 * pairs :]], axis=-1)
    return stretches
