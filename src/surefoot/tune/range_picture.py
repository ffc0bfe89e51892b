"""A range test of the learning rate as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from surefoot.drawing import COLOURS, drawing, write
from surefoot.tune.range_test import RangeTest, averaged, far, written


def draw(found: RangeTest, directory: Path, *, title: str) -> list[Path]:
    """Write find-lr.png and find-lr.svg into a directory: losses, the smoothed curve, and the suggestion where there is one.

    The directory is made where it is missing. Returns the two files; raises `ConfigError` where they cannot be written.
    """
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.plot(found.rates, found.losses, ".", color="0.7", markersize=4, label="loss after a step at this rate")
        end = _shown(found)
        axes.plot(found.rates[:end], found.smoothed[:end], color=COLOURS[0], label="smoothed")
        if found.end == "diverged":
            label = "running average: ends the test at 4 times its best"
            axes.plot(found.rates, averaged(found.losses), color=COLOURS[1], linewidth=0.8, label=label)
        if found.minimum is not None:
            axes.plot(
                found.minimum, found.smoothed.min(), "v", color=COLOURS[0], label=f"least: {written(found.minimum)}"
            )
        if found.suggested is not None:
            label = f"suggested: {written(found.suggested)}"
            axes.axvline(found.suggested, color=COLOURS[2], linewidth=1.5, label=label)
        if found.diverged_at is not None:
            label = f"{found.end}: {written(found.diverged_at)}"
            axes.axvline(found.diverged_at, color=COLOURS[1], linestyle="--", linewidth=1, label=label)
        if len(found.losses):
            _limit(axes, found)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return write(figure, directory / "find-lr")


def _shown(found: RangeTest) -> int:
    """How far the smoothed curve is drawn: past its least up to the first loss that counts as less than it is."""
    if not len(found.losses):
        return 0
    above = np.flatnonzero(found.losses > far(found.rates, found.losses))
    after = above[above > found.smoothed.argmin()]
    return int(after[0]) if len(after) else len(found.losses)


def _limit(axes: Any, found: RangeTest) -> None:
    """Losses on a logarithmic axis, where all are above 0; arrows at its top for those that would hide the fall."""
    low, high = float(min(found.losses.min(), found.smoothed.min())), float(found.smoothed.max())
    if low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        top = min(float(found.losses.max()), 10 * high) * 1.15
        axes.set_ylim(low / 1.15, top)
    else:
        room = 0.25 * (high - low) + 1e-9
        top = high + room
        axes.set_ylim(low - room, top)
    over = found.losses > top
    if over.any():
        across = axes.get_xaxis_transform()  # height 1 is the top
        axes.plot(found.rates[over], [0.98] * int(over.sum()), "^", color="0.5", markersize=4, transform=across)
