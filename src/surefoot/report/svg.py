"""Charts as inline SVG: lines are stretched to the width that there is, text and marks are not.

The outer picture has no view box, so places are percentages and letters keep their size on a phone; the lines stand in an
inner one that is stretched, with strokes that are not. Colours are classes of the page's style. Nothing runs: what a chart
shows at a step appears where the pointer is, by style alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from surefoot.report.charts import Axis, Chart, Line, Mark, Unit, axes, on_axis, ticks, written

_WIDTH, _HEIGHT = 2000, 1000  # of the stretched picture
_BANDS = 60  # in which the pointer finds values
_IN_LINE = 3  # lines whose values stand in one line above the chart; of more, in a box beside the pointer
_RIGHT = 0.8  # from here on, what is written at a mark stands left of it


def svg(chart: Chart) -> str:
    """A chart as one <svg> element; empty where there is nothing to draw."""
    found = axes(chart)
    if found is None:
        return ""
    horizontal, vertical = found
    parts = [
        f'<svg class="plot" role="img" aria-label="{escape(summary(chart))}">',
        *_grid(horizontal, vertical),
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" width="100%" height="100%" class="lines">',
        *[_line(line, horizontal, vertical) for line in chart.lines if line.points],
        "</svg>",
        *[_event(mark, horizontal) for mark in chart.marks if mark.kind == "event"],
        *_bands(chart, horizontal),
        *[
            _mark(mark, horizontal, vertical, worded=chart.x_scale == "linear")
            for mark in chart.marks
            if mark.kind != "event"
        ],
        "</svg>",
    ]
    return "".join(parts)


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


def _grid(horizontal: Axis, vertical: Axis) -> list[str]:
    parts = []
    for value in ticks(vertical, most=5):
        y = f"{100 * (1 - vertical.place(value)):.2f}%"
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="-8" y="{y}">{escape(on_axis(value, vertical.unit))}</text>')
    for value in ticks(horizontal, most=5):
        x = f"{100 * horizontal.place(value):.2f}%"
        parts.append(f'<line class="notch" x1="{x}" x2="{x}" y1="100%" y2="102%"/>')
        parts.append(f'<text class="tick x" x="{x}" y="100%">{escape(on_axis(value))}</text>')
    return parts


def _line(line: Line, horizontal: Axis, vertical: Axis) -> str:
    places: list[tuple[int, int]] = []
    for x, y in line.points:
        if horizontal.logarithmic and x <= 0:
            continue
        place = (round(_WIDTH * horizontal.place(x)), round(_HEIGHT * (1 - vertical.place(y))))
        if not places or place != places[-1]:
            places.append(place)
    if not places:
        return ""
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    kind = f"k{line.colour % 7} d{line.dashes % 5}" + (" faint" if line.faint else "")
    drawn = f'<path class="{kind}" d="{path}"/>' if len(places) > 1 else ""
    if line.dots or len(places) == 1:
        drawn += f'<path class="{kind} dots" d="{"".join(f"M{x} {y}h0" for x, y in places)}"/>'
    return drawn


def _event(mark: Mark, horizontal: Axis) -> str:
    x = f"{100 * horizontal.place(mark.x):.2f}%"
    ends = f'x1="{x}" x2="{x}" y1="0" y2="100%"'
    return f'<g class="event"><line {ends}/><line class="near" {ends}/><title>{escape(mark.title)}</title></g>'


def _mark(mark: Mark, horizontal: Axis, vertical: Axis, *, worded: bool) -> str:
    place = horizontal.place(mark.x)
    title, x = f"<title>{escape(mark.title)}</title>", f"{100 * place:.2f}%"
    if mark.kind == "strange" or mark.y is None:
        return f'<text class="strange" x="{x}" y="0">\u00d7{title}</text>'
    up = 1 - vertical.place(mark.y)
    y = f"{100 * up:.2f}%"
    side = "end" if place > _RIGHT else "start" if place < 1 - _RIGHT else "middle"
    below = up < 0.2  # no room above
    words = f'<text x="{x}" y="{y}" dy="{20 if below else -12}" text-anchor="{side}">{escape(mark.title)}</text>'
    circle = f'<circle cx="{x}" cy="{y}" r="5.5"/>{title}'
    return f'<g class="best k{mark.colour % 7}">{circle}{words if worded else ""}</g>'


def _bands(chart: Chart, horizontal: Axis) -> list[str]:
    """Stripes from top to bottom, each with what the lines are there."""
    lines = [_Placed.of(line, horizontal) for line in chart.lines]
    steps = sorted({x for line in lines for x, _ in line.points})
    centres = (
        steps if len(steps) <= _BANDS else [steps[round(n * (len(steps) - 1) / (_BANDS - 1))] for n in range(_BANDS)]
    )
    places = [100 * horizontal.place(step) for step in centres]
    edges = [0.0, *[(one + other) / 2 for one, other in pairwise(places)], 100.0]
    found = []
    for centre, place, left, right in zip(centres, places, edges, edges[1:], strict=False):
        if right - left < 0.01:
            continue
        told = [f"{line.name} {value}" for line in lines if (value := line.told(centre, left, right, chart.unit))]
        if not told:
            continue
        head = f"step {written(centre)}"
        stripe = f'<rect x="{left:.2f}%" width="{right - left:.2f}%" height="100%"/>'
        where = f'<line x1="{place:.2f}%" x2="{place:.2f}%" y1="0" y2="100%"/>'
        if len(chart.lines) <= _IN_LINE:
            words = f'<text class="tip" x="100%" y="-9">{escape("   ".join([head, *told]))}</text>'
        else:
            words = f"<title>{escape(chr(10).join([head, *told]))}</title>"
        found.append(f'<g class="band">{stripe}{where}{words}</g>')
    return found


@dataclass(frozen=True)
class _Placed:
    """A line with where its points stand, in percent of the width."""

    name: str
    faint: bool
    points: Sequence[tuple[float, float]]
    places: Sequence[float]

    @classmethod
    def of(cls, line: Line, horizontal: Axis) -> _Placed:
        points = [point for point in line.points if point[0] > 0 or not horizontal.logarithmic]
        return cls(line.name, line.faint, points, [100 * horizontal.place(x) for x, _ in points])

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
