"""The settings and formulas of all shapes of learning-rate schedules.

A new shape is an entry of `SHAPES` plus a function in `lr_schedule.py`. Decision 0007 lists
differences from torch and transformers.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from surefoot.config.durations import NEVER
from surefoot.errors import ConfigError, Remedy, Setting

Factors = Callable[[int], float]
Groups = tuple[Mapping[str, Any], ...]  # settings of an optimizer's parameter groups
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fall:
    """The resolved settings of a shape, with durations in steps, and the bounds of the fall."""

    settings: Settings
    steps: int
    period: Fraction | None = None  # steps between recurring milestones

    @property
    def warmup(self) -> int:
        return int(self.settings["warmup"])

    @property
    def min_lr_ratio(self) -> float:
        return float(self.settings.get("min_lr_ratio", 0.0))

    @property
    def last(self) -> int:
        """The step at which the factor reaches its minimum."""
        return self.steps - 1 if self.min_lr_ratio > 0.0 else self.steps

    def along(self, rest: Factors) -> Factors:
        """Scale `rest`, which falls from 1 to 0, to a factor that falls from 1 to
        `min_lr_ratio`.
        """
        min_lr_ratio = self.min_lr_ratio
        span = 1.0 - min_lr_ratio
        return lambda step: min_lr_ratio + span * rest(step)

    def remaining(self) -> Factors:
        """Return the remaining fraction of the fall, from 1 at the end of warm-up to 0, without
        cancellation near 0.
        """
        last = self.last
        falling_steps = last - self.warmup  # 0 if the peak is the last step
        return lambda step: (last - step) / falling_steps


@dataclass(frozen=True)
class Shape:
    """The shape of a schedule; its key in `SHAPES` is the name that a user types."""

    takes: Settings  # its settings and their defaults
    fall: Callable[[Fall], Factors]  # the factor after the step where warm-up ends
    # The number of leading steps whose factors are the same in every longer run; `NEVER` for all
    # steps
    shared: Callable[[Fall], int] = lambda fall: fall.warmup + 1
    # The setting that can make the last factors underflow to 0, and the remedy to type
    steep: tuple[str, Remedy] | None = None
    # Its rise is a part of the shape: it has a default of its own, also in recipes, and may be long
    own_rise: bool = False
    # The factor rises again after it has fallen, and the loss may rise with it
    rises_again: bool = False


# of a turn: sin(_QUARTER * x) ** 2 is (1 - cos(pi * x)) / 2 without the cancellation near 0
_QUARTER = 0.5 * math.pi


def curve(shape: Shape, at: Fall) -> Factors:
    """Return the factor as a function of the step; raise `ConfigError` if the factor underflows to
    0.
    """
    warmup = at.warmup
    min_lr_ratio = at.min_lr_ratio
    fall = shape.fall(at)
    start: float | None = at.settings.get("start_lr_ratio")
    rise = _rise(at)
    last = at.last if "min_lr_ratio" in at.settings else NEVER

    def factor(step: int) -> float:
        if step < warmup and start is not None:
            return start + (1.0 - start) * rise(step)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step == warmup:
            return 1.0
        return min_lr_ratio if step >= last else fall(step)

    if shape.steep is not None and factor(at.steps - 1) == 0.0:
        name, remedy = shape.steep
        raise ConfigError(
            "schedule-underflows",
            problem=f"schedule.{name} = {at.settings[name]!r}:"
            " the last learning rates would underflow to 0",
            remedy=[remedy, ("another", Setting(f"schedule.{name}"))],
            setting=f"schedule.{name}",
            value=at.settings[name],
            step=at.steps - 1,
        )
    return factor


def _rise(at: Fall) -> Factors:
    """Return the rise of a one-cycle, from 0 at step 0 to 1 at the end of the warm-up."""
    warmup = at.warmup
    if at.settings.get("rise_shape") == "linear":
        return lambda step: step / warmup
    return lambda step: math.sin(_QUARTER * step / warmup) ** 2


def _polynomial(at: Fall) -> Factors:
    remaining = at.remaining()
    power = at.settings["power"]
    return at.along(lambda step: remaining(step) ** power)


def _cosine(at: Fall) -> Factors:
    last = at.last
    falling_steps = last - at.warmup
    return at.along(lambda step: math.sin(_QUARTER * (last - step) / falling_steps) ** 2)


def _exponential(at: Fall) -> Factors:
    min_lr_ratio = at.min_lr_ratio
    warmup = at.warmup
    falling_steps = at.last - warmup
    return lambda step: min_lr_ratio ** ((step - warmup) / falling_steps)


def _inverse_sqrt(at: Fall) -> Factors:
    warmup = at.warmup
    scale = max(warmup, 1)
    return lambda step: math.sqrt(scale / (step - warmup + scale))


def _steps(at: Fall) -> Factors:
    milestones = at.settings["milestones"]
    gamma = at.settings["gamma"]
    period = at.period
    if period is not None:
        return lambda step: gamma ** (step * period.denominator // period.numerator)
    return lambda step: gamma ** bisect_right(milestones, step)


def _stable_decay(at: Fall) -> Factors:
    last = at.last
    cooldown = int(at.settings["cooldown"])

    def one_minus_sqrt(step: int) -> float:
        remaining = (last - step) / cooldown
        # equals 1 - sqrt(1 - remaining), without the cancellation near 0
        return remaining / (1.0 + math.sqrt(1.0 - remaining))

    def linear(step: int) -> float:
        return (last - step) / cooldown

    fall = at.along(linear if at.settings["cooldown_shape"] == "linear" else one_minus_sqrt)
    return lambda step: 1.0 if step <= last - cooldown else fall(step)


def momentum(at: Fall) -> Factors | None:
    """Return the momentum of a one-cycle as a function of the step; None if the momentum does not
    change.
    """
    bounds = at.settings.get("momentum_range")
    if bounds is None:
        return None
    low, high = map(float, bounds)
    warmup = at.warmup
    last = at.last
    rise = _rise(at)

    def value(step: int) -> float:
        if step == warmup:
            return low
        if step < warmup:
            return high - (high - low) * rise(step)
        remaining = max(0, last - step) / max(1, last - warmup)
        return high - (high - low) * math.sin(_QUARTER * remaining) ** 2

    return value


def _restarts(at: Fall) -> Factors:
    starts = _cycle_starts(at)
    # like a run, a cycle reaches its minimum on its last step or one step later
    after_last = at.steps - at.last
    lasts = [next_start - after_last for next_start in starts[1:]]
    lasts.append(at.last)

    def remaining(step: int) -> float:
        cycle = bisect_right(starts, step) - 1
        start = starts[cycle]
        if step == start:
            return 1.0
        last = lasts[cycle]
        return math.sin(_QUARTER * (last - step) / (last - start)) ** 2

    return at.along(remaining)


def _cycle_starts(at: Fall) -> list[int]:
    size = float(at.settings["cycle"])
    growth = float(at.settings["cycle_growth"])
    starts = [at.warmup]
    while True:
        next_start = starts[-1] + round(size)
        size *= growth
        # less than half of the next cycle is left: this cycle takes the rest
        if 2 * (at.steps - next_start) < size:
            return starts
        starts.append(next_start)


SHAPES: dict[str, Shape] = {
    "constant": Shape({"warmup": 0}, lambda _: lambda _: 1.0, lambda _: NEVER),
    "linear": Shape({"warmup": 0, "min_lr_ratio": 0.0}, lambda at: at.along(at.remaining())),
    "cosine": Shape({"warmup": 0, "min_lr_ratio": 0.0}, _cosine),
    "polynomial": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "power": 1.0},
        _polynomial,
        steep=("power", Setting("schedule.min_lr_ratio", 0.01)),
    ),
    "inverse_sqrt": Shape({"warmup": "5%"}, _inverse_sqrt, lambda _: NEVER),
    "multistep": Shape(
        {"warmup": 0, "milestones": ("50%", "75%"), "gamma": 0.1},
        _steps,
        lambda _: NEVER,
        ("gamma", ("fewer", Setting("schedule.milestones"))),
    ),
    "exponential": Shape({"warmup": 0, "min_lr_ratio": 0.01}, _exponential),
    "one_cycle": Shape(
        {
            "warmup": "30%",
            "rise_shape": "cosine",
            "min_lr_ratio": 0.0,
            "start_lr_ratio": 1 / 25,
            "momentum_range": None,
        },
        _cosine,
        own_rise=True,
    ),
    "wsd": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "cooldown": "20%", "cooldown_shape": "1-sqrt"},
        _stable_decay,
        lambda at: at.last - int(at.settings["cooldown"]) + 1,
    ),
    "cosine_restarts": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "cycle": "25%", "cycle_growth": 1.0},
        _restarts,
        lambda at: _cycle_starts(at)[-1] + 1,
        rises_again=True,
    ),
}
