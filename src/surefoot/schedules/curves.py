"""The curves of learning-rate schedules: each shape's settings, what it refuses, and its formula.

A new shape is an entry of `SHAPES` and a public function in `lr_schedule.py`, which is what a user writes.
Where a curve differs from torch's or transformers' of that name: docs/decisions/0007.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from surefoot.config.durations import NEVER, Length, in_steps
from surefoot.errors import ConfigError

Factors = Callable[[int], float]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Fall:
    """The settings of a shape, with durations in steps, and where in the run it falls."""

    settings: Settings
    steps: int

    @property
    def warmup(self) -> int:
        return int(self.settings["warmup"])

    @property
    def min_lr_ratio(self) -> float:
        return float(self.settings.get("min_lr_ratio", 0.0))

    @property
    def last(self) -> int:
        """The step at which the floor is reached."""
        return self.steps - 1 if self.min_lr_ratio > 0.0 else self.steps

    def along(self, rest: Factors) -> Factors:
        """The factor if `rest`, from 1 down to 0, is left of the way to the floor."""
        min_lr_ratio, span = self.min_lr_ratio, 1.0 - self.min_lr_ratio
        return lambda step: min_lr_ratio + span * rest(step)

    def left(self) -> Factors:
        """The part of the fall that is left, from 1 at the end of warm-up to 0, which keeps its digits near 0."""
        last, falling = self.last, self.last - self.warmup  # 0 if the peak has the last step for itself
        return lambda step: (last - step) / falling


@dataclass(frozen=True)
class Shape:
    """The shape of a schedule, by the name that a flag gives it: an entry of `SHAPES`."""

    takes: Settings  # its settings and their defaults
    fall: Callable[[Fall], Factors]  # the factor after the step where warm-up ends
    # How many steps from the first on have the same factors in every longer run; `NEVER` if all have
    shared: Callable[[Fall], int] = lambda fall: fall.warmup + 1
    # The setting that can make the last factors too small for a number, and what to type then
    steep: tuple[str, str] | None = None

    @property
    def own_rise(self) -> bool:
        """Whether its rise is part of the shape, not a warm-up like the others'."""
        return "start_lr_ratio" in self.takes


_QUARTER = 0.5 * math.pi  # of a turn: sin(_QUARTER * x) ** 2 is (1 - cos(pi * x)) / 2 without the cancellation near 0


def curve(shape: Shape, at: Fall) -> Factors:
    """The factor as a function of the step; `ConfigError` where it underflows to 0."""
    warmup, min_lr_ratio, fall = at.warmup, at.min_lr_ratio, shape.fall(at)
    start: float | None = at.settings.get("start_lr_ratio")
    last = at.last if "min_lr_ratio" in at.settings else NEVER

    def factor(step: int) -> float:
        if step < warmup and start is not None:
            return start + (1.0 - start) * math.sin(_QUARTER * step / warmup) ** 2
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step == warmup:
            return 1.0
        return min_lr_ratio if step >= last else fall(step)

    if shape.steep is not None and factor(at.steps - 1) == 0.0:
        name, cure = shape.steep
        raise ConfigError(
            f"schedule.{name} = {at.settings[name]!r}: the last rates would be too small for a number, and so 0\n"
            f"  try: {cure}, or another {name}"
        )
    return factor


def _polynomial(at: Fall) -> Factors:
    left, power = at.left(), at.settings["power"]
    return at.along(lambda step: left(step) ** power)


def _cosine(at: Fall) -> Factors:
    last, falling = at.last, at.last - at.warmup
    return at.along(lambda step: math.sin(_QUARTER * (last - step) / falling) ** 2)


def _exponential(at: Fall) -> Factors:
    min_lr_ratio, warmup, falling = at.min_lr_ratio, at.warmup, at.last - at.warmup
    return lambda step: min_lr_ratio ** ((step - warmup) / falling)


def _inverse_sqrt(at: Fall) -> Factors:
    warmup, scale = at.warmup, max(at.warmup, 1)
    return lambda step: math.sqrt(scale / (step - warmup + scale))


def _steps(at: Fall) -> Factors:
    milestones, gamma = at.settings["milestones"], at.settings["gamma"]
    return lambda step: gamma ** bisect_right(milestones, step)


def _stable_decay(at: Fall) -> Factors:
    last, cooldown = at.last, int(at.settings["cooldown"])

    def one_minus_sqrt(step: int) -> float:
        left = (last - step) / cooldown
        return left / (1.0 + math.sqrt(1.0 - left))  # is 1 - sqrt(1 - left), without the cancellation near 0

    fall = at.along(one_minus_sqrt)
    return lambda step: 1.0 if step <= last - cooldown else fall(step)


def _restarts(at: Fall) -> Factors:
    starts = _cycle_starts(at)
    # a cycle reaches its floor as a run does: on its last step, or one later
    lasts = [*(start - (at.steps - at.last) for start in starts[1:]), at.last]

    def left(step: int) -> float:
        cycle = bisect_right(starts, step) - 1
        start, last = starts[cycle], lasts[cycle]
        return 1.0 if step == start else math.sin(_QUARTER * (last - step) / (last - start)) ** 2

    return at.along(left)


def _cycle_starts(at: Fall) -> list[int]:
    size, growth = float(at.settings["cycle"]), float(at.settings["cycle_growth"])
    starts = [at.warmup]
    while True:
        following = starts[-1] + round(size)
        size *= growth
        if 2 * (at.steps - following) < size:  # less than half of the next cycle is left: the one before takes it
            return starts
        starts.append(following)


SHAPES: dict[str, Shape] = {
    "constant": Shape({"warmup": 0}, lambda _: lambda _: 1.0, lambda _: NEVER),
    "linear": Shape({"warmup": 0, "min_lr_ratio": 0.0}, lambda at: at.along(at.left())),
    "cosine": Shape({"warmup": 0, "min_lr_ratio": 0.0}, _cosine),
    "polynomial": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "power": 1.0}, _polynomial, steep=("power", "--schedule.min-lr-ratio 0.01")
    ),
    "inverse_sqrt": Shape({"warmup": "5%"}, _inverse_sqrt, lambda _: NEVER),
    "multistep": Shape(
        {"warmup": 0, "milestones": ("50%", "75%"), "gamma": 0.1},
        _steps,
        lambda _: NEVER,
        ("gamma", "fewer drops"),
    ),
    "exponential": Shape({"warmup": 0, "min_lr_ratio": 0.01}, _exponential),
    "one_cycle": Shape({"warmup": "30%", "min_lr_ratio": 0.0, "start_lr_ratio": 1 / 25}, _cosine),
    "wsd": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "cooldown": "20%"},
        _stable_decay,
        lambda at: at.last - int(at.settings["cooldown"]) + 1,
    ),
    "cosine_restarts": Shape(
        {"warmup": 0, "min_lr_ratio": 0.0, "cycle": "25%", "cycle_growth": 1.0},
        _restarts,
        lambda at: _cycle_starts(at)[-1] + 1,
    ),
}

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "min_lr_ratio": (lambda value: 0.0 <= value <= 1.0, "a factor on the learning rate from 0 to 1"),
    "power": (lambda value: 0.0 < value < math.inf, "a number above 0; 1 is a straight line"),
    "gamma": (lambda value: 0.0 < value < 1.0, "a factor between 0 and 1, as 0.1"),
    "start_lr_ratio": (
        lambda value: 0.0 < value < 1.0,
        "a factor between 0 and 1, as 0.04; at 0 the first step would be wasted",
    ),
    "cycle_growth": (lambda value: 1.0 <= value < math.inf, "1 (cycles of one length) or more; 2 doubles each"),
}


def refuse_foreign_or_out_of_range(shape: str, given: Settings) -> None:
    """Raise `ConfigError` if a setting is not one of the shape's, or out of its range."""
    if shape not in SHAPES:
        raise ConfigError(f"schedule.name = {shape!r} is unknown; one of: {', '.join(SHAPES)}")
    takes = SHAPES[shape].takes
    for name, value in given.items():
        if name not in takes and not (name == "min_lr_ratio" and value == 0.0):
            raise ConfigError(
                f"schedule.{name} = {value!r} means nothing to schedule.name {shape}, which takes {', '.join(takes)}\n"
                f"  leave it out, or choose --schedule.name {' or '.join(other for other in SHAPES if name in SHAPES[other].takes)}"
            )
        if name in _RANGES and not _RANGES[name][0](value):
            raise ConfigError(f"schedule.{name} = {value!r}: needed is {_RANGES[name][1]}")
    if shape == "exponential" and given.get("min_lr_ratio") == 0.0:
        raise ConfigError(
            "schedule.min_lr_ratio = 0: an exponential never gets there\n  try: --schedule.min-lr-ratio 0.01"
        )
    milestones = given.get("milestones", ("50%",))
    if not isinstance(milestones, tuple) or not milestones:
        raise ConfigError(f"schedule.milestones = {milestones!r}: needed is a tuple of durations, as ('50%', '75%')")


def in_a_run(shape: str, given: Settings, length: Length) -> Fall:
    """All settings of a shape, defaults filled in and durations in steps; `ConfigError` where they do not fit the run."""
    written = {name: given.get(name, default) for name, default in SHAPES[shape].takes.items()}
    durations = [name for name in ("warmup", "cooldown", "cycle") if name in written]
    settings = written | {
        name: in_steps(written[name], length=length, setting=f"schedule.{name}") for name in durations
    }
    if "milestones" in settings:
        settings["milestones"] = tuple(
            in_steps(drop, length=length, setting="schedule.milestones") for drop in written["milestones"]
        )
    fall = Fall(settings, length.steps)
    steps, warmup = fall.steps, fall.warmup
    if warmup >= steps:
        raise ConfigError(
            f"schedule.warmup = {shown(warmup, written['warmup'])} does not fit in a run of {steps} steps:"
            " the full rate would never be reached\n"
            f"  try: --schedule.warmup 5%, or --length '{10 * warmup} steps'"
        )
    if "cooldown" in settings:
        cooldown, room = settings["cooldown"], fall.last - warmup
        if cooldown > room or (cooldown == 0 and settings["min_lr_ratio"] > 0.0):
            raise ConfigError(
                f"schedule.cooldown = {shown(cooldown, written['cooldown'])} does not fit in a run of {steps} steps:"
                f" the floor must be reached, and after warm-up {room} are left for it\n"
                "  try: --schedule.cooldown 20%, or a longer --length"
            )
    if settings.get("cycle") == 0:
        raise ConfigError(f"schedule.cycle = {shown(0, written['cycle'])} is no step at all\n  try: a longer cycle")
    if any(later <= earlier for earlier, later in pairwise((warmup, *settings.get("milestones", ()), steps))):
        milestones = ", ".join(
            shown(at, text) for at, text in zip(settings["milestones"], written["milestones"], strict=True)
        )
        raise ConfigError(
            f"schedule.milestones = {milestones} in a run of {steps} steps with a warm-up of {warmup}:"
            " each must come after the one before, after warm-up and before the end\n"
            "  try: --schedule.milestones 50% 75%"
        )
    return fall


def shown(steps: int, written: str | int) -> str:
    """A duration in steps, and as it was written if that says more.

    >>> shown(5, "10%"), shown(5, 5)
    ('5 steps (10%)', '5 steps')
    """
    return f"{steps} steps" if isinstance(written, int) else f"{steps} steps ({written})"
