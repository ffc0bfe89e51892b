"""Learning-rate schedules of one run side by side, as PNG and SVG.

Above all curves in one field; below each in its own, with its peak, its lowest rate, the end of warm-up and its area marked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.config.durations import Length, planned
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError
from surefoot.report.figures import COLOURS, DASHES, drawing, write
from surefoot.schedules.lr_schedule import Joined, Schedule
from surefoot.tracking.format import shortened
from surefoot.tracking.text_table import text_table

_LOOKED_AT = 1_000_000  # steps of one schedule; of a longer run every second, third ...


@dataclass(frozen=True)
class Trace:
    """The factors of one schedule over a run: `factors[i]` is that of step `steps[i]`; the last step is among them."""

    name: str
    steps: NDArray[np.int64]
    factors: NDArray[np.float64]
    warmup: int
    """The step at which warm-up ends; 0 where there is none."""

    @property
    def peak(self) -> tuple[int, float]:
        """The first step with the highest factor, and that factor."""
        return self._at(int(self.factors.argmax()))

    @property
    def lowest(self) -> tuple[int, float]:
        """The first step with the lowest factor from the peak on, and that factor: the floor, where there is one."""
        begin = int(self.factors.argmax())
        return self._at(begin + int(self.factors[begin:].argmin()))

    @property
    def mean(self) -> float:
        """The area under the curve: how much all steps learn together, as a share of what a constant rate would."""
        until_next = np.diff(self.steps, append=self.steps[-1] + 1)
        return float(np.average(self.factors, weights=until_next))

    def _at(self, place: int) -> tuple[int, float]:
        return int(self.steps[place]), float(self.factors[place])


def traced(schedules: Mapping[str, Schedule | Joined], length: Length) -> list[Trace]:
    """A trace of each schedule in a run of that length; one `ConfigError` with all that do not fit it.

    >>> from surefoot.schedules.lr_schedule import linear
    >>> trace, = traced({"linear": linear(2)}, Length(steps=6, samples_per_epoch=1, batch_size=1))
    >>> trace.warmup, trace.peak, trace.lowest, round(trace.mean, 3)
    (2, (2, 1.0), (5, 0.25), 0.583)
    """
    found, problems = [], []
    for name, schedule in schedules.items():
        try:
            found.append(_trace(name, schedule, length))
        except ConfigError as problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def table(traces: Sequence[Trace], *, rate: float | None = None) -> str:
    """The traces as text: a row each, as factors, or as rates where the base `rate` is known.

    >>> from surefoot.schedules.lr_schedule import linear
    >>> print(table(traced({"linear": linear(2)}, Length(steps=6, samples_per_epoch=1, batch_size=1)), rate=0.1))
    schedule  warm-up ends         peak         lowest  mean factor
    linear          step 2  0.1, step 2  0.025, step 5        0.583
    """
    rows = [("schedule", "warm-up ends", "peak", "lowest", "mean factor")]
    for trace in traces:
        ends = f"step {trace.warmup:,}" if trace.warmup else "none"
        peak, lowest = (f"{factor * (rate or 1.0):.3g}, step {step:,}" for step, factor in (trace.peak, trace.lowest))
        rows.append((trace.name, ends, peak, lowest, f"{trace.mean:.3f}"))
    return "\n".join(text_table(rows))


def _trace(name: str, schedule: Schedule | Joined, length: Length) -> Trace:
    written = schedule.resolved(length)
    factor, warmup, steps = written.factors(length), int(written.warmup or 0), length.steps
    even = np.arange(0, steps, -(-steps // _LOOKED_AT), dtype=np.int64)
    looked = np.unique(np.concatenate([even, [warmup, steps - 1]])).astype(np.int64)
    return Trace(name, looked, np.array([factor(int(step)) for step in looked]), warmup)


_DPI, _WIDTH = 100, 10.0  # 1,000 pixels
_COLUMNS = 3
_POINTS = 160  # of a line, besides its jumps
_JUMP = 0.02  # between two steps, of the full rate
_LONGEST_NAME = 40
_EXPLAINED = "●  peak      ▼  lowest from there on      ┆  warm-up ends      shaded: the area, told as the mean factor"


def plot_schedules(
    schedules: Mapping[str, Schedule | Joined], length: str | Length, *, out: str | Path, rate: float | None = None
) -> list[Path]:
    """Draw schedules of a run of `length` ("1000 steps") side by side into OUT.png and OUT.svg; returns both paths.

    Each has its peak, its lowest rate, the end of its warm-up and the mean of its factors marked. With `rate`, the base
    learning rate, the curves are rates, else factors on it. The same arguments give the same bytes.
    Raises `ConfigError` for schedules that do not fit the run, or where the files cannot be written.

    >>> import tempfile
    >>> from surefoot.schedules.lr_schedule import linear, warmup_cosine
    >>> with tempfile.TemporaryDirectory() as place:
    ...     found = plot_schedules({"cosine": warmup_cosine("5%"), "linear": linear()}, "80 steps", out=f"{place}/two")
    >>> [path.name for path in found]
    ['two.png', 'two.svg']
    """
    if not schedules:
        raise ConfigError("no schedule to draw: give at least one, as {'cosine': surefoot.warmup_cosine('5%')}")
    whole = length if isinstance(length, Length) else steps_alone(length)
    return drawn(traced(schedules, whole), out=out, rate=rate)


def drawn(traces: Sequence[Trace], *, out: str | Path, rate: float | None) -> list[Path]:
    """Write the picture of traces that are there already; as `plot_schedules`."""
    place = local_path(out, setting="out")
    if place.suffix in (".png", ".svg"):
        place = place.with_suffix("")
    with drawing():
        return write(_figure(traces, rate), place, dpi=_DPI)


def steps_alone(text: str) -> Length:
    """A length in steps, where there are no data of which epochs could be counted.

    >>> steps_alone("1000 steps").steps
    1000
    """
    if "epoch" in str(text):
        raise ConfigError(
            f"length = {text!r}: without data nobody knows how many steps that is\n  write it as '1000 steps'"
        )
    return planned(text, samples_per_epoch=1, batch_size=1)


def _figure(traces: Sequence[Trace], rate: float | None) -> Any:
    from matplotlib.figure import Figure

    columns = 2 if len(traces) == 4 else min(_COLUMNS, len(traces))
    rows = -(-len(traces) // columns)
    above, below = 3.4 if len(traces) > 1 else 0.0, (2.6 if len(traces) > 1 else 4.2) * rows + 0.35
    figure: Any = Figure(figsize=(_WIDTH, above + below), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)  # the last number of one field and the first of the next are apart
    unit = rate or 1.0
    top = 1.08 * unit * max(trace.peak[1] for trace in traces)
    fields = figure
    if above:
        together, fields = figure.subfigures(2, 1, height_ratios=[above, below], hspace=0.0)
        _overlaid(together.add_subplot(), traces, rate, top)
    each = fields.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for place, (axes, trace) in enumerate(zip(each, traces, strict=False)):
        _marked(axes, trace, unit, _style(place))
        _framed(axes, trace, top, ticks=4 if columns > 1 else 8)
    for axes in each[len(traces) :]:
        axes.remove()
    for axes in each[max(0, len(traces) - columns) : len(traces)]:
        axes.tick_params(labelbottom=True)  # where the field below is missing
    fields.supylabel(_what(rate), fontsize=9)
    fields.supxlabel(_EXPLAINED, fontsize=8.5)
    return figure


def _overlaid(axes: Any, traces: Sequence[Trace], rate: float | None, top: float) -> None:
    for place, trace in enumerate(traces):
        steps, factors = _points(trace)
        name = shortened(trace.name, _LONGEST_NAME)
        axes.plot(steps, factors * (rate or 1.0), label=name, linewidth=1.8, **_style(place))
    _framed(axes, traces[0], top, ticks=8)
    axes.set_ylabel(_what(rate))
    axes.set_xlabel("step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, handlelength=3.6)


def _marked(axes: Any, trace: Trace, unit: float, style: dict[str, Any]) -> None:
    """One schedule in a field of its own, with all that is marked."""
    steps, factors = _points(trace)
    axes.fill_between(steps, factors * unit, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(steps, factors * unit, linewidth=1.6, **style)
    if trace.warmup:
        axes.axvline(trace.warmup, color="0.35", linestyle=(0, (2, 2)), linewidth=1.0)
    (peak_step, peak), (lowest_step, lowest) = trace.peak, trace.lowest
    mark = {"color": style["color"], "markersize": 6, "clip_on": False, "zorder": 3}
    if lowest < peak:
        axes.plot([lowest_step], [lowest * unit], "v", **mark)
    axes.plot([peak_step], [peak * unit], "o", **mark)
    falls = f"lowest {lowest * unit:.3g} at {lowest_step:,}" if lowest < peak else "never lower"
    told = [
        f"mean factor {trace.mean:.3f}, " + (f"warm-up to {trace.warmup:,}" if trace.warmup else "no warm-up"),
        f"peak {peak * unit:.3g} at {peak_step:,}, {falls}",
    ]
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom", "annotation_clip": False}
    axes.annotate("\n".join(told), (0, 1), xytext=(0, 4), fontsize=8, color="0.25", **above)
    axes.set_title(shortened(trace.name, _LONGEST_NAME), loc="left", fontsize=9.5, fontweight="bold", pad=28)


def _framed(axes: Any, trace: Trace, top: float, *, ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(0, top)
    axes.set_xlim(0, int(trace.steps[-1]) + 1)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _what(rate: float | None) -> str:
    return "factor on the base rate" if rate is None else f"learning rate (base {rate:g})"


def _points(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Enough of a trace for a smooth line, and both sides of each jump."""
    last = len(trace.steps) - 1
    even = np.linspace(0, last, min(last + 1, _POINTS)).round().astype(np.int64)
    jumps = np.flatnonzero(np.abs(np.diff(trace.factors)) > _JUMP)
    peak, warmup = int(trace.factors.argmax()), int(np.searchsorted(trace.steps, trace.warmup))
    kept = np.unique(np.concatenate([even, jumps, jumps + 1, [peak, warmup]])).astype(np.int64)
    return trace.steps[kept], trace.factors[kept]


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}
