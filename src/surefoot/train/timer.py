"""The seconds of a run by phase: session start, training, data wait, evaluation, saving and the
user's code.

The time before a session's first step and after its last record belongs to no phase.
"""

from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean, median_low
from time import perf_counter
from typing import Literal

from surefoot.checkpoint.state_json import Seconds
from surefoot.tracking.record import PHASES, Phase

Event = Literal["evaluation", "sample", "save"]
_RECENT = 9  # number of records in an estimate
_OF_EPOCHS: tuple[Phase, ...] = ("starting", "training", "data_wait", "user")

# "starting" is the first step of a session with its data, which creates kernels, buffers and
# workers. In a new run, the second step belongs to it too, since that step is checked for state
# that no checkpoint holds.


class Clock:
    """A clock that assigns each moment after its creation to exactly one phase.

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
        self.epoch_start_s = 0.0  # `trained_s` at the start of the current epoch
        self.first_steps: list[int] = []  # indexes of unrecorded steps in the phase "starting"

    def start(self) -> None:
        """Enter the phase "data_wait"; the time since the last phase is not counted."""
        self.phase = "data_wait"
        self.since = self.now()

    def enter(self, phase: Phase) -> None:
        """Assign the time from now on to `phase`."""
        now = self.now()
        self.window_s[self.phase] = self.window_s.get(self.phase, 0.0) + now - self.since
        self.phase = phase
        self.since = now

    def window(self) -> dict[str, float]:
        """Return the seconds in each phase since the last call, as `training_s` and so on; start a
        new window.
        """
        self.enter(self.phase)
        seconds = {f"{phase}_s": self.window_s.get(phase, 0.0) for phase in PHASES}
        self.total_s |= self._totals_with_window()
        self.window_s = {}
        return seconds

    def _totals_with_window(self) -> dict[str, float]:
        """Return the seconds over all sessions of the phases in the window."""
        return {
            phase: self.total_s.get(phase, 0.0) + spent for phase, spent in self.window_s.items()
        }

    def all_s(self) -> float:
        """Return the seconds of all recorded phases over all sessions."""
        return self._spent_s(PHASES)

    def trained_s(self) -> float:
        """Return the seconds of training over all sessions, without evaluations and saves."""
        return self._spent_s(_OF_EPOCHS)

    def _spent_s(self, phases: Iterable[Phase]) -> float:
        self.enter(self.phase)
        spent_s = 0.0
        for seconds in (self.total_s, self.window_s):
            for phase in phases:
                spent_s += seconds.get(phase, 0.0)
        return spent_s

    def state(self) -> Seconds:
        """Return the checkpoint state: seconds by phase over all sessions and in the window, and
        the window's first steps.
        """
        self.enter(self.phase)
        total_s = self.total_s | self._totals_with_window()
        return {
            "total_s": {phase: repr(spent) for phase, spent in total_s.items()},
            "window_s": {phase: repr(spent) for phase, spent in self.window_s.items()},
            "first_steps": list(self.first_steps),
            "epoch_start_s": repr(self.epoch_start_s),
        }

    def load_state(self, state: Seconds) -> None:
        self.first_steps = list(state["first_steps"])
        self.epoch_start_s = float(state.get("epoch_start_s", "0"))
        self.window_s = {phase: float(seconds) for phase, seconds in state["window_s"].items()}
        total_s = {phase: float(seconds) for phase, seconds in state["total_s"].items()}
        self.total_s = {
            phase: spent - self.window_s.get(phase, 0.0) for phase, spent in total_s.items()
        }


class RemainingTime:
    """An estimate of a run's remaining time from recent times and the work still due.

    The lower median of the last 9 records limits the effect of slow periods. The work of an
    evaluation is given as a number of training steps. Until an evaluation has been timed, its
    estimate is the time of this number of steps. Samples and saves add no time until a sample or
    save has been timed.

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
        # per step; averaged, since user code may run in few steps
        self.user_s: deque[float] = deque(maxlen=_RECENT)
        self.event_s: dict[Event, deque[float]] = {}  # of an evaluation: per step of work

    def add_steps(self, count: int, *, training_s: float, user_s: float = 0.0) -> None:
        """Add the time of `count` steps, including the wait for their data."""
        if count > 0:
            self.training_s.append(training_s / count)
            self.user_s.append(user_s / count)

    def add_event(self, event: Event, seconds: float, *, steps: float = 1.0) -> None:
        """Add the time of a sample, a save or an evaluation. `steps` is the work of an evaluation
        in training steps.
        """
        if steps > 0:
            self.event_s.setdefault(event, deque(maxlen=_RECENT)).append(seconds / steps)

    def seconds(
        self,
        *,
        steps: int,
        evaluations: float,
        samples: int = 0,
        saves: int = 0,
        save_every_s: float | None = None,
    ) -> float | None:
        """Return the seconds of remaining work, with saves every `save_every_s`. Returns None
        before the first timed step.
        """
        if not self.training_s:
            return None
        step_s = median_low(self.training_s)
        event_s: dict[Event, float] = {"evaluation": step_s, "sample": 0.0, "save": 0.0}
        event_s |= {event: median_low(times_s) for event, times_s in self.event_s.items()}
        counts: dict[Event, float] = {"evaluation": evaluations, "sample": samples, "save": saves}
        steps_s = steps * (step_s + fmean(self.user_s))
        all_s = steps_s + sum(count * event_s[event] for event, count in counts.items())
        if save_every_s is not None:
            all_s += all_s // save_every_s * event_s["save"]
        return all_s


class Deadline:
    """A time limit that starts at creation. A step that would end after the limit must not start.

    >>> ticks = iter([0.0, 1.0, 5.0, 9.0])
    >>> deadline = Deadline(12.0, now=lambda: next(ticks))
    >>> [deadline.near(keep_free_s=0.5) for _ in range(3)]
    [False, False, True]
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.end = now() + limit_s
        self.checked: float | None = None
        self.longest_s = 0.0  # between two calls of `near`: a step and the work due after it

    def near(self, *, keep_free_s: float) -> bool:
        """Return True if another step of the longest duration would leave less than `keep_free_s`.
        Call this method before each step.
        """
        now = self.now()
        if self.checked is not None:
            self.longest_s = max(self.longest_s, now - self.checked)
        self.checked = now
        return now + self.longest_s + keep_free_s > self.end
