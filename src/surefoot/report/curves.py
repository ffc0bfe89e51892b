"""A curve of any length in bounded memory, with its points to draw, its extrema and its smoothed
form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCHES = 300  # a long curve has 300 to 600 stretches, each drawn as two points
_STRANGE = 50  # steps with a non-finite value that are stored
_LONG = 64  # points of a stretch from which on NumPy merges them faster than a loop


@dataclass(slots=True)
class Stretch:
    """Adjacent points merged into one: their minimum, maximum and mean."""

    low_at: int
    low: float
    high_at: int
    high: float
    steps: float  # sum of the steps; `total` is the sum of the values
    total: float
    count: int


def _merge(a: Stretch, b: Stretch) -> Stretch:
    low = (b.low_at, b.low) if b.low < a.low else (a.low_at, a.low)
    high = (b.high_at, b.high) if b.high > a.high else (a.high_at, a.high)
    return Stretch(*low, *high, a.steps + b.steps, a.total + b.total, a.count + b.count)


def total_of(values: Sequence[float] | NDArray[Any], before: float) -> float:
    """Add values in order, as a loop does: `numpy.sum` and Python's `sum` round in another
    order.
    """
    return float(
        np.add.accumulate(np.concatenate([[before], np.asarray(values, dtype=np.float64)]))[-1]
    )


@dataclass(eq=False)
class Curve:
    """Values by step, added in order. Beyond 2 * `stretches` points, neighbors are merged in pairs.

    >>> curve = Curve(stretches=2)
    >>> for step, value in enumerate([3.0, 1.0, 2.0, 9.0, 2.0, 2.0]):
    ...     curve.add(step, value)
    >>> curve.points(), len(curve.buckets) <= 4
    ([(0, 3.0), (1, 1.0), (2, 2.0), (3, 9.0), (4, 2.0), (5, 2.0)], True)
    """

    stretches: int = STRETCHES
    buckets: list[Stretch] = field(default_factory=list)
    size: int = 1  # points of each stretch but the last
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
        buckets = self.buckets
        if (
            buckets and (stretch := buckets[-1]).count < self.size
        ):  # in place: a log may have millions of records
            if value < stretch.low:
                stretch.low_at, stretch.low = step, value
            if value > stretch.high:
                stretch.high_at, stretch.high = step, value
            stretch.steps += step
            stretch.total += value
            stretch.count += 1
            return
        if len(buckets) == 2 * self.stretches:
            self._halve()
        self.buckets.append(Stretch(step, value, step, value, float(step), value, 1))

    def extend(
        self, steps: Sequence[int] | NDArray[Any], values: Sequence[float] | NDArray[Any]
    ) -> None:
        """Add many values, as `add` does one by one."""
        numbers, places, position = (
            np.asarray(values, dtype=np.float64),
            np.asarray(steps, dtype=np.int64),
            0,
        )
        is_finite = bool(np.isfinite(numbers).all())
        while position < len(values):
            free = self.size - self.buckets[-1].count if self.buckets else 0
            if not free and len(self.buckets) == 2 * self.stretches:
                self._halve()
                continue
            many = (
                0
                if free
                else min(
                    (len(values) - position) // self.size, 2 * self.stretches - len(self.buckets)
                )
            )
            part = slice(
                position, min(position + (many * self.size or free or self.size), len(values))
            )
            if is_finite and many:
                self._add_stretches(places[part].reshape(many, -1), numbers[part].reshape(many, -1))
            elif is_finite and part.stop - position >= _LONG:
                self._add_part(places[part], numbers[part])
            else:
                for step, value in zip(places[part].tolist(), numbers[part].tolist(), strict=True):
                    self.add(step, value)
            position = part.stop

    def _add_stretches(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        zero = 0.0 if self.size >= _LONG else -0.0  # as `_add_part` and `add` begin a sum
        sums = [
            np.add.accumulate(each, axis=1, dtype=np.float64)[:, -1] + zero
            for each in (steps, values)
        ]
        extrema = [index[:, None] for index in (values.argmin(axis=1), values.argmax(axis=1))]
        ends = [
            np.take_along_axis(each, index, axis=1)[:, 0]
            for index in extrema
            for each in (steps, values)
        ]
        rows = zip(
            *(each.tolist() for each in (*ends, *sums)), [self.size] * len(values), strict=True
        )
        self.buckets += [Stretch(*row) for row in rows]
        self.count += values.size
        self.first = self.first or (int(steps[0, 0]), float(values[0, 0]))
        self.last = (int(steps[-1, -1]), float(values[-1, -1]))

    def _add_part(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        low, high = int(values.argmin()), int(values.argmax())
        before = self.buckets.pop() if self.buckets and self.buckets[-1].count < self.size else None
        sums = (
            total_of(steps, before.steps if before else 0.0),
            total_of(values, before.total if before else 0.0),
        )
        extrema = int(steps[low]), float(values[low]), int(steps[high]), float(values[high])
        part = Stretch(*extrema, *sums, len(values))
        if before is not None:
            part = replace(_merge(before, part), steps=sums[0], total=sums[1])
        self.buckets.append(part)
        self.count += len(values)
        self.first = self.first or (int(steps[0]), float(values[0]))
        self.last = (int(steps[-1]), float(values[-1]))

    def _halve(self) -> None:
        self.buckets = [
            _merge(a, b) for a, b in zip(self.buckets[::2], self.buckets[1::2], strict=True)
        ]
        self.size *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON values."""
        rows = [
            (b.low_at, b.low, b.high_at, b.high, b.steps, b.total, b.count) for b in self.buckets
        ]
        values = {
            name: getattr(self, name)
            for name in ("stretches", "size", "count", "first", "last", "strange")
        }
        return values | {"buckets": rows}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Curve":
        """Restore a curve from the values of `to_json`.

        >>> curve = Curve()
        >>> curve.add(3, 0.5)
        >>> Curve.from_json(curve.to_json()).points()
        [(3, 0.5)]
        """
        ends = {
            name: values[name] and (values[name][0], values[name][1]) for name in ("first", "last")
        }
        return cls(**values | ends | {"buckets": [Stretch(*row) for row in values["buckets"]]})

    def points(self, stretches: int | None = None) -> list[tuple[int, float]]:
        """Return the extrema of each stretch, and the curve's end points. `stretches` limits the
        number of stretches.
        """
        buckets = _merge_down(self.buckets, stretches)
        points = [
            point
            for each in buckets
            for point in sorted({(each.low_at, each.low), (each.high_at, each.high)})
        ]
        points += [end for end in (self.first, self.last) if end is not None]
        return sorted(dict(points).items())  # the later of two values at one step wins

    def means(self) -> list[tuple[float, float, int]]:
        """Return the mean step, mean value and number of values of each stretch."""
        return [
            (bucket.steps / bucket.count, bucket.total / bucket.count, bucket.count)
            for bucket in self.buckets
        ]

    def best(self, direction: str) -> tuple[int, float] | None:
        """Return (step, value) of the first maximum ("max") or minimum of the curve. Returns None
        without values.
        """
        sign = -1 if direction == "max" else 1
        points = [
            (bucket.high_at, bucket.high) if sign < 0 else (bucket.low_at, bucket.low)
            for bucket in self.buckets
        ]
        return min(points, key=lambda point: (sign * point[1], point[0]), default=None)


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


def _merge_down(buckets: list[Stretch], stretches: int | None) -> list[Stretch]:
    while stretches is not None and len(buckets) > max(1, stretches):
        joined = [_merge(a, b) for a, b in zip(buckets[::2], buckets[1::2], strict=False)]
        buckets = joined + buckets[2 * len(joined) :]
    return buckets
