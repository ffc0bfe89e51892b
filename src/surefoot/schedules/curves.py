"""The curves of learning-rate schedules: what settings each shape takes, and its formula.

`lr_schedule.py` is what a user writes; here a schedule's settings are a dictionary with every duration in steps.
A new shape is an entry of `SHAPES` and a public function in `lr_schedule.py`.
Where a curve differs from torch's or transformers' of that name: docs/decisions/0007.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.config.durations import NEVER
from surefoot.errors import ConfigError

Factors = Callable[[int], float]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fall:
    """What a shape's formula is made of: the settings, durations in steps, and where in the run it falls."""

    settings: Settings
    steps: int

    @property
    def warmup(self) -> int:
        return int(self.settings["warmup"])

    @property
    def floor(self) -> float:
        return float(self.settings.get("floor", 0.0))

    @property
    def last(self) -> int:
        """The step at which the floor is reached."""
        return self.steps - 1 if self.floor > 0.0 else self.steps

    def along(self, rest: Factors) -> Factors:
        """The factor where `rest`, from 1 down to 0, is of the way to the floor."""
        floor, span = self.floor, 1.0 - self.floor
        return lambda step: floor + span * rest(step)

    def left(self) -> Factors:
        """What is left of the fall, from 1 at the end of warm-up to 0, which keeps its digits near 0."""
        last, falling = self.last, self.last - self.warmup  # 0 where the peak has the last step for itself
        return lambda step: (last - step) / falling


@dataclass(frozen=True)
class Shape:
    """The shape of a schedule; an entry of `SHAPES`."""

    takes: Settings  # its settings, and what they are where absent
    fall: Callable[[Fall], Factors]  # the factor after the step where warm-up ends
    # How many steps from the first on have the same factors in every longer run; `NEVER` where all have
    shared: Callable[[Fall], int] = lambda fall: fall.warmup + 1
    # The setting that can make the last factors too small for a number, and what to type then
    steep: tuple[str, str] | None = None

    @property
    def own_rise(self) -> bool:
        """Whether its rise is a part of the shape, and no warm-up like the others'."""
        return "start" in self.takes


_QUARTER = 0.5 * math.pi  # of a turn: sin(_QUARTER * x) ** 2 is (1 - cos(pi * x)) / 2 without the cancellation near 0


def curve(shape: Shape, at: Fall) -> Factors:
    """The factor as a function of the step; `ConfigError` where it underflows to 0."""
    warmup, floor, last = at.warmup, at.floor, at.last if "floor" in at.settings else NEVER
    rise, fall = _rise(at), shape.fall(at)

    def factor(step: int) -> float:
        if step < warmup:
            return rise(step)
        if step == warmup:
            return 1.0
        if step >= last:
            return floor
        return fall(step)

    if shape.steep is not None and factor(at.steps - 1) == 0.0:
        name, cure = shape.steep
        raise ConfigError(
            f"schedule.{name} = {at.settings[name]!r}: the last rates would be too small for a number, and so 0\n"
            f"  try: {cure}, or another {name}"
        )
    return factor


def _rise(at: Fall) -> Factors:
    warmup = at.warmup
    if "start" not in at.settings:
        return lambda step: (step + 1) / (warmup + 1)
    start = at.settings["start"]
    return lambda step: start + (1.0 - start) * math.sin(_QUARTER * step / warmup) ** 2


def _polynomial(at: Fall) -> Factors:
    left, power = at.left(), at.settings["power"]
    return at.along(lambda step: left(step) ** power)


def _cosine(at: Fall) -> Factors:
    last, falling = at.last, at.last - at.warmup
    return at.along(lambda step: math.sin(_QUARTER * (last - step) / falling) ** 2)


def _exponential(at: Fall) -> Factors:
    floor, warmup, falling = at.floor, at.warmup, at.last - at.warmup
    return lambda step: floor ** ((step - warmup) / falling)


def _inverse_sqrt(at: Fall) -> Factors:
    warmup, scale = at.warmup, max(at.warmup, 1)
    return lambda step: math.sqrt(scale / (step - warmup + scale))


def _steps(at: Fall) -> Factors:
    drops, drop_factor = at.settings["drops"], at.settings["drop_factor"]
    return lambda step: drop_factor ** bisect_right(drops, step)


def _stable_decay(at: Fall) -> Factors:
    last, cooldown = at.last, int(at.settings["cooldown"])

    def one_minus_sqrt(step: int) -> float:
        left = (last - step) / cooldown
        return left / (1.0 + math.sqrt(1.0 - left))  # is 1 - sqrt(1 - left), without the cancellation near 0

    fall = at.along(one_minus_sqrt)
    return lambda step: 1.0 if step <= last - cooldown else fall(step)


def _restarts(at: Fall) -> Factors:
    starts, floor, span = _cycle_starts(at), at.floor, 1.0 - at.floor
    # a cycle reaches its floor as a run does: on its last step, or one later
    lasts = [*(start - (at.steps - at.last) for start in starts[1:]), at.last]

    def factor(step: int) -> float:
        cycle = bisect_right(starts, step) - 1
        start, last = starts[cycle], lasts[cycle]
        return 1.0 if step == start else floor + span * math.sin(_QUARTER * (last - step) / (last - start)) ** 2

    return factor


def _cycle_starts(at: Fall) -> list[int]:
    size, growth = float(at.settings["cycle"]), float(at.settings["cycle_growth"])
    starts = [at.warmup]
    while True:
        following = starts[-1] + round(size)
        size *= growth
        if 2 * (at.steps - following) < size:  # less than half of the next cycle is left: the one before takes it
            return starts
        starts.append(following)


# All shapes, by the name that a flag gives them
SHAPES: dict[str, Shape] = {
    "constant": Shape({"warmup": 0}, lambda _: lambda _: 1.0, lambda _: NEVER),
    "linear": Shape({"warmup": 0, "floor": 0.0}, lambda at: at.along(at.left())),
    "cosine": Shape({"warmup": 0, "floor": 0.0}, _cosine),
    "polynomial": Shape(
        {"warmup": 0, "floor": 0.0, "power": 1.0}, _polynomial, steep=("power", "--schedule.floor 0.01")
    ),
    "inverse-sqrt": Shape({"warmup": "5%"}, _inverse_sqrt, lambda _: NEVER),
    "step": Shape(
        {"warmup": 0, "drops": ("50%", "75%"), "drop_factor": 0.1},
        _steps,
        lambda _: NEVER,
        steep=("drop_factor", "fewer drops"),
    ),
    "exponential": Shape({"warmup": 0, "floor": 0.01}, _exponential),
    "one-cycle": Shape({"warmup": "30%", "floor": 0.0, "start": 1 / 25}, _cosine),
    "wsd": Shape(
        {"warmup": 0, "floor": 0.0, "cooldown": "20%"},
        _stable_decay,
        lambda at: at.last - int(at.settings["cooldown"]) + 1,
    ),
    "restarts": Shape(
        {"warmup": 0, "floor": 0.0, "cycle": "25%", "cycle_growth": 1.0},
        _restarts,
        lambda at: _cycle_starts(at)[-1] + 1,
    ),
}
