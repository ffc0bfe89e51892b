"""What is wrong with the settings of a schedule: foreign ones, values out of range, durations that do not fit in a run."""

import math
from collections.abc import Callable
from itertools import pairwise

from surefoot.config.durations import Length, in_steps
from surefoot.errors import ConfigError
from surefoot.schedules.curves import SHAPES, Fall, Settings

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


def refuse_foreign_or_out_of_range(shape: str, given: Settings) -> None:
    """Raise `ConfigError` where a setting is not one of the shape's, or no number that it can have."""
    if shape not in SHAPES:
        raise ConfigError(f"schedule.name = {shape!r} is unknown; one of: {', '.join(SHAPES)}")
    takes = SHAPES[shape].takes
    for name, value in given.items():
        if name not in takes and not (name == "floor" and value == 0.0):
            raise ConfigError(
                f"schedule.{name} = {value!r} means nothing to schedule.name {shape}, which takes {', '.join(takes)}\n"
                f"  leave it out, or choose --schedule.name {' or '.join(other for other in SHAPES if name in SHAPES[other].takes)}"
            )
        if name in _RANGES and not _RANGES[name][0](value):
            raise ConfigError(f"schedule.{name} = {value!r}: needed is {_RANGES[name][1]}")
    if shape == "exponential" and given.get("floor") == 0.0:
        raise ConfigError("schedule.floor = 0: an exponential never gets there\n  try: --schedule.floor 0.01")
    drops = given.get("drops", ("50%",))
    if not isinstance(drops, tuple) or not drops:
        raise ConfigError(f"schedule.drops = {drops!r}: needed is a tuple of durations, as ('50%', '75%')")


def in_a_run(shape: str, given: Settings, length: Length) -> Fall:
    """All settings of a shape, defaults filled in and durations in steps; `ConfigError` where they do not fit the run."""
    takes = SHAPES[shape].takes
    written: Settings = {**takes, **{name: value for name, value in given.items() if name in takes}}
    settings = dict(written)
    for name in ("warmup", "cooldown", "cycle"):
        if name in settings:
            settings[name] = in_steps(written[name], length=length, setting=f"schedule.{name}")
    if "drops" in settings:
        settings["drops"] = tuple(in_steps(drop, length=length, setting="schedule.drops") for drop in written["drops"])
    fall = Fall(settings, length.steps)
    _refuse_what_does_not_fit(fall, written)
    return fall


def shown(steps: int, written: str | int) -> str:
    """A duration in steps, and as it was written where that says more.

    >>> shown(5, "10%"), shown(5, 5)
    ('5 steps (10%)', '5 steps')
    """
    return f"{steps} steps" if isinstance(written, int) else f"{steps} steps ({written})"


def _refuse_what_does_not_fit(fall: Fall, written: Settings) -> None:
    settings, steps, warmup = fall.settings, fall.steps, fall.warmup
    if warmup >= steps:
        raise ConfigError(
            f"schedule.warmup = {shown(warmup, written['warmup'])} does not fit in a run of {steps} steps:"
            " the full rate would never be reached\n"
            f"  try: --schedule.warmup 5%, or --length '{10 * warmup} steps'"
        )
    if "cooldown" in settings:
        cooldown, room = settings["cooldown"], fall.last - warmup
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
