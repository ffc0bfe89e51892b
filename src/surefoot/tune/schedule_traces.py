"""What a schedule comes to over a whole run: where it peaks, how low it falls, and how much it learns in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.durations import Length
from surefoot.errors import ConfigError
from surefoot.schedules.lr_schedule import Joined, Schedule
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
        shown = [f"{factor * (rate or 1.0):.3g}, step {step:,}" for step, factor in (trace.peak, trace.lowest)]
        rows.append((trace.name, ends, shown[0], shown[1], f"{trace.mean:.3f}"))
    return "\n".join(text_table(rows))


def _trace(name: str, schedule: Schedule | Joined, length: Length) -> Trace:
    written = schedule.resolved(length)
    factor, warmup, steps = written.factors(length), int(written.warmup or 0), length.steps
    even = np.arange(0, steps, -(-steps // _LOOKED_AT), dtype=np.int64)
    looked = np.unique(np.concatenate([even, [warmup, steps - 1]])).astype(np.int64)
    return Trace(name, looked, np.array([factor(int(step)) for step in looked]), warmup)
