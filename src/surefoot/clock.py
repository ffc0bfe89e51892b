"""Where the time of a run goes: training, waiting for data, evaluating, saving, and the user's own code."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Literal

Phase = Literal["opening", "training", "waiting", "evaluating", "saving", "user"]


class Clock:
    """Splits the time since it was made into phases; each moment counts for exactly one of them.

    >>> ticks = iter([0.0, 2.0, 5.0])
    >>> clock = Clock(now=lambda: next(ticks))
    >>> clock.enter("training")
    >>> clock.window()["training_s"]
    3.0
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.phase: Phase = "opening"
        self.since = now()
        self.window_s: dict[str, float] = {}
        self.total_s: dict[str, float] = {}

    def start(self) -> None:
        """Begin to train: what was since the last phase belongs to none."""
        self.phase, self.since = "waiting", self.now()

    def enter(self, phase: Phase) -> None:
        """From now on, time is spent on `phase`."""
        now = self.now()
        self.window_s[self.phase] = self.window_s.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def window(self) -> dict[str, float]:
        """Seconds in each phase since the last call, as `training_s` and so on; starts a new window."""
        self.enter(self.phase)
        seconds = {
            f"{phase}_s": self.window_s.get(phase, 0.0)
            for phase in ("training", "waiting", "evaluating", "saving", "user")
        }
        for phase, spent in self.window_s.items():
            self.total_s[phase] = self.total_s.get(phase, 0.0) + spent
        self.window_s = {}
        return seconds

    def spent_s(self) -> dict[str, float]:
        """Seconds in each phase over all sittings of the run."""
        self.enter(self.phase)
        return {
            phase: self.total_s.get(phase, 0.0) + self.window_s.get(phase, 0.0)
            for phase in {**self.total_s, **self.window_s}
        }

    def load_spent_s(self, spent_s: dict[str, float]) -> None:
        """Go on counting from what `spent_s` gave."""
        self.total_s, self.window_s = dict(spent_s), {}
