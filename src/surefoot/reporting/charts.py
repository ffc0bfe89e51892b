"""What a chart shows, apart from how it is drawn: lines, marks, and what its numbers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "bytes", "fraction", "seconds"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Line:
    """Points joined by a line.

    colour: a place in the palette; lines of one colour belong together. `faint` is behind others, `dots` marks every point.
    `named` ones stand in the legend.
    """

    name: str
    points: Points
    colour: int = 0
    dashes: int = 0
    faint: bool = False
    dots: bool = False
    named: bool = True


@dataclass(frozen=True)
class Mark:
    """Something to be seen at one step: a point, or where `y` is None a line from top to bottom.

    "strange": a value that is not finite, at the upper edge.
    """

    kind: Literal["best", "event", "strange"]
    x: float
    y: float | None
    title: str
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over steps. `scale` "auto" is logarithmic where the largest value would flatten all others; `zero` shows 0 too."""

    name: str  # of the chart, unlike all others of a page
    title: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    unit: Unit = "number"
    scale: Literal["auto", "linear", "log"] = "auto"
    x_scale: Literal["linear", "log"] = "linear"
    x_from: float = 0.0  # runs begin at 0
    zero: bool = False
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Axis:
    """A range of values that becomes one from 0 to 1, evenly or by their logarithms."""

    low: float
    high: float
    logarithmic: bool = False
    unit: Unit = "number"

    def place(self, value: float) -> float:
        """Where a value stands, from 0 to 1; what lies outside is brought to the edge.

        >>> Axis(0.0, 8.0).place(2.0), Axis(1.0, 100.0, logarithmic=True).place(10.0), Axis(0.0, 1.0).place(7.0)
        (0.25, 0.5, 1.0)
        """
        if self.logarithmic:
            from math import log

            if value <= 0:
                return 0.0
            found = log(value / self.low) / log(self.high / self.low)
        else:
            found = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, found))


_FLATTENED = 30.0  # times the median: what is so large takes an even scale's room from all others


def axes(chart: Chart) -> tuple[Axis, Axis] | None:
    """The axes that hold every point and mark of a chart; None where there is no point.

    >>> horizontal, vertical = axes(Chart("a", "a", (Line("a", ((0, 1.0), (10, 3.0))),)))
    >>> horizontal.high, vertical.low < 1.0, vertical.high > 3.0
    (10, True, True)
    """
    points = [point for line in chart.lines for point in line.points]
    points += [(mark.x, mark.y) for mark in chart.marks if mark.y is not None]
    if not points:
        return None
    places = [x for x, _ in points] + [mark.x for mark in chart.marks]
    steps = [x for x in places if chart.x_scale == "linear" or x > 0]
    values = sorted(y for _, y in points)
    if not steps:
        return None
    left, right = min(steps), max(steps)
    if chart.x_scale == "log":
        horizontal = Axis(left, right if right > left else 2 * left, logarithmic=True)
    else:
        left = max(0.0, chart.x_from)
        horizontal = Axis(left, right if right > left else left + 1)
    return horizontal, _vertical(chart, values)


def _vertical(chart: Chart, values: list[float]) -> Axis:
    low, high = values[0], values[-1]
    positive = low > 0
    wanted = chart.scale == "log" or (
        chart.scale == "auto" and positive and high > _FLATTENED * values[len(values) // 2]
    )
    if wanted and high > 0:
        low = low if positive else next(value for value in values if value > 0)
        if high / low < 1.2:
            low, high = low / 1.1, high * 1.1
        room = (high / low) ** 0.05
        return Axis(low / room, high * room, logarithmic=True, unit=chart.unit)
    if chart.zero:
        low, high = min(0.0, low), max(0.0, high)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    bottom = low if low == 0.0 and chart.zero else low - room
    top = min(1.0, high + room) if chart.unit == "fraction" and high <= 1.0 else high + room
    return Axis(bottom, top, unit=chart.unit)
