"""A wish for other training data, as a line of the journal of changes. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from surefoot.config.data_change import (
    AT_ONCE,
    NEXT_EPOCH,
    ORDERS,
    UNCHANGED,
    WHICH_CAN_CHANGE,
    data_changes,
    first_epoch,
)
from surefoot.config.durations import Length, planned
from surefoot.config.setting_change import DATA, SettingChange, in_effect
from surefoot.errors import ConfigError
from surefoot.train.changed_settings import Wish
from surefoot.train.recorded_settings import RecordedSettings

_VALUES = (AT_ONCE, NEXT_EPOCH, UNCHANGED)


def change_of_data(
    run: Path, wish: Wish, recorded: RecordedSettings, *, step: int
) -> tuple[list[SettingChange], list[str]]:
    """Return the change of the data of a run for which a user wishes after `step` steps, and lines
    about it. `recorded` has the other changes that the user makes.

    Raises `ConfigError` for a value that says nothing about data, for data that cannot change, and
    where no epoch is left for them.
    """
    if wish.value not in _VALUES:
        raise ConfigError(
            "data-change-unknown",
            problem=f"{DATA} = {wish.value!r} does not say when other data begin",
            remedy=f"write {DATA}={AT_ONCE!r} or {DATA}={NEXT_EPOCH!r}; {DATA}={UNCHANGED} takes it back",
            setting=DATA,
            value=wish.value,
        )
    data = dict(recorded.identity["data"])
    changes = data_changes(recorded.changes)
    if wish.value == UNCHANGED:
        if max(changes, default=-1) < step:
            return [], []
        return [SettingChange(0, step, DATA, data, UNCHANGED, because=wish.because)], []
    # without those to come, which this one supersedes
    before = replace(
        recorded,
        changes=tuple(
            change
            for change in recorded.changes
            if change.setting != DATA or change.from_step < step
        ),
    )
    begun = data_changes(before.changes)
    if begun and begun[max(begun)].was == data:
        raise ConfigError(
            "data-not-saved-yet",
            problem=f"it is not known which data {run} has at step {step}",
            reason=f"the checkpoint from which it goes on has those before step {max(begun)}",
            remedy="change the data after the next checkpoint of the run",
            run=str(run),
            step=step,
        )
    length = before.length_at(step)
    plan = data["plan"]
    has_all_samples = data.get("samples", plan.get("samples")) == plan.get("samples")
    if length is None or plan["order"] not in ORDERS or not has_all_samples:
        raise ConfigError(
            "data-cannot-change",
            problem=f"the data of {run} cannot change while it goes on",
            reason=WHICH_CAN_CHANGE,
            run=str(run),
        )
    begin = step
    if wish.value == NEXT_EPOCH:
        begin, length = _end_of_epoch(before, step, length)
    samples_per_epoch = length.samples_per_epoch
    position = length.samples_before(begin)
    epoch = first_epoch(position, samples_per_epoch, wish.value)
    setting = before.at(begin)["length"]
    then = planned(
        setting,
        samples_per_epoch=samples_per_epoch,
        batch_size=length.batch_size,
        before=(begin, epoch * samples_per_epoch),
    )
    if then.steps <= begin:
        raise ConfigError(
            "no-epoch-for-other-data",
            problem=f"{run} has no epoch left for other data after step {begin}",
            reason=f"its length is {setting}",
            remedy="change its length too, such as length='NUMBER epochs'",
            run=str(run),
            step=begin,
        )
    made = [SettingChange(0, begin, DATA, data, wish.value, because=wish.because)]
    if any(step <= to_come < begin for to_come in changes):
        made.insert(0, SettingChange(0, step, DATA, data, UNCHANGED, because=wish.because))
    return made, _lines(begin, epoch, position=position, length=then)


def _end_of_epoch(before: RecordedSettings, step: int, length: Length) -> tuple[int, Length]:
    """Return the first step from `step` on before which an epoch has ended, and the length of the
    run as its settings there have it. `length` is as those at `step` have it.
    """
    later = [change.from_step for change in in_effect(before.changes) if change.from_step > step]
    for next_change in [*later, None]:
        rest = -length.samples_before(step) % length.samples_per_epoch
        end = step + -(-rest // length.batch_size)
        if next_change is None or end < next_change:
            return end, length
        step = next_change
        length = before.length_at(step) or length
    raise AssertionError("the last stretch has no end")


def _lines(begin: int, epoch: int, *, position: int, length: Length) -> list[str]:
    """Return lines about data that begin with an epoch at a step, where so many samples of the data
    before have been read.
    """
    lines = [f"the other data begin at step {begin:,} with epoch {epoch + 1:,}"]
    rest = epoch * length.samples_per_epoch - position
    if rest > 0:
        lines.append(f"{rest:,} samples of epoch {epoch:,} are left out")
    elif rest < 0:
        lines.append(
            f"the step before reads the last samples of epoch {epoch:,}, and {-rest:,} of another pass"
        )
    if length.in_epochs:
        lines.append("the length in steps follows from the other data")
    return lines
