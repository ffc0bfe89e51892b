"""What `plot` in parts.html makes inline SVG of: lines as places in a picture, what they are at a step, a chart in words.

The outer picture has no view box, so places are percentages and letters keep their size on a phone; the lines stand in an
inner one that is stretched to the width that there is, with strokes that are not. Colours are classes of the page's style.
Nothing runs: what a chart shows at a step appears where the pointer is, by style alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from surefoot.report.charts import Axis, Chart, Line, Unit, written

_WIDTH, _HEIGHT = 2000, 1000  # of the stretched picture
_BANDS = 60  # in which the pointer finds values


def summary(chart: Chart) -> str:
    """A chart in words, for who does not see it.

    >>> summary(Chart("loss", "Loss", (Line("training", ((10, 3.0), (20, 2.5))),)))
    'Loss. training: 3 at step 10, 2.5 at step 20, between 2.5 and 3'
    """
    told = []
    for line in chart.lines:
        if line.points and line.named:
            (first_x, first), (last_x, last) = line.points[0], line.points[-1]
            values = [y for _, y in line.points]
            ends = f"{written(first, chart.unit)} at step {first_x:,.0f}, {written(last, chart.unit)} at step {last_x:,.0f}"
            told.append(
                f"{line.name}: {ends}, between {written(min(values), chart.unit)} and {written(max(values), chart.unit)}"
            )
    return f"{chart.title}. {'; '.join(told)}"


def traced(line: Line, horizontal: Axis, vertical: Axis) -> list[tuple[int, int]]:
    """The places of a line's points in the stretched picture; of equal ones in a row the first."""
    points = [point for point in line.points if point[0] > 0 or not horizontal.logarithmic]
    places = [(round(_WIDTH * horizontal.place(x)), round(_HEIGHT * (1 - vertical.place(y)))) for x, y in points]
    return [place for place, _ in groupby(places)]


def bands(chart: Chart, horizontal: Axis) -> list[tuple[float, float, float, list[str]]]:
    """Stripes from top to bottom: left edge, width and centre from 0 to 1, and what the lines are there."""
    lines = [_Placed.of(line, horizontal) for line in chart.lines]
    steps = sorted({x for line in lines for x, _ in line.points})
    if len(steps) > _BANDS:
        steps = [steps[round(n * (len(steps) - 1) / (_BANDS - 1))] for n in range(_BANDS)]
    places = [horizontal.place(step) for step in steps]
    edges = [0.0, *[(one + other) / 2 for one, other in pairwise(places)], 1.0]
    found = []
    for step, place, left, right in zip(steps, places, edges, edges[1:], strict=False):
        told = [f"{line.name} {value}" for line in lines if (value := line.told(step, left, right, chart.unit))]
        if told and right - left >= 0.0001:
            found.append((left, right - left, place, [f"step {written(step)}", *told]))
    return found


@dataclass(frozen=True)
class _Placed:
    """A line with where its points stand, from 0 to 1."""

    name: str
    faint: bool
    points: Sequence[tuple[float, float]]
    places: Sequence[float]

    @classmethod
    def of(cls, line: Line, horizontal: Axis) -> _Placed:
        points = [point for point in line.points if point[0] > 0 or not horizontal.logarithmic]
        return cls(line.name, line.faint, points, [horizontal.place(x) for x, _ in points])

    def told(self, centre: float, left: float, right: float, unit: Unit) -> str:
        """What the line is in a stripe: its value, of a faint one its least and largest; nothing where it has none there."""
        near = self.points[bisect_left(self.places, left) : bisect_right(self.places, right)]
        if not near:
            return ""
        if self.faint:
            low, high = min(y for _, y in near), max(y for _, y in near)
            if low != high:
                return f"{written(low, unit)} \u2013 {written(high, unit)}"
        return written(min(near, key=lambda point: abs(point[0] - centre))[1], unit)
