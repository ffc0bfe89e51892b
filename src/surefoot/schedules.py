"""Learning-rate schedules: pure functions from a step to a factor on each group's base learning rate.

A schedule remembers nothing, so a resumed run, a replayed step and a drawn preview all see the same rates.
Steps are optimizer updates, counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from surefoot.durations import Length, in_steps
from surefoot.errors import ConfigError

Factors = Callable[[int], float]
Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A rise over `warmup` ("100 steps", "5%", "2 epochs" or a number of steps), then a fall to `floor`.

    The factor is (step + 1) / (warmup + 1) while it rises, so no step is wasted at 0, and exactly 1 at
    `step == warmup`, once. A floor above 0 is reached on the last step; a floor of 0 one step later, which is
    never made. Past the end the floor holds.
    """

    shape: Shape
    warmup: str | int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ConfigError(f"schedule.name = {self.shape!r} is unknown; one of: {', '.join(get_args(Shape))}")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"schedule.floor = {self.floor!r}: a factor on the learning rate from 0 to 1 is needed")
        if self.shape == "constant" and self.floor != 0.0:
            raise ConfigError(
                f"schedule.floor = {self.floor!r} means nothing to a constant schedule\n"
                "  leave it out, or choose --schedule.name cosine"
            )

    @property
    def extends_exactly(self) -> bool:
        """True where a longer run has the same factors on all steps of a shorter one."""
        return self.shape == "constant" and not (isinstance(self.warmup, str) and "%" in self.warmup)

    def validate(self, length: Length) -> None:
        """Raise `ConfigError` where the warm-up does not end within the run."""
        warmup = in_steps(self.warmup, length=length, setting="schedule.warmup")
        if warmup >= length.steps:
            written = "" if isinstance(self.warmup, int) else f" ({self.warmup})"
            raise ConfigError(
                f"schedule.warmup = {warmup} steps{written} does not fit in a run of {length.steps} steps:"
                " the full rate would never be reached\n"
                f"  try: --schedule.warmup 5%, or --length '{10 * warmup} steps'"
            )

    def resolved(self, length: Length) -> Schedule:
        """The same schedule with its warm-up in steps, so that 5% of this run stays that in a longer one.

        >>> warmup_cosine("5%").resolved(Length(steps=200, samples_per_epoch=100, batch_size=10)).warmup
        10
        """
        self.validate(length)
        return replace(self, warmup=in_steps(self.warmup, length=length, setting="schedule.warmup"))

    def factors(self, length: Length) -> Factors:
        """The factor on the base learning rate as a function of the step; under a microsecond a call."""
        warmup = in_steps(self.resolved(length).warmup, length=length)
        last = length.steps - 1 if self.floor > 0 else length.steps
        falling = max(1, last - warmup)  # with warmup == last the peak has the last step for itself
        match self.shape:
            case "constant":
                return lambda step: (step + 1) / (warmup + 1) if step < warmup else 1.0
            case "linear":
                fall = _linear
            case "cosine":
                fall = _cosine
        floor = float(self.floor)
        span = 1.0 - floor

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            if step == warmup:
                return 1.0
            if step >= last:
                return floor
            return floor + span * fall((step - warmup) / falling)

        return factor


def constant(warmup: str | int = 0) -> Schedule:
    """The base learning rate throughout, after a warm-up; a run of this schedule can be made longer exactly.

    >>> factor = constant(3).factors(Length(steps=8, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in (0, 1, 2, 3, 7)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return Schedule("constant", warmup=warmup)


def linear(warmup: str | int = 0, floor: float = 0.0) -> Schedule:
    """Rise for `warmup`, then fall along a straight line to `floor` times the base learning rate.

    >>> factor = linear().factors(Length(steps=4, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return Schedule("linear", warmup=warmup, floor=floor)


def warmup_cosine(warmup: str | int = 0, floor: float = 0.0) -> Schedule:
    """Rise for `warmup`, then fall along half a cosine to `floor` times the base learning rate.

    Loshchilov and Hutter 2017, equation 5, without restarts: https://arxiv.org/abs/1608.03983

    >>> factor = warmup_cosine(1, floor=0.5).factors(Length(steps=4, samples_per_epoch=8, batch_size=1))
    >>> [round(factor(step), 3) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.5, 0.5]
    """
    return Schedule("cosine", warmup=warmup, floor=floor)


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))
