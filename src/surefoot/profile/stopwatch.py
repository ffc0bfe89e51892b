"""Seconds of a step by phase: laps that are noted while it runs, and the middle half of many steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import record_function

REST = "rest"
RANGE = "surefoot: "  # what the ranges of a trace are called before the phase


class Stopwatch:
    """Splits what `now` counts into phases; what lies inside another phase belongs to the inner one alone.

    `between` is how much lies between two of its readings: seconds, or whatever else grows. Each phase is a range of the trace too,
    where a profiler runs.

    >>> ticks = iter([0.0, 1.0, 4.0, 9.0, 10.0, 11.0])
    >>> watch = Stopwatch(now=lambda: next(ticks))
    >>> watch.start()
    >>> with watch.phase("forward"):
    ...     pass
    >>> with watch.phase("backward"):
    ...     watch.lap()
    {'rest': 6.0, 'forward': 3.0, 'backward': 1.0}
    """

    def __init__(
        self, now: Callable[[], Any] = perf_counter, between: Callable[[Any, Any], float] = lambda then, now: now - then
    ) -> None:
        self.now, self.between = now, between
        self.stack: list[tuple[str, Any]] = []
        self.marks: list[tuple[str, Any]] = []  # a phase, and when it began or was gone on with

    def start(self) -> None:
        self.marks = [(self._phase, self.now())]

    def enter(self, phase: str) -> None:
        """From now on it is this phase, until `leave`."""
        marked = record_function(RANGE + phase)
        marked.__enter__()  # type: ignore[no-untyped-call]
        self.stack.append((phase, marked))
        self.marks.append((phase, self.now()))

    def leave(self) -> None:
        _, marked = self.stack.pop()
        marked.__exit__(None, None, None)
        self.marks.append((self._phase, self.now()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def lap(self) -> dict[str, float]:
        """What each phase has taken since `start`; together exactly all of it."""
        marks, taken = [*self.marks, (self._phase, self.now())], dict[str, float]()
        for (phase, then), (_, now) in pairwise(marks):
            taken[phase] = taken.get(phase, 0.0) + self.between(then, now)
        return taken

    @property
    def _phase(self) -> str:
        return self.stack[-1][0] if self.stack else REST


def stopwatch(device: torch.device) -> Stopwatch:
    """One that counts seconds as a device spends them.

    On CUDA an event is put into the stream at every change of phase, and their times are read once the device has come to the
    last one: nothing waits inside a step, and a phase in which the device had nothing to do is as long as it had not.
    """
    if device.type != "cuda":
        return Stopwatch()

    def marked() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(then: torch.cuda.Event, now: torch.cuda.Event) -> float:
        now.synchronize()
        return float(then.elapsed_time(now)) / 1e3

    return Stopwatch(marked, seconds)


PHASES = ("waiting", "forward", "loss", "backward", "communication", "optimizer", "rest")


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase; they add up to `step_s`. `low_s` and `high_s` are the ends of the half that was taken."""

    seconds: dict[str, float]
    low_s: float
    high_s: float
    steps: int  # that were made

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """What part of a step a phase is, 0 to 1."""
        return self.seconds.get(phase, 0.0) / self.step_s if self.step_s else 0.0


def middle_half(laps: Sequence[Mapping[str, float]]) -> Phases:
    """The mean over the middle half of the steps, by how long each was: as little moved by a slow step as a median is.

    Medians of the phases would not add up to the median of the step; these do.

    >>> laps = [{"forward": 1.0, "rest": 1.0}, {"forward": 1.5, "rest": 1.0}, {"forward": 2.0, "rest": 50.0}]
    >>> middle_half(laps).seconds, middle_half(laps).step_s
    ({'forward': 1.5, 'rest': 1.0}, 2.5)
    """
    ordered = sorted(laps, key=lambda lap: sum(lap.values()))
    spared = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
    half = ordered[spared : len(ordered) - spared]
    names = [name for name in PHASES if any(name in lap for lap in half)]
    return Phases(
        {name: sum(lap.get(name, 0.0) for lap in half) / len(half) for name in names},
        sum(half[0].values()),
        sum(half[-1].values()),
        len(laps),
    )
