"""Where the time of a run goes: each session's first step, training, waiting for data, evaluating, saving, the user's own code.

This is the one definition of a run's time: records, the console, the page and `diagnose` add up these seconds. What a session
does before its first step, and after the record of its end, belongs to none.
"""

from collections import deque
from collections.abc import Callable
from statistics import fmean, median_low
from time import perf_counter
from typing import Literal

from surefoot.checkpoint.state_json import Seconds
from surefoot.tracking.record import PHASES, Phase

Event = Literal["evaluation", "sample", "save"]
_RECENT = 9  # records that an estimate looks back on

# "starting" is what comes once: the first step of a session, its data too, in which kernels, buffers and workers are made; and of
# a new run the second step, which is watched as well for state that no checkpoint holds.


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
        self.first_steps: list[int] = []  # indexes of the steps of this window with which sessions began: "starting"

    def start(self) -> None:
        """Begin to train: what was since the last phase belongs to none."""
        self.phase, self.since = "data_wait", self.now()

    def enter(self, phase: Phase) -> None:
        """From now on, time is spent on `phase`."""
        now = self.now()
        self.window_s[self.phase] = self.window_s.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def window(self) -> dict[str, float]:
        """Seconds in each phase since the last call, as `training_s` and so on; starts a new window."""
        self.enter(self.phase)
        seconds = {f"{phase}_s": self.window_s.get(phase, 0.0) for phase in PHASES}
        self.total_s |= {phase: self.total_s.get(phase, 0.0) + spent for phase, spent in self.window_s.items()}
        self.window_s, self.first_steps = {}, []
        return seconds

    def all_s(self) -> float:
        """Seconds of all recorded phases, over all sessions up to now."""
        self.enter(self.phase)
        return sum(spent.get(phase, 0.0) for spent in (self.total_s, self.window_s) for phase in PHASES)

    def state(self) -> Seconds:
        """What a checkpoint holds: seconds in each phase over all sessions, and those since the last record, with their first steps."""
        self.enter(self.phase)
        total_s = {phase: self.total_s.get(phase, 0.0) + spent for phase, spent in self.window_s.items()}
        return {
            "total_s": {phase: repr(spent) for phase, spent in (self.total_s | total_s).items()},
            "window_s": {phase: repr(spent) for phase, spent in self.window_s.items()},
            "first_steps": list(self.first_steps),
        }

    def load_state(self, state: Seconds) -> None:
        self.first_steps = list(state["first_steps"])
        self.window_s = {phase: float(seconds) for phase, seconds in state["window_s"].items()}
        total_s = {phase: float(seconds) for phase, seconds in state["total_s"].items()}
        self.total_s = {phase: spent - self.window_s.get(phase, 0.0) for phase, spent in total_s.items()}


class RemainingTime:
    """Estimates how long a run still takes, from the recent past and from what is still due.

    The lower median over the last 9 records counts, so neither a slow start nor a busy spell is trusted for long. The work of
    evaluations is given in steps; their measured time replaces that of steps after the first one. Samples and saves count from
    the first one on.

    >>> remaining = RemainingTime()
    >>> remaining.seconds(steps=90, evaluations=6.0)
    >>> remaining.add_steps(10, training_s=20.0)
    >>> remaining.seconds(steps=90, evaluations=6.0)
    192.0
    >>> remaining.add_event("evaluation", 9.0, steps=3.0)
    >>> remaining.seconds(steps=90, evaluations=3.0)
    189.0
    """

    def __init__(self) -> None:
        self.training_s: deque[float] = deque(maxlen=_RECENT)  # per step
        self.user_s: deque[float] = deque(
            maxlen=_RECENT
        )  # per step; of the user's own code, which need not be the same in all
        self.event_s: dict[Event, deque[float]] = {}  # of an evaluation: per step's worth of work

    def add_steps(self, count: int, *, training_s: float, user_s: float = 0.0) -> None:
        """Take note of the time of `count` steps, with the wait for their data."""
        if count > 0:
            self.training_s.append(training_s / count)
            self.user_s.append(user_s / count)

    def add_event(self, event: Event, seconds: float, *, steps: float = 1.0) -> None:
        """Take note of the time of an evaluation (whose work is that of `steps`), of a sample or of a save."""
        if steps > 0:
            self.event_s.setdefault(event, deque(maxlen=_RECENT)).append(seconds / steps)

    def seconds(
        self, *, steps: int, evaluations: float, samples: int = 0, saves: int = 0, save_every_s: float | None = None
    ) -> float | None:
        """Seconds for all that is left, with saves every `save_every_s` besides; None before the time of any step is known."""
        if not self.training_s:
            return None
        step_s = median_low(self.training_s)
        event_s: dict[Event, float] = {"evaluation": step_s, "sample": 0.0, "save": 0.0}
        event_s |= {event: median_low(times_s) for event, times_s in self.event_s.items()}
        left: dict[Event, float] = {"evaluation": evaluations, "sample": samples, "save": saves}
        all_s = steps * (step_s + fmean(self.user_s)) + sum(count * event_s[event] for event, count in left.items())
        return all_s if save_every_s is None else all_s + all_s // save_every_s * event_s["save"]


class Deadline:
    """The end of a time limit that began when this was made; a step that would end after it is not to be begun.

    >>> ticks = iter([0.0, 1.0, 5.0, 9.0])
    >>> deadline = Deadline(12.0, now=lambda: next(ticks))
    >>> [deadline.near(keep_free_s=0.5) for _ in range(3)]
    [False, False, True]
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = perf_counter) -> None:
        self.now, self.end = now, now() + limit_s
        self.checked: float | None = None
        self.longest_s = 0.0  # from one look to the next: a step, with all that was due after it

    def near(self, *, keep_free_s: float) -> bool:
        """Asked before each step: whether it, if it takes as long as the longest, would leave less than `keep_free_s`."""
        now = self.now()
        if self.checked is not None:
            self.longest_s = max(self.longest_s, now - self.checked)
        self.checked = now
        return now + self.longest_s + keep_free_s > self.end
