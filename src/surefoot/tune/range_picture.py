"""A range test of the learning rate as a picture."""

from __future__ import annotations

from pathlib import Path

from surefoot.tune.drawing import COLOURS, drawing, write
from surefoot.tune.range_test import RangeTest, written


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
        axes.plot(found.rates, found.smoothed, color=COLOURS[0], label="smoothed")
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
            low, high = found.smoothed.min(), found.smoothed.max()  # single losses of a divergence would hide the fall
            axes.set_ylim(low - 0.25 * (high - low) - 1e-9, high + 0.25 * (high - low) + 1e-9)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return write(figure, directory / "find-lr")
