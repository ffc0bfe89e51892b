"""Plots of learning-rate schedules: all in one plot, and each in its own annotated plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.config.durations import Length, planned
from surefoot.config.extras import refuse_missing
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError, Setting, together
from surefoot.schedules.joined import AnySchedule, bound
from surefoot.tools.report.charts import Chart, Line, Mark
from surefoot.tools.report.figures import RASTERIZER, draw
from surefoot.tracking.format import shortened, text_table

LOOKED_AT = 1_000_000  # steps of one schedule; longer runs are sampled evenly


@dataclass(frozen=True)
class Trace:
    """The learning-rate factors of one schedule over a run. `factors[i]` is the factor of step
    `steps[i]`.
    """

    name: str
    steps: NDArray[np.int64]
    factors: NDArray[np.float64]
    warmup: int
    """The step at which the warm-up ends; 0 without warm-up."""

    @property
    def peak(self) -> tuple[int, float]:
        """The first step with the highest factor, and the factor."""
        return self._at(int(self.factors.argmax()))

    @property
    def lowest(self) -> tuple[int, float]:
        """The first step with the lowest factor after the peak, and the factor."""
        begin = int(self.factors.argmax())
        return self._at(begin + int(self.factors[begin:].argmin()))

    @property
    def mean(self) -> float:
        """The mean factor: the area under the curve relative to a constant learning rate."""
        steps_each = np.diff(self.steps, append=self.steps[-1] + 1)
        return float(np.average(self.factors, weights=steps_each))

    def _at(self, index: int) -> tuple[int, float]:
        return int(self.steps[index]), float(self.factors[index])


def trace_schedules(schedules: Mapping[str, AnySchedule], length: Length) -> list[Trace]:
    """Trace each schedule over a run of this length. Raises one `ConfigError` that names all
    schedules that do not fit.

    >>> from surefoot.schedules.lr_schedule import linear
    >>> (trace,) = trace_schedules(
    ...     {"linear": linear(2)}, Length(steps=6, samples_per_epoch=1, batch_size=1)
    ... )
    >>> trace.warmup, trace.peak, trace.lowest, round(trace.mean, 3)
    (2, (2, 1.0), (5, 0.25), 0.583)
    """
    traces = []
    problems: list[ConfigError] = []
    for name, schedule in schedules.items():
        try:
            resolved = schedule.resolved(length)
            factor = resolved.factors(length)
        except ConfigError as problem:
            problems.append(problem.inside(name))
            continue
        warmup = int(resolved.warmup or 0)
        stride = -(-length.steps // LOOKED_AT)
        marked_steps = [*range(0, length.steps, stride), warmup, length.steps - 1]
        steps = np.unique(marked_steps).astype(np.int64)
        factors = np.array([factor(int(step)) for step in steps])
        traces.append(Trace(name, steps, factors, warmup))
    if problems:
        raise together(problems)
    return traces


def table(traces: Sequence[Trace], *, rate: float | None = None) -> str:
    """Format the traces as a table with one row each: factors, or learning rates if the base
    learning rate `rate` is given.

    >>> from surefoot.schedules.lr_schedule import linear
    >>> print(
    ...     table(
    ...         trace_schedules(
    ...             {"linear": linear(2)}, Length(steps=6, samples_per_epoch=1, batch_size=1)
    ...         ),
    ...         rate=0.1,
    ...     )
    ... )
    schedule  warm-up ends         peak         lowest  mean factor
    linear          step 2  0.1, step 2  0.025, step 5        0.583
    """
    rows = [("schedule", "warm-up ends", "peak", "lowest", "mean factor")]
    for trace in traces:
        ends = f"step {trace.warmup:,}" if trace.warmup else "none"
        peak = _point_text(*trace.peak, rate=rate or 1.0)
        lowest = _point_text(*trace.lowest, rate=rate or 1.0)
        rows.append((trace.name, ends, peak, lowest, f"{trace.mean:.3f}"))
    return "\n".join(text_table(rows))


def _point_text(step: int, factor: float, *, rate: float) -> str:
    return f"{factor * rate:.3g}, step {step:,}"


_POINTS = 160  # of a line, besides its jumps
_JUMP = 0.02  # between two steps, relative to the full learning rate
_LONGEST_NAME = 40


def plot_schedules(
    schedules: Mapping[str, AnySchedule],
    length: str | Length,
    *,
    out: str | Path,
    rate: float | None = None,
) -> list[Path]:
    """Draw schedules of a run of `length` ("1000 steps") side by side into OUT.svg, and with the
    extra `plots` into OUT.png. Returns the paths.

    Each plot marks the peak, the lowest point, the end of the warm-up and the mean factor. The
    curves are learning rates if the base learning rate `rate` is given, else factors. Equal
    arguments give equal bytes. Raises `ConfigError` if a schedule does not fit the run, or if the
    files cannot be written.

    >>> import tempfile
    >>> from surefoot.schedules.lr_schedule import cosine, linear
    >>> with tempfile.TemporaryDirectory() as place:
    ...     found = plot_schedules(
    ...         {"cosine": cosine("5%"), "linear": linear()}, "80 steps", out=f"{place}/two"
    ...     )
    >>> found[-1].name
    'two.svg'
    """
    if not schedules:
        raise ConfigError(
            "plot-without-schedules",
            problem="no schedule to draw",
            remedy="give at least one, as {'cosine': sf.schedules.cosine('5%')}",
            setting="schedules",
        )
    planned_length = length if isinstance(length, Length) else steps_alone(length)
    group = {"lr": rate or 1.0, "betas": (0.9, 0.999)}
    named = {name: bound(schedule, (group,)) for name, schedule in schedules.items()}
    return draw_traces(trace_schedules(named, planned_length), out=out, rate=rate)


def draw_traces(traces: Sequence[Trace], *, out: str | Path, rate: float | None) -> list[Path]:
    """Draw traces as `plot_schedules` does."""
    path = local_path(out, setting="out")
    if path.suffix == ".png":
        refuse_missing(f"{path}", RASTERIZER, instead=f"{path.with_suffix('.svg')}")
    if path.suffix in (".png", ".svg"):
        path = path.with_suffix("")
    title = "factor on the base learning rate" if rate is None else f"learning rate (base {rate:g})"
    return draw(charts(traces, rate=rate or 1.0), path, title=title)


def steps_alone(text: str) -> Length:
    """Return a length given in steps. Raises `ConfigError` for epochs, which need data.

    >>> steps_alone("1000 steps").steps
    1000
    """
    if "epoch" in str(text):
        raise ConfigError(
            "epochs-without-data",
            problem=f"length = {text!r}: without data, the number of steps is unknown",
            remedy=Setting("length", "1000 steps"),
            setting="length",
            value=text,
        )
    return planned(text, samples_per_epoch=1, batch_size=1)


def charts(traces: Sequence[Trace], *, rate: float) -> list[Chart]:
    """Return a chart of all schedules, and one annotated chart per schedule."""
    top = 1.25 * rate * max(trace.peak[1] for trace in traces)
    wide = len(traces) == 1
    of_traces = []
    for index, trace in enumerate(traces):
        name = shortened(trace.name, _LONGEST_NAME)
        peak_step, peak = trace.peak
        lowest_step, lowest = trace.lowest
        points = tuple((float(step), rate * float(factor)) for step, factor in _points(trace))
        line = Line(name, points, 8 * index)
        marks = [Mark("best", peak_step, peak * rate, "peak", index)]
        if lowest < peak:
            marks.append(Mark("best", lowest_step, lowest * rate, "lowest", index))
        if trace.warmup:
            marks.append(Mark("event", trace.warmup, None, "warm-up ends"))
        warms = f"warm-up to {trace.warmup:,}" if trace.warmup else "no warm-up"
        falls = f"lowest {lowest * rate:.3g} at {lowest_step:,}" if lowest < peak else "never lower"
        note = (
            f"mean factor {trace.mean:.3f}, {warms}\n"
            f"peak {peak * rate:.3g} at {peak_step:,}, {falls}"
        )
        of_traces.append(
            Chart(
                name,
                name,
                (line,),
                tuple(marks),
                scale="linear",
                within=(0.0, top),
                note=note,
                wide=wide,
            )
        )
    if len(of_traces) == 1:
        return of_traces
    lines = tuple(chart.lines[0] for chart in of_traces)
    overview = Chart("all", "", lines, scale="linear", within=(0.0, top), wide=True)
    return [overview, *of_traces]


def _points(trace: Trace) -> list[tuple[int, float]]:
    last = len(trace.steps) - 1
    even = np.linspace(0, last, min(last + 1, _POINTS)).round().astype(np.int64)
    jumps = np.flatnonzero(np.abs(np.diff(trace.factors)) > _JUMP)
    peak = int(trace.factors.argmax())
    warmup = int(np.searchsorted(trace.steps, trace.warmup))
    indices = np.unique(np.concatenate([even, jumps, jumps + 1, [peak, warmup]])).astype(np.int64)
    steps = trace.steps[indices].tolist()
    factors = trace.factors[indices].tolist()
    return list(zip(steps, factors, strict=True))
