"""The curves of all variants in one picture, as PNG and SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.compare.results import Comparison
from surefoot.compare.trained import Compared, Row
from surefoot.compare.variants import short_names
from surefoot.report.figures import COLOURS, DASHES, drawing, write
from surefoot.tracking.format import as_typed, in_line, shortened

Point = tuple[int, float]  # step, value
_POINTS = 200  # of a curve; more are averaged, so that noise does not hide what is compared
_SHOWN = 12  # names in the legend
_HEAD = 0.05  # of a run: its steep beginning need not fit
_FAR = 3.0  # times the range of the narrower variants: what lies further out would flatten them
_LINE = 0.17  # inches of the legend
_LONGEST, _COLUMN = 90, 48  # letters of a name in the legend, and as many as leave room for two beside each other


def draw(comparison: Comparison, path: Path) -> list[Path]:
    """Draw training losses as lines and the watched score as points, one colour a variant, best first; returns the files.

    `path` is without suffix. A score that is no loss has a field of its own below. Repeats have the colour of their variant.
    What is so far away that it would flatten the others is not shown, and the legend says so. The same comparison gives the
    same bytes.
    """
    apart = comparison.score is not None and not comparison.score.endswith("loss")
    groups = {row.name: [run for run in comparison.runs if run.variant.group == row.name] for row in comparison.rows}
    beyond: dict[str, str] = {}
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.0, 7.0 if apart else 4.5), layout="constrained")
        axes: list[Any] = list(figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False)[:, 0])
        shown: list[Any] = []
        for place, runs in enumerate(groups.values()):
            style = {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}
            for run in runs:
                axes[0].plot(*_across(_smoothed(run)), linewidth=0.9, alpha=0.5, **style)
                (line,) = axes[-1].plot(
                    *_across(_finite(run.trained.scores)), marker="o", markersize=3.5, linewidth=1.2, **style
                )
            shown.append(line)
        for each in axes:
            points = {name: _of_axes(runs, each is axes[0], each is axes[-1]) for name, runs in groups.items()}
            beyond |= _bounded(each, points)
            each.grid(visible=True, color="0.9")
            each.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(_what_is_drawn(comparison, apart=apart))
        if apart:
            axes[1].set_ylabel(comparison.score)
        axes[-1].set_xlabel("steps")
        varied = dict.fromkeys(setting for row in comparison.rows for setting in row.varied)
        unlike = [name for name in varied if len({repr(row.varied.get(name)) for row in comparison.rows}) > 1]
        names = [_legend_name(row, unlike or list(varied), off=beyond.get(row.name)) for row in comparison.rows]
        more = f"{len(names) - _SHOWN} more, behind" if len(names) > _SHOWN else None
        columns = 1 if max(map(len, names[:_SHOWN]), default=0) > _COLUMN else 2
        lines = -(-min(len(names), _SHOWN) // columns) + (more is not None)
        figure.set_size_inches(8.0, figure.get_figheight() + _LINE * lines)
        figure.legend(
            shown[:_SHOWN],
            names[:_SHOWN],
            title=more,
            frameon=False,
            fontsize=8,
            loc="outside lower left",
            alignment="left",
            ncols=columns,
        )
        return write(figure, path)


def _legend_name(row: Row, settings: Sequence[str], *, off: str | None) -> str:
    """A variant in the legend: with its settings, where its name does not tell them, and how it ended, if not as it should."""
    name = in_line(row.label)
    if row.varied and "=" not in row.name:
        short = short_names(settings)
        own = [setting for setting in settings if setting in row.varied]
        name += ": " + ", ".join(f"{short[each]}={in_line(as_typed(row.varied[each], digits=3))}" for each in own)
    told = [row.status] * (row.status != "finished") + ([] if off is None else [off])
    return shortened(name, _LONGEST, keep="both") + (f" ({', '.join(told)})" if told else "")


def _what_is_drawn(comparison: Comparison, *, apart: bool) -> str:
    """In the first field, and nothing that is not."""
    line = "training loss" if any(run.trained.loss for run in comparison.runs) else ""
    if apart or not line or comparison.score is None:
        return line if apart else line or comparison.score or ""
    return f"{line} (lines), {comparison.score} (points)"


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _across(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(run: Compared) -> list[Point]:
    points = _finite(run.trained.loss)
    size = -(-len(points) // _POINTS) or 1
    pieces = [points[place : place + size] for place in range(0, len(points), size)]
    return [(piece[-1][0], math.fsum(loss for _, loss in piece) / len(piece)) for piece in pieces]


def _of_axes(runs: Sequence[Compared], losses: bool, scores: bool) -> list[float]:
    """What is to be seen of a variant: all its scores, and its losses but for their steep beginning."""
    found: list[float] = []
    for run in runs:
        last = run.trained.loss[-1][0] if run.trained.loss else 0
        found += [loss for step, loss in _smoothed(run) if step >= _HEAD * last] if losses else []
        found += [score for _, score in _finite(run.trained.scores)] if scores else []
    return found


def _bounded(axes: Any, points: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Bounds that hold every point of the variants, but for those far above or below a third of them; tells of which that is so."""
    known = {name: values for name, values in points.items() if values}
    if not known:
        return {}
    third = (len(known) - 1) // 3  # most may have diverged
    high = sorted(max(values) for values in known.values())[third]
    low = min(high, sorted((min(values) for values in known.values()), reverse=True)[third])
    wide = sorted(max(values) - min(values) for values in known.values())[third]
    room = _FAR * max(high - low, wide, abs(high))
    seen = {name: [value for value in values if low - room <= value <= high + room] for name, values in known.items()}
    bottom, top = min(map(min, filter(None, seen.values()))), max(map(max, filter(None, seen.values())))
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.05
    axes.set_ylim(bottom - margin, top + margin)
    return {
        name: "off the scale in part" if seen[name] else "off the scale"
        for name, values in known.items()
        if len(seen[name]) < len(values)
    }
