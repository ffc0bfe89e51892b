"""Durations as text ("200 steps", "2 epochs", "5%", "90 min"). Only the number of completed steps
decides when a duration is due, so a resumed run acts at the same steps."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal

from surefoot.errors import ConfigError, Setting, out_of_range

NEVER = sys.maxsize
"""A number of steps that no run reaches."""

_Unit = Literal["steps", "epochs", "%", "seconds"]
_CHEAP = 0.01  # fraction of an interval
_EARLY_RECORD = 10  # a step
_MOST_SAMPLES = 1 << 62  # sample positions are 64-bit integers
_FORM = re.compile(
    r"([0-9][0-9_]{0,17}(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*(%|[a-z]+)", re.ASCII | re.IGNORECASE
)
_EXAMPLES: dict[_Unit, str] = {
    "steps": "200 steps",
    "epochs": "30 epochs",
    "%": "5%",
    "seconds": "90 min",
}
_UNITS: dict[str, tuple[_Unit, int]] = {
    **dict.fromkeys(("step", "steps"), ("steps", 1)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1)),
    "%": ("%", 1),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
}


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a run in steps, and the sizes that convert steps to epochs.

    before: the steps of other batch sizes with which the run began, and the samples that they read.
    """

    steps: int
    samples_per_epoch: int
    batch_size: int
    in_epochs: bool = False  # whether the setting is in epochs
    before: tuple[int, int] = (0, 0)

    @property
    def epochs(self) -> float:
        """The number of epochs of the run.

        >>> Length(steps=30, samples_per_epoch=100, batch_size=10).epochs
        3.0
        """
        return self.samples_before(self.steps) / self.samples_per_epoch

    def samples_before(self, step: int) -> int:
        """Return the number of samples that are read before a step of the present batch size.

        >>> Length(30, samples_per_epoch=100, batch_size=20, before=(10, 100)).samples_before(11)
        120
        """
        steps, samples = self.before
        return samples + (step - steps) * self.batch_size

    @property
    def ahead(self) -> Fraction:
        """The steps by which the run would be ahead if all its steps had had `batch_size`.

        >>> Length(30, samples_per_epoch=100, batch_size=20, before=(10, 100)).ahead
        Fraction(-5, 1)
        """
        steps, samples = self.before
        return Fraction(samples, self.batch_size) - steps


@dataclass(frozen=True, slots=True)
class Every:
    """An event that recurs every `period` steps or every `seconds`; never if both are None.

    Each multiple of a fractional period is rounded up to a step separately, so the interval does
    not drift. `seconds_if_cheap` replaces `seconds` while the last event took under 1% of
    `seconds_if_cheap`. `early` is one more step with an event.

    >>> passes = every("1 epochs", length=Length(steps=8, samples_per_epoch=25, batch_size=10))
    >>> [done for done in range(1, 9) if passes.due(done)]
    [3, 5, 8]
    """

    period: tuple[int, int] | None = None  # numerator, denominator
    seconds: float | None = None
    seconds_if_cheap: float | None = None
    early: int | None = None

    def interval_s(self, *, cost_s: float) -> float | None:
        """Return the interval in seconds after an event that took `cost_s` seconds; None if the
        interval is not a time.

        >>> saves = Every(seconds=300.0, seconds_if_cheap=60.0)
        >>> saves.interval_s(cost_s=0.59), saves.interval_s(cost_s=0.6)
        (60.0, 300.0)
        """
        if self.seconds_if_cheap is not None and cost_s < _CHEAP * self.seconds_if_cheap:
            return self.seconds_if_cheap
        return self.seconds

    def due(self, step_done: int) -> bool:
        """Return True if step `step_done`, counted from 1, completes a period."""
        if self.period is None:
            return False
        numerator, denominator = self.period
        ends_period = (
            step_done * denominator // numerator > (step_done - 1) * denominator // numerator
        )
        return ends_period or step_done == self.early

    def count(self, after: int, until: int) -> int:
        """Return the number of periods completed after step `after`, up to and including step
        `until`.

        >>> Every(period=(5, 2)).count(0, 8), Every(period=(5, 2)).count(3, 8), Every().count(0, 8)
        (3, 2, 0)
        """
        if self.period is None:
            return 0
        numerator, denominator = self.period
        return until * denominator // numerator - after * denominator // numerator

    def last(self, step: int) -> int:
        """Return the last step up to `step` that completed a period, or 0.

        >>> Every(period=(5, 2)).last(4), Every(period=(5, 2)).last(5), Every().last(4)
        (3, 5, 0)
        """
        return 0 if self.period is None else self._end(self.count(0, step))

    def next(self, step: int) -> int:
        """Return the first step after `step` that completes a period, or NEVER.

        >>> Every(period=(5, 2)).next(3), Every(period=(5, 2)).next(5), Every().next(4) == NEVER
        (5, 8, True)
        """
        return NEVER if self.period is None else self._end(self.count(0, step) + 1)

    def _end(self, count: int) -> int:
        assert self.period is not None
        numerator, denominator = self.period
        return ceil(Fraction(count * numerator, denominator))

    def described(self) -> str:
        """Return the interval as text: steps, with a fraction if needed, or seconds.

        >>> length = Length(steps=8, samples_per_epoch=25, batch_size=10)
        >>> (
        ...     every("2 steps", length=length).described(),
        ...     every("1 epochs", length=length).described(),
        ... )
        ('2 steps', '5/2 steps')
        """
        if self.period is None:
            return "never" if self.seconds is None else f"{self.seconds:g} s"
        return f"{Fraction(*self.period)} steps"


@dataclass(frozen=True, slots=True)
class EveryEpochs:
    """`Every` in epochs, for the steps after a change of the batch size: they have passed as many
    epochs as the step `ahead` of them in a run that always had the present batch size.

    >>> passes = EveryEpochs((5, 2), ahead=Fraction(1, 2))  # epochs of 2.5 steps
    >>> [done for done in range(8) if passes.due(done)], passes.count(0, 7), passes.next(2)
    ([2, 5, 7], 3, 5)
    """

    period: tuple[int, int]
    ahead: Fraction
    seconds: None = None
    seconds_if_cheap: None = None
    early: None = None

    def interval_s(self, *, cost_s: float) -> None:
        """Return None: the interval is not a time."""

    def due(self, step_done: int) -> bool:
        return self._completed(step_done) > self._completed(step_done - 1)

    def count(self, after: int, until: int) -> int:
        return self._completed(until) - self._completed(after)

    def last(self, step: int) -> int:
        count = self._completed(step)
        return self._end(count) if count > 0 else 0

    def next(self, step: int) -> int:
        return self._end(self._completed(step) + 1)

    def described(self) -> str:
        return f"{Fraction(*self.period)} steps"

    def _completed(self, step: int) -> int:
        if step <= 0:  # `ahead` is of later steps
            return 0
        return max(0, floor((step + self.ahead) / Fraction(*self.period)))

    def _end(self, count: int) -> int:
        return ceil(count * Fraction(*self.period) - self.ahead)


Interval = Every | EveryEpochs


def planned(
    text: str,
    *,
    samples_per_epoch: int,
    batch_size: int,
    before: tuple[int, int] = (0, 0),
    setting: str = "length",
) -> Length:
    """Parse the length of a run, "200 steps" or "30 epochs", rounded up to a step. Raises
    `ConfigError` with the name `setting` if invalid.

    >>> planned("2 epochs", samples_per_epoch=25, batch_size=10).steps
    5
    """
    number, unit = _parsed(text, setting, units=("steps", "epochs"))
    length = Length(0, samples_per_epoch, batch_size, in_epochs=unit == "epochs", before=before)
    exact_steps = _in_steps(number, unit, length)
    if unit == "epochs":
        exact_steps -= length.ahead
    steps = ceil(exact_steps)
    if steps < 1:
        raise out_of_range(setting, text, "one step or more")
    if steps * batch_size > _MOST_SAMPLES:
        raise out_of_range(setting, text, "of samples that a 64-bit integer can count")
    return replace(length, steps=steps)


def in_steps(text: str | int, *, length: Length, setting: str = "duration") -> int:
    """Return the whole steps in "100 steps", "2 epochs" (rounded up) or "5%" of the run (rounded).
    An integer counts steps.

    >>> length = Length(steps=200, samples_per_epoch=100, batch_size=10)
    >>> (
    ...     in_steps("5%", length=length),
    ...     in_steps("2 epochs", length=length),
    ...     in_steps(7, length=length),
    ... )
    (10, 20, 7)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = f"{text} steps"
    number, unit = _parsed(text, setting, units=("steps", "%", "epochs"))
    steps = _in_steps(number, unit, length)
    return floor(steps + Fraction(1, 2)) if unit == "%" else ceil(steps)


def steps_until(text: str, *, length: Length, of: str, setting: str) -> int:
    """Return the finished steps after which a part of a run is over: "200 steps", "3 epochs", or
    "20%" of its length as it is written, `of`.

    Epochs are counted in samples: `length` has the steps of other batch sizes `before`. So are
    percentages of a length in epochs: 20% of 30 epochs are 6 epochs. Epochs are rounded up to a
    step, percentages to the nearest one.

    >>> length = Length(steps=75, samples_per_epoch=100, batch_size=20, before=(50, 500))
    >>> (
    ...     steps_until("5 epochs", length=length, of="10 epochs", setting="clip"),
    ...     steps_until("90%", length=length, of="10 epochs", setting="clip"),
    ... )
    (50, 70)
    """
    number, unit = _parsed(text, setting, units=("steps", "%", "epochs"))
    is_fraction = unit == "%"
    if is_fraction:
        whole, unit = _parsed(of, "length", units=("steps", "epochs"))
        number = whole * number / 100
    steps = _in_steps(number, unit, length)
    if unit == "epochs":
        steps -= length.ahead
    return floor(steps + Fraction(1, 2)) if is_fraction else ceil(steps)


def every(
    text: str | None, *, length: Length, time: bool = False, setting: str = "interval"
) -> Interval:
    """Parse an interval: "50 steps", "2 epochs", "5%" of the run, and "9 min" with `time`. If
    `text` is None, the event never recurs.

    >>> length = Length(steps=200, samples_per_epoch=100, batch_size=10)
    >>> every("5%", length=length).described(), every("2 h", length=length, time=True).seconds
    ('10 steps', 7200.0)
    """
    if text is None:
        return Every()
    units: list[_Unit] = ["steps", "epochs", "%"]
    if time:
        units.append("seconds")
    number, unit = _parsed(text, setting, units=units)
    if number == 0:
        raise out_of_range(setting, text, "above 0")
    if unit == "seconds":
        return Every(seconds=float(number))
    period = _in_steps(number, unit, length).as_integer_ratio()
    if unit == "epochs":
        return _every_epochs(period, length)
    return Every(period=period)


def _every_epochs(period: tuple[int, int], length: Length, *, early: int | None = None) -> Interval:
    ahead = length.ahead
    return EveryEpochs(period, ahead) if ahead else Every(period=period, early=early)


def log_interval(text: str, *, length: Length, setting: str = "log_every") -> Interval:
    """Return the interval of records; "auto" is every 50 steps, or 5% of the run if that is
    shorter.

    If the run's length is in epochs, "auto" is shortened so that every epoch ends with a record.
    "auto" adds a record after step 10, so that a run with slow steps soon shows a loss.

    >>> log_interval(
    ...     "auto", length=Length(steps=200, samples_per_epoch=100, batch_size=10)
    ... ).described()
    '10 steps'
    >>> log_interval(
    ...     "auto", length=Length(3000, samples_per_epoch=1100, batch_size=10, in_epochs=True)
    ... ).described()
    '110/3 steps'
    """
    if text != "auto":
        return every(text, length=length, setting=setting)
    period = max(Fraction(1), min(Fraction(50), Fraction(length.steps, 20)))
    if length.in_epochs:
        epoch = Fraction(length.samples_per_epoch, length.batch_size)
        if epoch > period:
            records_per_epoch = ceil(epoch / period)
            period = epoch / records_per_epoch
        else:
            epochs_per_record = period // epoch
            period = epoch * epochs_per_record
    early = _EARLY_RECORD if period > _EARLY_RECORD else None
    if length.in_epochs:
        return _every_epochs(period.as_integer_ratio(), length, early=early)
    return Every(period=period.as_integer_ratio(), early=early)


def save_interval(text: str, *, length: Length, setting: str = "save_every") -> Interval:
    """Return the interval of checkpoints; "auto" is 5 minutes, or 60 seconds if a save takes under
    1% of that minute.
    """
    if text == "auto":
        return Every(seconds=300.0, seconds_if_cheap=60.0)
    return every(text, length=length, time=True, setting=setting)


def seconds(text: str, *, setting: str = "time") -> float:
    """Parse a time, "30 s", "90 min" or "2 h", to seconds. Raises `ConfigError` unless it is
    positive.

    >>> seconds("90 min")
    5400.0
    """
    number, _ = _parsed(text, setting, units=("seconds",))
    if number == 0:
        raise out_of_range(setting, text, "above 0")
    return float(number)


def _parsed(text: object, setting: str, *, units: Sequence[_Unit]) -> tuple[Fraction, _Unit]:
    """Return the number of a duration and its unit, which is one of `units`."""
    bare = re.fullmatch(r"[0-9]+(_[0-9]+)*(\.[0-9]+)?", str(text).strip())
    if bare is not None:
        examples = [_EXAMPLES[unit] for unit in units]
        if float(bare[0]) > 100:
            examples = [example for example in examples if "%" not in example]
        if float(bare[0]) > 0:
            examples = [re.sub("[0-9]+", bare[0], example) for example in examples]
        raise ConfigError(
            "duration-without-unit",
            problem=f"{setting} = {text!r} has no unit",
            remedy=[Setting(setting, example) for example in examples],
            setting=setting,
            value=text,
            units=list(units),
        )
    match = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    word = "" if match is None else match[2].lower()
    unit, factor = _UNITS.get(word, (None, 0))
    if match is None or unit is None or unit not in units:
        raise ConfigError(
            "duration-not-understood",
            problem=f"{setting} = {text!r} is not a number, 0 or more, of {' or '.join(units)}",
            remedy=[Setting(setting, _EXAMPLES[unit]) for unit in units],
            setting=setting,
            value=text,
            units=list(units),
        )
    number = Fraction(match[1].replace("_", "")) * factor
    if unit == "%" and number > 100:
        raise out_of_range(setting, text, "at most 100%, the whole run")
    if unit == "steps" and number.denominator != 1:
        raise out_of_range(setting, text, "a whole number of steps")
    return number, unit


def _in_steps(number: Fraction, unit: _Unit, length: Length) -> Fraction:
    if unit == "epochs":
        return number * length.samples_per_epoch / length.batch_size
    if unit == "%":
        return number / 100 * length.steps
    return number
