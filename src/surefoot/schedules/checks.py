"""Validation of schedule settings, and conversion of their durations into steps."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

from surefoot.config.durations import NEVER, Length, every, in_steps
from surefoot.config.tree import did_you_mean
from surefoot.errors import ConfigError, Setting, out_of_range
from surefoot.schedules.curves import SHAPES, Fall, Settings

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_lr_ratio": (
        lambda value: 0.0 <= value <= 1.0,
        "a factor on the learning rate from 0 to 1",
    ),
    "power": (lambda value: 0.0 < value < math.inf, "a number above 0; 1 gives a straight line"),
    "gamma": (lambda value: 0.0 < value < 1.0, "a factor between 0 and 1, such as 0.1"),
    "start_lr_ratio": (
        lambda value: 0.0 < value < 1.0,
        "a factor between 0 and 1, such as 0.04; at 0 the first step would be wasted",
    ),
    "rise_shape": (lambda value: value in ("cosine", "linear"), "'cosine' or 'linear'"),
    "cooldown_shape": (lambda value: value in ("1-sqrt", "linear"), "'1-sqrt' or 'linear'"),
    "momentum_range": (
        lambda value: len(value) == 2 and 0.0 <= value[0] <= value[1] < 1.0,
        "the lowest and the highest momentum, such as (0.85, 0.95)",
    ),
    "cycle_growth": (
        lambda value: 1.0 <= value < math.inf,
        "1 (cycles of equal length) or more; 2 doubles each cycle",
    ),
}


def check_shape(shape: str) -> None:
    """Raise `ConfigError` for a name of no schedule."""
    if shape in SHAPES:
        return
    raise ConfigError(
        "schedule-unknown",
        problem=f"schedule.name = {shape!r} is unknown",
        remedy=did_you_mean(shape, SHAPES, otherwise=f"choose from {', '.join(SHAPES)}"),
        setting="schedule.name",
        value=shape,
    )


def refuse_foreign_or_out_of_range(shape: str, settings: Settings) -> None:
    """Raise `ConfigError` if a setting belongs to another shape, or if a value is out of range."""
    check_shape(shape)
    takes = SHAPES[shape].takes
    for name, value in settings.items():
        if name not in takes and not (name == "min_lr_ratio" and value == 0.0):
            others = [other for other in SHAPES if name in SHAPES[other].takes]
            raise ConfigError(
                "schedule-setting-foreign",
                problem=f"schedule.{name} = {value!r} has no effect with schedule.name {shape},"
                f" which takes {', '.join(takes)}",
                remedy=["leave it out", *(Setting("schedule.name", other) for other in others)],
                setting=f"schedule.{name}",
                value=value,
            )
        if name in _RANGES:
            is_in_range, meaning = _RANGES[name]
            if not is_in_range(value):
                raise out_of_range(f"schedule.{name}", value, meaning)
    if shape == "exponential" and settings.get("min_lr_ratio") == 0.0:
        raise ConfigError(
            "schedule-never-zero",
            problem="schedule.min_lr_ratio = 0: an exponential decay never reaches 0",
            remedy=Setting("schedule.min_lr_ratio", 0.01),
            setting="schedule.min_lr_ratio",
            value=0.0,
        )
    milestones = settings.get("milestones", ("50%",))
    is_malformed = not isinstance(milestones, tuple) or not milestones
    if not is_malformed and len(milestones) > 1:
        is_malformed = any(str(milestone).startswith("every ") for milestone in milestones)
    if is_malformed:
        raise ConfigError(
            "schedule-milestones-malformed",
            problem=f"schedule.milestones = {milestones!r} must be a tuple of durations,"
            " such as ('50%', '75%'), or 'every 10 epochs' alone",
            setting="schedule.milestones",
            value=milestones,
        )


def in_a_run(shape: str, explicit: Settings, length: Length) -> Fall:
    """Fill in a shape's defaults and convert durations into steps; raise `ConfigError` if the
    durations do not fit into the run.
    """
    written = {name: explicit.get(name, default) for name, default in SHAPES[shape].takes.items()}
    settings = dict(written)
    for name in ("warmup", "cooldown", "cycle"):
        if name in written:
            settings[name] = in_steps(written[name], length=length, setting=f"schedule.{name}")
    drops: tuple[int, ...] = ()
    period = None
    if "milestones" in settings:
        settings["milestones"], drops, period = _milestones(written["milestones"], length)
    fall = Fall(settings, length.steps, period)
    steps = fall.steps
    warmup = fall.warmup
    if warmup >= steps:
        if length.in_epochs:
            longer_samples = 10 * warmup * length.batch_size
            longer = f"{math.ceil(Fraction(longer_samples, length.samples_per_epoch))} epochs"
        else:
            longer = f"{10 * warmup} steps"
        warmup_text = as_text(warmup, written["warmup"])
        raise ConfigError(
            "schedule-warmup-too-long",
            problem=f"schedule.warmup = {warmup_text} does not fit in a run of {steps} steps",
            reason="the full learning rate would never be reached",
            remedy=[Setting("schedule.warmup", "5%"), Setting("length", longer)],
            setting="schedule.warmup",
            value=written["warmup"],
            warmup_steps=warmup,
            steps=steps,
        )
    if "cooldown" in settings:
        cooldown = settings["cooldown"]
        available = fall.last - warmup
        never_falls = cooldown == 0 and settings["min_lr_ratio"] > 0.0
        if cooldown > available or never_falls:
            cooldown_text = as_text(cooldown, written["cooldown"])
            raise ConfigError(
                "schedule-cooldown-too-long",
                problem=f"schedule.cooldown = {cooldown_text} does not fit in a run of {steps} steps",
                reason=f"it must reach min_lr_ratio within the {available} steps after warm-up",
                remedy=[Setting("schedule.cooldown", "20%"), ("a longer", Setting("length"))],
                setting="schedule.cooldown",
                value=written["cooldown"],
                cooldown_steps=cooldown,
                available_steps=available,
                steps=steps,
            )
    if settings.get("cycle") == 0:
        raise ConfigError(
            "schedule-cycle-too-short",
            problem=f"schedule.cycle = {as_text(0, written['cycle'])} is shorter than 1 step",
            remedy=("a longer", Setting("schedule.cycle")),
            setting="schedule.cycle",
            value=written["cycle"],
        )
    if any(later <= earlier for earlier, later in pairwise((warmup, *drops, steps))):
        milestones = ", ".join(map(as_text, drops, written["milestones"]))
        raise ConfigError(
            "schedule-milestones-out-of-order",
            problem=f"schedule.milestones = {milestones} in a run of {steps} steps"
            f" with a warm-up of {warmup}",
            reason="each must be later than the previous one, after warm-up and before the end",
            remedy=Setting("schedule.milestones", ("50%", "75%")),
            setting="schedule.milestones",
            value=written["milestones"],
            milestone_steps=drops,
            warmup_steps=warmup,
            steps=steps,
        )
    return fall


def _milestones(
    written: tuple[str | int, ...], length: Length
) -> tuple[tuple[str | int, ...], tuple[int, ...], Fraction | None]:
    """Return the resolved milestones, their steps (of recurring ones the first), and the period of
    recurring ones.
    """
    setting = "schedule.milestones"
    first = str(written[0])
    if not first.startswith("every "):
        steps = tuple(in_steps(milestone, length=length, setting=setting) for milestone in written)
        return steps, steps, None
    text = first.removeprefix("every ")
    if text.rstrip().endswith("%"):  # fixed in steps, so that a longer run keeps its milestones
        text = f"{in_steps(text, length=length, setting=setting)} steps"
    period = Fraction(*(every(text, length=length, setting=setting).period or (NEVER, 1)))
    return (f"every {text}",), (math.ceil(period),), period


def as_text(steps: int, written: str | int) -> str:
    """Format a duration in steps, followed by the user's text unless the user typed a number of
    steps.

    >>> as_text(5, "10%"), as_text(5, "5 steps")
    ('5 steps (10%)', '5 steps')
    """
    if written in (steps, f"{steps} steps"):
        return f"{steps} steps"
    return f"{steps} steps ({written})"
