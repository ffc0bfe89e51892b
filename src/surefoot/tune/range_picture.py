"""A range test of the learning rate as a picture."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.tune.range_test import RangeTest, written


def made(directory: Path) -> Path:
    """The directory, made where it is missing; `ConfigError` where it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _refused(directory, problem) from problem
    return directory


def draw(found: RangeTest, directory: Path, *, title: str) -> list[Path]:
    """Write find-lr.svg and find-lr.png into a directory: losses, the smoothed curve, and the suggestion where there is one.

    The directory is made where it is missing. Returns the two files; raises `ConfigError` where they cannot be written.
    """
    import matplotlib as mpl  # where it is used: importing it makes loggers
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "surefoot", "font.size": 9}
    ):  # the same test, the same file
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.plot(found.rates, found.losses, ".", color="0.7", markersize=4, label="loss after a step at this rate")
        axes.plot(found.rates, found.smoothed, color="tab:blue", label="smoothed")
        if found.minimum is not None:
            axes.plot(
                found.minimum, found.smoothed.min(), "v", color="tab:blue", label=f"least: {written(found.minimum)}"
            )
        if found.suggested is not None:
            label = f"suggested: {written(found.suggested)}"
            axes.axvline(found.suggested, color="tab:green", linewidth=1.5, label=label)
        if found.diverged_at is not None:
            label = f"{found.end}: {written(found.diverged_at)}"
            axes.axvline(found.diverged_at, color="tab:red", linestyle="--", linewidth=1, label=label)
        if len(found.losses):
            low, high = found.smoothed.min(), found.smoothed.max()  # single losses of a divergence would hide the fall
            axes.set_ylim(low - 0.25 * (high - low) - 1e-9, high + 0.25 * (high - low) + 1e-9)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        files = ["find-lr.svg", "find-lr.png"]
        try:
            figure.savefig(made(directory) / files[0], metadata={"Date": None})
            figure.savefig(directory / files[1], dpi=150)
        except OSError as problem:
            raise _refused(directory, problem) from problem
    return [directory / name for name in files]


def _refused(directory: Path, problem: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {directory}: {problem.strerror or problem}\n  choose another place: --out DIR")
