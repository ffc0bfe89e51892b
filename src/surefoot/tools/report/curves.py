"""A curve of a run: its points to draw, its extrema and its smoothed form."""

import math
from dataclasses import dataclass, field

import numpy as np

from surefoot.tracking import table
from surefoot.tracking.table import Stretches, Table, merged_until

STRETCHES = 600  # at most, each drawn as two points


@dataclass(frozen=True, eq=False)
class Curve:
    """The finite values of one name by step. Adjacent values of a long curve are stretches."""

    stretches: Stretches = field(default_factory=lambda: np.zeros((12, 0)))
    strange: tuple[int, ...] = ()  # the first steps with a value that is not finite

    @property
    def count(self) -> int:
        """The number of finite values."""
        return int(self.stretches[table.COUNT].sum())

    @property
    def first(self) -> tuple[int, float] | None:
        """The step and the value of the first finite value."""
        return self._point(table.FIRST_AT, 0) if self.count else None

    @property
    def last(self) -> tuple[int, float] | None:
        """The step and the value of the last finite value."""
        return self._point(table.LAST_AT, -1) if self.count else None

    def points(self, stretches: int | None = None) -> list[tuple[int, float]]:
        """Return the extrema of each stretch, and the curve's end points. `stretches` limits the
        number of stretches.
        """
        rows = self.stretches
        if stretches is not None:
            rows = merged_until(rows, stretches)
        points: dict[int, float] = {}  # by step: the later of two values at one step wins
        for low_at, low, high_at, high in rows[table.LOW_AT : table.HIGH + 1].T.tolist():
            points.update(sorted([(int(low_at), low), (int(high_at), high)]))
        for end in (self.first, self.last):
            if end is not None:
                step, value = end
                points[step] = value
        return sorted(points.items())

    def means(self) -> list[tuple[float, float, int]]:
        """Return the mean step, mean value and number of values of each stretch."""
        steps, totals, counts = self.stretches[table.STEPS : table.COUNT + 1]
        mean_steps = (steps / counts).tolist()
        mean_values = (totals / counts).tolist()
        return list(zip(mean_steps, mean_values, counts.astype(int).tolist(), strict=True))

    def best(self, direction: str) -> tuple[int, float] | None:
        """Return (step, value) of the first maximum ("max") or minimum of the curve. Returns None
        without values.
        """
        if not self.count:
            return None
        if direction == "max":
            return self._point(table.HIGH_AT, int(self.stretches[table.HIGH].argmax()))
        return self._point(table.LOW_AT, int(self.stretches[table.LOW].argmin()))

    def _point(self, at: int, stretch: int) -> tuple[int, float]:
        step, value = self.stretches[at : at + 2, stretch].tolist()  # adjacent statistics
        return int(step), value


def curve_of(values: Table, name: str) -> Curve:
    """Return the curve of a name in a table.

    >>> losses = Table(recent=10, stretches=10)
    >>> for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0]):
    ...     losses.append({"step": step, "loss": loss})
    >>> curve = curve_of(losses, "loss")
    >>> curve.points(), curve.best("min"), curve.strange
    ([(0, 3.0), (1, 1.0), (3, 2.0)], (1, 1.0), (2,))
    """
    return Curve(values.curve(name, most=STRETCHES), tuple(values.strange_steps(name)))


def smooth(curve: Curve, *, width: float = 0.012) -> list[tuple[float, float]]:
    """Average a curve's stretches with Gaussian weights. `width` is the standard deviation relative
    to the curve's length.

    >>> flat = Table(recent=100, stretches=10)
    >>> for step in range(100):
    ...     flat.append({"step": step, "loss": 2.0})
    >>> {round(value, 9) for _, value in smooth(curve_of(flat, "loss"))}
    {2.0}
    """
    means = curve.means()
    deviation = width * len(means)
    reach = math.ceil(3 * deviation)
    if reach < 2:
        return [(step, value) for step, value, _ in means]
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    steps, values, counts = np.array(means).T
    totals = np.convolve(values * counts, weights, mode="same")
    averages = totals / np.convolve(counts, weights, mode="same")
    return list(zip(steps.tolist(), averages.tolist(), strict=True))
