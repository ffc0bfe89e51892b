"""The curves of learning-rate schedules: what settings each shape takes, whether they fit a run, and its formula.

`lr_schedule.py` is what a user writes; here a schedule's settings are a dictionary with every duration in steps.
Where a curve differs from torch's or transformers' of that name: docs/decisions/0007.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

from surefoot.durations import NEVER, Length, in_steps
from surefoot.errors import ConfigError

Factors = Callable[[int], float]
Settings = Mapping[str, Any]
Shape = Literal[
    "constant",
    "linear",
    "cosine",
    "polynomial",
    "inverse-sqrt",
    "step",
    "exponential",
    "one-cycle",
    "wsd",
    "restarts",
]

TAKES: dict[str, Settings] = {  # the settings of each shape, and what they are where absent
    "constant": {"warmup": 0},
    "linear": {"warmup": 0, "floor": 0.0},
    "cosine": {"warmup": 0, "floor": 0.0},
    "polynomial": {"warmup": 0, "floor": 0.0, "power": 1.0},
    "inverse-sqrt": {"warmup": "5%"},
    "step": {"warmup": 0, "drops": ("50%", "75%"), "drop_factor": 0.1},
    "exponential": {"warmup": 0, "floor": 0.01},
    "one-cycle": {"warmup": "30%", "floor": 0.0, "start": 1 / 25},
    "wsd": {"warmup": 0, "floor": 0.0, "cooldown": "20%"},
    "restarts": {"warmup": 0, "floor": 0.0, "cycle": "25%", "cycle_growth": 1.0},
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "floor": (lambda value: 0.0 <= value <= 1.0, "a factor on the learning rate from 0 to 1"),
    "power": (lambda value: 0.0 < value < math.inf, "a number above 0; 1 is a straight line"),
    "drop_factor": (lambda value: 0.0 < value < 1.0, "a factor between 0 and 1, as 0.1"),
    "start": (
        lambda value: 0.0 < value < 1.0,
        "a factor between 0 and 1, as 0.04; at 0 the first step would be wasted",
    ),
    "cycle_growth": (lambda value: 1.0 <= value < math.inf, "1 (cycles of one length) or more; 2 doubles each"),
}
_QUARTER = 0.5 * math.pi  # of a turn: sin(_QUARTER * x) ** 2 is (1 - cos(pi * x)) / 2 without the cancellation near 0


def refuse_foreign_or_out_of_range(shape: str, given: Settings) -> None:
    """Raise `ConfigError` where a setting is not one of the shape's, or no number that it can have."""
    if shape not in TAKES:
        raise ConfigError(f"schedule.name = {shape!r} is unknown; one of: {', '.join(TAKES)}")
    for name, value in given.items():
        if name not in TAKES[shape] and not (name == "floor" and value == 0.0):
            raise ConfigError(
                f"schedule.{name} = {value!r} means nothing to schedule.name {shape}, which takes {', '.join(TAKES[shape])}\n"
                f"  leave it out, or choose --schedule.name {' or '.join(other for other in TAKES if name in TAKES[other])}"
            )
        if name in _RANGES and not _RANGES[name][0](value):
            raise ConfigError(f"schedule.{name} = {value!r}: needed is {_RANGES[name][1]}")
    if shape == "exponential" and given.get("floor") == 0.0:
        raise ConfigError("schedule.floor = 0: an exponential never gets there\n  try: --schedule.floor 0.01")
    drops = given.get("drops", ("50%",))
    if not isinstance(drops, tuple) or not drops:
        raise ConfigError(f"schedule.drops = {drops!r}: needed is a tuple of durations, as ('50%', '75%')")


def in_a_run(shape: Shape, given: Settings, length: Length) -> dict[str, Any]:
    """All settings of a shape, defaults filled in and durations in steps; `ConfigError` where they do not fit the run."""
    written = {**TAKES[shape], **{name: value for name, value in given.items() if name in TAKES[shape]}}
    settings = dict(written)
    for name in ("warmup", "cooldown", "cycle"):
        if name in settings:
            settings[name] = in_steps(written[name], length=length, setting=f"schedule.{name}")
    if "drops" in settings:
        settings["drops"] = tuple(in_steps(drop, length=length, setting="schedule.drops") for drop in written["drops"])
    _refuse_what_does_not_fit(settings, written, length.steps)
    return settings


def curve(shape: Shape, settings: Settings, steps: int) -> Factors:
    """The factor as a function of the step, for settings from `in_a_run`; `ConfigError` where it underflows to 0."""
    warmup: int = settings["warmup"]
    floor = float(settings.get("floor", 0.0))
    last = _last(settings, steps) if "floor" in settings else NEVER
    rise, fall = _rise(settings), _fall(shape, settings, steps)

    def factor(step: int) -> float:
        if step < warmup:
            return rise(step)
        if step == warmup:
            return 1.0
        if step >= last:
            return floor
        return fall(step)

    if factor(steps - 1) == 0.0:
        steep = "drop_factor" if shape == "step" else "power"
        raise ConfigError(
            f"schedule.{steep} = {settings[steep]!r}: the last rates would be too small for a number, and so 0\n"
            f"  try: {'fewer drops' if shape == 'step' else '--schedule.floor 0.01'}, or another {steep}"
        )
    return factor


def shared_steps(shape: Shape, settings: Settings, steps: int) -> int:
    """How many steps from the first on have the same factors in every longer run; `NEVER` where all have."""
    match shape:
        case "constant" | "inverse-sqrt" | "step":
            return NEVER
        case "wsd":
            return _last(settings, steps) - int(settings["cooldown"]) + 1
        case "restarts":
            return _cycle_starts(settings, steps)[-1] + 1
        case _:
            return int(settings["warmup"]) + 1


def shown(steps: int, written: str | int) -> str:
    """A duration in steps, and as it was written where that says more.

    >>> shown(5, "10%"), shown(5, 5)
    ('5 steps (10%)', '5 steps')
    """
    return f"{steps} steps" if isinstance(written, int) else f"{steps} steps ({written})"


def _rise(settings: Settings) -> Factors:
    warmup = settings["warmup"]
    if "start" not in settings:
        return lambda step: (step + 1) / (warmup + 1)
    start = settings["start"]
    return lambda step: start + (1.0 - start) * math.sin(_QUARTER * step / warmup) ** 2


def _fall(shape: Shape, settings: Settings, steps: int) -> Factors:
    """The factor after the step where warm-up ends; from what is *left* of the fall, which keeps its digits near 0."""
    warmup, floor = settings["warmup"], float(settings.get("floor", 0.0))
    last, span = _last(settings, steps), 1.0 - floor
    falling = last - warmup  # 0 where the peak has the last step for itself, and nothing falls
    match shape:
        case "constant":
            return lambda _: 1.0
        case "linear":
            return lambda step: floor + span * ((last - step) / falling)
        case "polynomial":
            power = settings["power"]
            return lambda step: floor + span * ((last - step) / falling) ** power
        case "cosine" | "one-cycle":
            return lambda step: floor + span * math.sin(_QUARTER * (last - step) / falling) ** 2
        case "exponential":
            return lambda step: floor ** ((step - warmup) / falling)
        case "inverse-sqrt":
            scale = max(warmup, 1)
            return lambda step: math.sqrt(scale / (step - warmup + scale))
        case "step":
            drops, drop_factor = settings["drops"], settings["drop_factor"]
            return lambda step: drop_factor ** bisect_right(drops, step)
        case "wsd":
            cooldown, begin = settings["cooldown"], last - settings["cooldown"]
            return lambda step: 1.0 if step <= begin else floor + span * _one_minus_sqrt((last - step) / cooldown)
        case "restarts":
            return _cycles(_cycle_starts(settings, steps), steps, floor)


def _one_minus_sqrt(left: float) -> float:
    return left / (1.0 + math.sqrt(1.0 - left))  # is 1 - sqrt(1 - left), without the cancellation near 0


def _cycles(starts: list[int], steps: int, floor: float) -> Factors:
    before_end = 1 if floor > 0.0 else 0  # a cycle reaches its floor as a run does: on its last step, or one later
    lasts = [end - before_end for end in (*starts[1:], steps)]
    span = 1.0 - floor

    def factor(step: int) -> float:
        cycle = bisect_right(starts, step) - 1
        start, last = starts[cycle], lasts[cycle]
        return 1.0 if step == start else floor + span * math.sin(_QUARTER * (last - step) / (last - start)) ** 2

    return factor


def _cycle_starts(settings: Settings, steps: int) -> list[int]:
    size, growth = float(settings["cycle"]), float(settings["cycle_growth"])
    starts = [settings["warmup"]]
    while True:
        following = starts[-1] + round(size)
        size *= growth
        if 2 * (steps - following) < size:  # less than half of the next cycle is left: the one before takes it
            return starts
        starts.append(following)


def _last(settings: Settings, steps: int) -> int:
    """The step at which the floor is reached."""
    return steps - 1 if settings.get("floor", 0.0) > 0.0 else steps


def _refuse_what_does_not_fit(settings: Settings, written: Settings, steps: int) -> None:
    warmup = settings["warmup"]
    if warmup >= steps:
        raise ConfigError(
            f"schedule.warmup = {shown(warmup, written['warmup'])} does not fit in a run of {steps} steps:"
            " the full rate would never be reached\n"
            f"  try: --schedule.warmup 5%, or --length '{10 * warmup} steps'"
        )
    if "cooldown" in settings:
        cooldown, room = settings["cooldown"], _last(settings, steps) - warmup
        if cooldown > room or (cooldown == 0 and settings["floor"] > 0.0):
            raise ConfigError(
                f"schedule.cooldown = {shown(cooldown, written['cooldown'])} does not fit in a run of {steps} steps:"
                f" the floor must be reached, and after warm-up {room} are left for it\n"
                "  try: --schedule.cooldown 20%, or a longer --length"
            )
    if settings.get("cycle") == 0:
        raise ConfigError(f"schedule.cycle = {shown(0, written['cycle'])} is no step at all\n  try: a longer cycle")
    if any(later <= earlier for earlier, later in pairwise((warmup, *settings.get("drops", ()), steps))):
        drops = ", ".join(shown(at, text) for at, text in zip(settings["drops"], written["drops"], strict=True))
        raise ConfigError(
            f"schedule.drops = {drops} in a run of {steps} steps with a warm-up of {warmup}:"
            " each must come after the one before, after warm-up and before the end\n"
            "  try: --schedule.drops 50% 75%"
        )
