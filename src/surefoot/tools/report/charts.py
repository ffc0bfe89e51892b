"""The content of a chart without its drawing: lines, marks, and the unit of the values."""

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.tracking.format import duration, number

Unit = Literal["number", "bytes", "fraction", "seconds"]

Points = tuple[tuple[float, float], ...]

_LARGEST = 1e300  # larger values count as not finite: the range of an axis must be a number


@dataclass(frozen=True)
class Line:
    """A polyline. `series` selects one of 7 colors and 5 dash patterns. The page toggles lines with
    the same `series` together. Points that are not finite are left out.

    `faint` lines are pale. An `area` is filled down to the lower edge, and holds each value until
    the next point. The legend omits lines that are not `named`.
    """

    name: str
    points: Points
    series: int = 0
    faint: bool = False
    dots: bool = False
    named: bool = True
    area: bool = False

    def __post_init__(self) -> None:
        # a comparison with NaN is false
        finite = [(x, y) for x, y in self.points if abs(x) <= _LARGEST and abs(y) <= _LARGEST]
        object.__setattr__(self, "points", tuple(finite))


@dataclass(frozen=True)
class Mark:
    """A point, or a vertical line if `y` is None. "strange" marks a non-finite value, drawn at the
    upper edge, as any point is whose `y` is not finite.
    """

    kind: Literal["best", "event", "strange"]
    x: float
    y: float | None
    title: str
    series: int = 0

    def __post_init__(self) -> None:
        if self.y is not None and not abs(self.y) <= _LARGEST:
            object.__setattr__(self, "y", None)


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps. The scale "auto" is logarithmic if the largest value would
    flatten all others.
    """

    name: str  # unique name of the chart on a page
    title: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    unit: Unit = "number"
    scale: Literal["auto", "linear", "log"] = "auto"
    x_scale: Literal["linear", "log"] = "linear"
    x_from: float = 0.0  # the first step of the axis
    zero: bool = False  # extend the vertical axis to 0
    note: str = ""
    wide: bool = False
    x_name: str = "step"
    # minimum and maximum of the vertical axis; None: the range of the points
    within: tuple[float, float] | None = None


@dataclass(frozen=True)
class Axis:
    """A map from a range of values to 0..1, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False
    unit: Unit = "number"

    def position(self, value: float) -> float:
        """Return the position of a value from 0 to 1. Values outside the range are clipped to the
        edge.

        >>> Axis(0.0, 8.0).position(2.0), Axis(0.0, 1.0).position(7.0)
        (0.25, 1.0)
        >>> Axis(1.0, 100.0, logarithmic=True).position(10.0)
        0.5
        """
        if not self.logarithmic:
            part = (value - self.low) / (self.high - self.low)
        elif value > 0:
            # a quotient of the values may be too large or too small for a number
            low = math.log(self.low)
            high = math.log(self.high)
            part = (math.log(value) - low) / (high - low)
        else:
            part = 0.0
        return min(1.0, max(0.0, part))

    def visible(self, points: Points) -> list[tuple[float, float]]:
        """Return the points that this horizontal axis can show: a logarithmic one has no 0."""
        return [point for point in points if point[0] > 0 or not self.logarithmic]


_FLATTENED = 30.0  # times the median: larger values would flatten a linear scale


def axes(chart: Chart) -> tuple[Axis, Axis] | None:
    """Return the horizontal and vertical axis that contain all points and marks. Returns None for a
    chart without points.

    >>> horizontal, vertical = axes(Chart("a", "a", (Line("a", ((0, 1.0), (10, 3.0))),)))
    >>> horizontal.high, vertical.low < 1.0, vertical.high > 3.0
    (10, True, True)
    """
    steps = []
    values = []
    for line in chart.lines:
        for x, y in line.points:
            steps.append(x)
            values.append(y)
    for mark in chart.marks:
        steps.append(mark.x)
        if mark.y is not None:
            values.append(mark.y)
    horizontal = _horizontal(chart, steps)
    if horizontal is None or not values:
        return None
    return horizontal, _vertical(chart, sorted(values))


def _horizontal(chart: Chart, steps: list[float]) -> Axis | None:
    logarithmic = chart.x_scale == "log"
    steps = [x for x in steps if abs(x) <= _LARGEST and (x > 0 or not logarithmic)]
    if not steps:
        return None
    right = max(steps)
    if logarithmic:
        left = min(steps)
        beyond = 2 * left
    else:
        left = max(0.0, chart.x_from)
        beyond = left + 1
    return Axis(left, right if right > left else beyond, logarithmic)


def _vertical(chart: Chart, values: list[float]) -> Axis:
    if chart.within is not None:
        return Axis(*chart.within, logarithmic=chart.scale == "log", unit=chart.unit)
    low, high = values[0], values[-1]
    is_flattened = low > 0 and high > _FLATTENED * values[len(values) // 2]
    if high > 0 and (chart.scale == "log" or (chart.scale == "auto" and is_flattened)):
        low = next(value for value in values if value > 0)
        if high / low < 1.2:
            low /= 1.1
            high *= 1.1
        room = min(10.0, (high / low) ** 0.05)
        return Axis(low / room or low, high * room, logarithmic=True, unit=chart.unit)
    if chart.zero:
        low = min(0.0, low)
        high = max(0.0, high)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    bottom = low - room
    if chart.zero and low == 0.0:
        bottom = low
    top = high + room
    if chart.unit == "fraction" and high <= 1.0:
        top = min(1.0, top)
    return Axis(bottom, top, unit=chart.unit)


_POWERS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def ticks(axis: Axis, *, limit: int = 6) -> list[float]:
    """Return about `limit` evenly spaced round values inside an axis.

    >>> ticks(Axis(0.0, 600.0))
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
    >>> ticks(Axis(1e-5, 2e-2, logarithmic=True))
    [1e-05, 0.0001, 0.001, 0.01]
    """
    if axis.logarithmic:
        powers = _powers_of_ten(axis, limit)
        if len(powers) > 1:
            return powers
    if axis.unit == "bytes":
        base = 2.0
        factors = [1.0, 2.0]
    else:
        base = 10.0
        factors = [1.0, 2.0, 2.5, 5.0, 10.0]
    rough = (axis.high - axis.low) / limit
    size = base ** math.floor(math.log(rough, base) + 1e-9)
    step = next(factor * size for factor in factors if factor * size >= rough * (1 - 1e-9))
    multiples = range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)
    digits = max(0, 3 - math.floor(math.log10(step)))
    return [round(multiple * step, digits) + 0.0 for multiple in multiples]


def _powers_of_ten(axis: Axis, limit: int) -> list[float]:
    """Return powers of ten and, if there is room, some of their multiples."""
    first = math.floor(math.log10(axis.low))
    last = math.ceil(math.log10(axis.high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = []
        for power in range(first, last + 1):
            for factor in factors:
                value = float(f"{factor}e{power}")
                if axis.low * (1 - 1e-9) <= value <= axis.high * (1 + 1e-9):
                    values.append(value)
        if len(values) <= limit:
            return values
    return values[:: math.ceil(len(values) / limit)]


def format_value(value: float, unit: Unit = "number") -> str:
    """Format a value with its unit.

    >>> format_value(0.25, "fraction"), format_value(3 * 2**30, "bytes")
    ('25%', '3 GiB')
    >>> format_value(75.0, "seconds"), format_value(0.00012)
    ('1m15s', '0.00012')
    """
    if not math.isfinite(value):
        return repr(value)
    match unit:
        case "fraction":
            return f"{100 * value:.3g}%"
        case "bytes":
            for size, name in _POWERS:
                if abs(value) >= size:
                    return f"{value / size:.4g} {name}"
            return f"{value:.4g} B"
        case "seconds":
            return duration(value) if value >= 10 else f"{value:.2g}s"
    if value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return number(value)


def format_tick(value: float, unit: Unit = "number") -> str:
    """Format a value as a short axis label.

    >>> [format_tick(value) for value in (0.0, 1500.0, 20000.0, 2500000.0, 0.0001, 0.25)]
    ['0', '1,500', '20k', '2.5M', '1e-4', '0.25']
    """
    if unit != "number":
        return format_value(value, unit)
    size = abs(value)
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 10_000 <= size < 1e12 and size >= power:
            return f"{value / power:.4g}{letter}"
    if size >= 1e12 or 0 < size < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"
