"""The curves of all variants in one picture, as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.tune.comparison import Compared, Comparison

# Okabe and Ito 2008, distinguishable for all kinds of colour vision: https://jfly.uni-koeln.de/color/ (yellow left out: too faint)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_POINTS = 200  # of a curve; more are averaged, so that noise does not hide what is compared
_SHOWN = 12  # names in the legend
_HEAD = 0.05  # of a run: its steep beginning need not fit


def draw(comparison: Comparison, path: Path) -> list[Path]:
    """Draw training losses as lines and the watched score as points, one colour a variant, best first; returns the files.

    `path` is without suffix. A score that is no loss has a field of its own below. Repeats have the colour of their variant.
    The same comparison gives the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    apart = comparison.score is not None and not comparison.score.endswith("loss")
    with mpl.rc_context({"svg.hashsalt": "surefoot", "font.size": 9}):
        figure = Figure(figsize=(8.0, 7.0 if apart else 4.5), layout="constrained")
        axes: list[Any] = list(figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False)[:, 0])
        for place, row in enumerate(comparison.rows):
            style = {"color": COLOURS[place % len(COLOURS)], "linestyle": _DASHES[place // len(COLOURS) % len(_DASHES)]}
            for repeat, run in enumerate(run for run in comparison.runs if run.variant.group == row.name):
                name = row.label if repeat == 0 and place < _SHOWN else "_"
                _curve(axes[0], run, style)
                _scores(axes[-1], run, style, name)
        axes[0].set_ylabel("training loss" if apart else f"training loss (lines), {comparison.score} (points)")
        if apart:
            axes[1].set_ylabel(comparison.score)
        _leave_room(axes[0], comparison.runs)
        axes[-1].set_xlabel("steps")
        for each in axes:
            each.grid(visible=True, color="0.9")
            each.spines[["top", "right"]].set_visible(False)
        more = f"{len(comparison.rows) - _SHOWN} more, behind" if len(comparison.rows) > _SHOWN else None
        axes[-1].legend(title=more, frameon=False, fontsize=8)
        files = [path.with_suffix(".png"), path.with_suffix(".svg")]
        figure.savefig(files[0], dpi=120, metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None})
    return files


def _curve(axes: Any, run: Compared, style: dict[str, str]) -> None:
    points = [(step, loss) for step, loss in run.trained.loss if math.isfinite(loss)]
    size = -(-len(points) // _POINTS) or 1
    pieces = [points[place : place + size] for place in range(0, len(points), size)]
    steps = [piece[-1][0] for piece in pieces]
    losses = [math.fsum(loss for _, loss in piece) / len(piece) for piece in pieces]
    axes.plot(steps, losses, linewidth=0.9, alpha=0.5, **style)


def _scores(axes: Any, run: Compared, style: dict[str, str], name: str) -> None:
    points = [(step, score) for step, score in run.trained.scores if math.isfinite(score)]
    axes.plot(
        [step for step, _ in points],
        [score for _, score in points],
        marker="o",
        markersize=3.5,
        linewidth=1.2,
        label=name,
        **style,
    )


def _leave_room(axes: Any, runs: Sequence[Compared]) -> None:
    """Bounds that hold every curve after its beginning, so that one that diverges does not flatten the others."""
    low, high = [], []
    for run in runs:
        last = run.trained.loss[-1][0] if run.trained.loss else 0
        later = [loss for step, loss in run.trained.loss if step >= _HEAD * last and math.isfinite(loss)]
        if later and run.trained.final is not None:
            low.append(min(later))
            high.append(max(later))
    if low and max(high) > min(low):
        margin = 0.05 * (max(high) - min(low))
        scores = [score for run in runs for _, score in run.trained.scores if math.isfinite(score)]
        bottom = min([*low, *(score for score in scores if score > 0 and len(axes.figure.axes) == 1)])
        axes.set_ylim(bottom - margin, max(high) + margin)
