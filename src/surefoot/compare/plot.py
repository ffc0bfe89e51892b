"""The curves of all variants in one picture, as PNG and SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.compare.results import Comparison
from surefoot.compare.trained import Compared, Row
from surefoot.compare.variants import short_names
from surefoot.report import figures
from surefoot.report.charts import Chart, Line
from surefoot.tracking.format import as_typed, in_line, shortened

Point = tuple[int, float]  # step, value
_POINTS = 200  # of a curve; more are averaged, so that noise does not hide what is compared
_SHOWN = 12  # names in the legend
_HEAD = 0.05  # of a run: its steep beginning need not fit
_FAR = 3.0  # times the range of the narrower variants: what lies further out would flatten them
_LONGEST = 90  # letters of a name in the legend


def draw(comparison: Comparison, path: Path) -> list[Path]:
    """Draw training losses as lines and the watched score as points, one colour a variant, best first; returns the files.

    `path` is without suffix. A score that is no loss has a field of its own below. Repeats have the colour of their variant.
    What is so far away that it would flatten the others is not shown, and the legend says so. The same comparison gives the
    same bytes.
    """
    return figures.draw(charts(comparison), path, title="")


def charts(comparison: Comparison) -> list[Chart]:
    """The field of losses and scores, or one of each."""
    groups = {row.name: [run for run in comparison.runs if run.variant.group == row.name] for row in comparison.rows}
    loss = "training loss" if any(run.trained.loss for run in comparison.runs) else ""
    score = comparison.score or ""
    if score and not score.endswith("loss"):
        fields = [(loss, True, False), (score, False, True)]
    else:
        fields = [(f"{loss} (lines), {score} (points)" if loss and score else loss or score, True, True)]
    bounds = [_bounds({name: _seen(runs, *field[1:]) for name, runs in groups.items()}) for field in fields]
    beyond = {name: told for _, off in bounds for name, told in off.items()}
    varied = dict.fromkeys(setting for row in comparison.rows for setting in row.varied)
    unlike = [name for name in varied if len({repr(row.varied.get(name)) for row in comparison.rows}) > 1]
    names = [_legend_name(row, unlike or list(varied), off=beyond.get(row.name)) for row in comparison.rows]
    found = []
    for (title, losses, scores), (within, _) in zip(fields, bounds, strict=True):
        lines = []
        for place, (name, runs) in enumerate(zip(names, groups.values(), strict=True)):
            style: Any = {"colour": place, "dashes": place // 7}
            for run in runs:
                if losses:
                    lines.append(Line(name, tuple(_smoothed(run)), **style, faint=True, named=False))
                if scores:
                    style["named"] = place < _SHOWN and run is runs[-1]
                    lines.append(Line(name, tuple(_finite(run.trained.scores)), **style, dots=True))
        more = f"{len(names) - _SHOWN} more, without a name" if scores and len(names) > _SHOWN else ""
        found.append(Chart(title, title, tuple(lines), note=more, wide=True, within=within))
    return found


def _legend_name(row: Row, settings: Sequence[str], *, off: str | None) -> str:
    """A variant in the legend: with its settings, where its name does not tell them, and how it ended, if not as it should."""
    name = in_line(row.label)
    if row.varied and "=" not in row.name:
        short = short_names(settings)
        own = [setting for setting in settings if setting in row.varied]
        name += ": " + ", ".join(f"{short[each]}={in_line(as_typed(row.varied[each], digits=3))}" for each in own)
    told = [row.status] * (row.status != "finished") + ([] if off is None else [off])
    return shortened(name, _LONGEST, keep="both") + (f" ({', '.join(told)})" if told else "")


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _smoothed(run: Compared) -> list[Point]:
    points = _finite(run.trained.loss)
    size = -(-len(points) // _POINTS) or 1
    pieces = [points[place : place + size] for place in range(0, len(points), size)]
    return [(piece[-1][0], math.fsum(loss for _, loss in piece) / len(piece)) for piece in pieces]


def _seen(runs: Sequence[Compared], losses: bool, scores: bool) -> list[float]:
    """What is to be seen of a variant: all its scores, and its losses but for their steep beginning."""
    found: list[float] = []
    for run in runs:
        last = run.trained.loss[-1][0] if run.trained.loss else 0
        found += [loss for step, loss in _smoothed(run) if step >= _HEAD * last] if losses else []
        found += [score for _, score in _finite(run.trained.scores)] if scores else []
    return found


def _bounds(points: Mapping[str, Sequence[float]]) -> tuple[tuple[float, float] | None, dict[str, str]]:
    """Bounds that hold every point of the variants, but for those far above or below a third of them; and of which that is so."""
    known = {name: values for name, values in points.items() if values}
    if not known:
        return None, {}
    third = (len(known) - 1) // 3  # most may have diverged
    high = sorted(max(values) for values in known.values())[third]
    low = min(high, sorted((min(values) for values in known.values()), reverse=True)[third])
    wide = sorted(max(values) - min(values) for values in known.values())[third]
    room = _FAR * max(high - low, wide, abs(high))
    seen = {name: [value for value in values if low - room <= value <= high + room] for name, values in known.items()}
    bottom, top = min(map(min, filter(None, seen.values()))), max(map(max, filter(None, seen.values())))
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.05
    return (bottom - margin, top + margin), {
        name: "off the scale in part" if seen[name] else "off the scale"
        for name, values in known.items()
        if len(seen[name]) < len(values)
    }
