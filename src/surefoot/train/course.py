"""The length and the schedule of a run whose settings were changed while it went on. Imports no
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.config.data_change import first_epoch
from surefoot.config.durations import Length, planned
from surefoot.errors import ConfigError, Setting
from surefoot.schedules.joined import AnySchedule, Continued, continued


@dataclass(frozen=True)
class Leg:
    """The settings from step `begin` on that decide how long a run is, and its learning rates.

    samples_per_epoch and batch_size: samples, or steps and 1 if every epoch begins with a step.
    begins_schedule: the schedule begins here anew. stretches: from here on it is that of a run that
    had this length from the start.
    new_data: when other data begin here, as in `config/data_change.py`.
    """

    begin: int
    length: str
    samples_per_epoch: int
    batch_size: int
    schedule: AnySchedule
    begins_schedule: bool = False
    stretches: bool = False
    new_data: str = ""


def course_of(
    legs: Sequence[Leg], *, first_length: Length, first_schedule: AnySchedule
) -> tuple[Length, AnySchedule]:
    """Return the length of a run, and its schedule in steps, after all its legs.

    `first_length` and `first_schedule` are those of the first leg. Percentages in a setting that
    was not changed keep their steps. A new schedule runs over the steps left; one that is stretched
    runs from its own step 0 to the new end. Raises `ConfigError` for a length that has passed, and
    for a schedule that cannot go on.
    """
    length = first_length
    schedule = first_schedule
    origin = 0  # where the schedule has its own step 0
    for leg in legs[1:]:
        if leg.begin > length.steps:  # the run ends before
            break
        before = length.before
        sizes = (leg.samples_per_epoch, leg.batch_size)
        if sizes != (length.samples_per_epoch, length.batch_size) or leg.new_data:
            steps, samples = before
            samples += (leg.begin - steps) * length.batch_size
            # as many epochs as before, of the size that they have now
            if leg.new_data:
                epochs = first_epoch(samples, length.samples_per_epoch, leg.new_data)
                samples = epochs * leg.samples_per_epoch
            else:
                samples = samples * leg.samples_per_epoch // length.samples_per_epoch
            before = (leg.begin, samples)
        changed = planned(
            leg.length,
            samples_per_epoch=leg.samples_per_epoch,
            batch_size=leg.batch_size,
            before=before,
        )
        steps_left = changed.steps - leg.begin
        if steps_left < 0:
            raise _already_passed(leg, changed.steps)
        if steps_left > 0 and leg.begins_schedule:
            of_the_rest = replace(changed, steps=steps_left, before=(0, 0))
            begun = leg.schedule.resolved(of_the_rest)
            schedule = Continued(schedule, length.steps, begun, leg.begin)
            origin = leg.begin
        elif steps_left > 0 and leg.stretches:
            of_the_whole = replace(changed, steps=changed.steps - origin, before=(0, 0))
            whole = leg.schedule.resolved(of_the_whole)
            schedule = Continued(schedule, length.steps, whole, leg.begin, origin=origin)
        elif steps_left > 0 and changed.steps != length.steps:
            schedule = continued(schedule, before=length, after=changed, at=leg.begin)
        length = changed
    return length, schedule


def _already_passed(leg: Leg, steps: int) -> ConfigError:
    return ConfigError(
        "length-already-passed",
        problem=f"length = {leg.length!r} is {steps} steps, and {leg.begin} are already completed",
        remedy=Setting("length", f"{leg.begin} steps"),
        setting="length",
        value=leg.length,
        step=leg.begin,
    )
