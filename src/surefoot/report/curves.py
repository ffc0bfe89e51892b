"""A curve of any length in bounded memory, with its points to draw, its extrema and its smoothed
form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCHES = 300  # a long curve has 300 to 600 stretches, each drawn as two points
_STRANGE = 50  # steps with a non-finite value that are stored
_WAITING = 1024  # single points that are joined to the others at once

Rows = NDArray[np.float64]
"""A row for each stretch of adjacent points: step and value of the minimum, step and value of the
maximum, sum of the steps, sum of the values, and number of points.
"""

_LOW_AT, _LOW, _HIGH_AT, _HIGH, _STEPS, _TOTAL, _COUNT = range(7)


def total_of(values: Sequence[float] | NDArray[Any], before: float) -> float:
    """Add values in order, as a loop does: `numpy.sum` and Python's `sum` round in another
    order.
    """
    return float(
        np.add.accumulate(np.concatenate([[before], np.asarray(values, dtype=np.float64)]))[-1]
    )


@dataclass(eq=False)
class Curve:
    """Values by step, added in order, in bounded memory. Adjacent points become stretches of `size`
    points, and `size` doubles when there are more than 2 * `stretches` of them.

    >>> curve = Curve(stretches=2)
    >>> for step, value in enumerate([3.0, 1.0, 2.0, 9.0, 2.0, 2.0]):
    ...     curve.add(step, value)
    >>> curve.points(), len(curve.rows()) <= 4
    ([(0, 3.0), (1, 1.0), (2, 2.0), (3, 9.0), (4, 2.0), (5, 2.0)], True)
    """

    stretches: int = STRETCHES
    size: int = 1
    full: Rows = field(default_factory=lambda: np.zeros((0, 7)))  # stretches of `size` points
    rest: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, 0)))  # later points
    latest: list[tuple[int, float]] = field(default_factory=list)  # single points after `rest`
    count: int = 0  # finite values
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None
    strange: list[int] = field(default_factory=list)  # the first steps with a non-finite value

    def add(self, step: int, value: float) -> None:
        """Add the value of a step. Steps must increase."""
        if not math.isfinite(value):
            if len(self.strange) < _STRANGE:
                self.strange.append(step)
            return
        self.count += 1
        self.last = (step, value)
        self.first = self.first or self.last
        self.latest.append(self.last)
        if len(self.latest) >= _WAITING:
            self._join()

    def extend(
        self, steps: Sequence[int] | NDArray[Any], values: Sequence[float] | NDArray[Any]
    ) -> None:
        """Add the values of many steps, as `add` does one by one."""
        points = np.array([steps, values], np.float64)
        is_finite = np.isfinite(points[1])
        if not is_finite.all():
            self.strange += map(int, points[0, ~is_finite])
            del self.strange[_STRANGE:]
            points = points[:, is_finite]
        if points.shape[1]:
            self.count += points.shape[1]
            self.first = self.first or _point(points[0, 0], points[1, 0])
            self.last = _point(points[0, -1], points[1, -1])
            self._join(points)

    def _join(self, points: NDArray[np.float64] | None = None) -> None:
        """Join all points, the given ones last, and make stretches of as many as are whole."""
        parts = [self.rest]
        if self.latest:
            parts.append(np.array(self.latest, np.float64).T)
            self.latest = []
        if points is not None:
            parts.append(points)
        rest = np.concatenate(parts, axis=1)
        while rest.shape[1]:
            room = 2 * self.stretches - len(self.full)
            if room == 0:
                self.full = _merged(self.full[::2], self.full[1::2])
                self.size *= 2
                continue
            many = min(room, rest.shape[1] // self.size)
            if many == 0:
                break
            whole = rest[:, : many * self.size].reshape(2, many, self.size)
            self.full = np.concatenate([self.full, _rows_of(whole)])
            rest = rest[:, many * self.size :]
        self.rest = rest.copy()  # a view would keep all points

    def rows(self) -> Rows:
        """Return all stretches, of which the last may have fewer points."""
        self._join()
        if not self.rest.shape[1]:
            return self.full
        return np.concatenate([self.full, _rows_of(self.rest[:, None, :])])

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON values."""
        self._join()
        names = ("stretches", "size", "count", "first", "last", "strange")
        arrays = {"full": self.full.tolist(), "rest": self.rest.tolist()}
        return {name: getattr(self, name) for name in names} | arrays

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Curve":
        """Restore a curve from the values of `to_json`.

        >>> curve = Curve()
        >>> curve.add(3, 0.5)
        >>> Curve.from_json(curve.to_json()).points()
        [(3, 0.5)]
        """
        arrays = {
            "full": np.array(values["full"], np.float64).reshape(-1, 7),
            "rest": np.array(values["rest"], np.float64).reshape(2, -1),
        }
        ends = {name: values[name] and _point(*values[name]) for name in ("first", "last")}
        return cls(**values | ends | arrays)

    def points(self, stretches: int | None = None) -> list[tuple[int, float]]:
        """Return the extrema of each stretch, and the curve's end points. `stretches` limits the
        number of stretches.
        """
        points = []
        for row in _merge_down(self.rows(), stretches).tolist():
            lowest = _point(row[_LOW_AT], row[_LOW])
            highest = _point(row[_HIGH_AT], row[_HIGH])
            points += sorted({lowest, highest})
        points += [end for end in (self.first, self.last) if end is not None]
        return sorted(dict(points).items())  # the later of two values at one step wins

    def means(self) -> list[tuple[float, float, int]]:
        """Return the mean step, mean value and number of values of each stretch."""
        return [
            (row[_STEPS] / row[_COUNT], row[_TOTAL] / row[_COUNT], int(row[_COUNT]))
            for row in self.rows().tolist()
        ]

    def best(self, direction: str) -> tuple[int, float] | None:
        """Return (step, value) of the first maximum ("max") or minimum of the curve. Returns None
        without values.
        """
        rows = self.rows()
        if not len(rows):
            return None
        if direction == "max":
            row = rows[rows[:, _HIGH].argmax()]
            return _point(row[_HIGH_AT], row[_HIGH])
        row = rows[rows[:, _LOW].argmin()]
        return _point(row[_LOW_AT], row[_LOW])


def smooth(curve: Curve, *, width: float = 0.012) -> list[tuple[float, float]]:
    """Average a curve's stretches with Gaussian weights. `width` is the standard deviation relative
    to the curve's length.

    >>> flat = Curve()
    >>> for step in range(100):
    ...     flat.add(step, 2.0)
    >>> {round(value, 9) for _, value in smooth(flat)}
    {2.0}
    """
    means = curve.means()
    deviation = width * len(means)
    reach = math.ceil(3 * deviation)
    if reach < 2:
        return [(step, value) for step, value, _ in means]
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    steps, values, counts = np.array(means).T
    averages = np.convolve(values * counts, weights, mode="same") / np.convolve(
        counts, weights, mode="same"
    )
    return list(zip(steps.tolist(), averages.tolist(), strict=True))


def _point(step: float, value: float) -> tuple[int, float]:
    return int(step), float(value)


def _rows_of(points: NDArray[np.float64]) -> Rows:
    """Return the rows of stretches: `points` are the steps and the values of each stretch."""
    steps, values = points
    every = np.arange(len(values))
    low = values.argmin(axis=1)
    high = values.argmax(axis=1)
    columns = [
        steps[every, low],
        values[every, low],
        steps[every, high],
        values[every, high],
        steps.sum(axis=1),
        values.sum(axis=1),
        np.full(len(values), values.shape[1]),
    ]
    return np.stack(columns, axis=1)


def _merged(first: Rows, second: Rows) -> Rows:
    """Return each row of `first` joined with that of `second`, which follows it."""
    merged = first + second  # the sums; the extrema are set below
    lower = np.where(second[:, _LOW] < first[:, _LOW], second.T, first.T)
    higher = np.where(second[:, _HIGH] > first[:, _HIGH], second.T, first.T)
    merged[:, [_LOW_AT, _LOW]] = lower[[_LOW_AT, _LOW]].T
    merged[:, [_HIGH_AT, _HIGH]] = higher[[_HIGH_AT, _HIGH]].T
    return merged


def _merge_down(rows: Rows, stretches: int | None) -> Rows:
    while stretches is not None and len(rows) > max(1, stretches):
        pairs = len(rows) // 2
        merged = _merged(rows[: 2 * pairs : 2], rows[1 : 2 * pairs : 2])
        rows = np.concatenate([merged, rows[2 * pairs :]])
    return rows
