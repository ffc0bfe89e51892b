"""The journal with which a run begins whose program has ramps, such as "64, 128 from 20%". Imports
no torch.

A ramp is nothing else than changes that are known from the start: its lines are those that
`surefoot change` would write at these steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.batch_size import Batching, batching
from surefoot.config.durations import NEVER, Length, planned, steps_until
from surefoot.config.mixture_weights import WEIGHTS
from surefoot.config.ramps import (
    Ramp,
    check_batch_sizes,
    is_of_mixture,
    ramp_of,
    ramps_of,
    reason_of,
)
from surefoot.config.setting_change import SettingChange
from surefoot.errors import Command, ConfigError, Setting
from surefoot.train.changed_settings import Values, Wish, changes_of, values_at

if TYPE_CHECKING:  # imports torch
    from surefoot.train.plan import SizeFacts
    from surefoot.train.run_settings import RunSettings

RAMPED = ("batch_size", "clip")


def without_ramps(settings: "RunSettings") -> "tuple[RunSettings, dict[str, Ramp]]":
    """Return the settings of the first step, and the ramps by the names of their settings. Raises
    `ConfigError` for a text that is no ramp.
    """
    ramps = {}
    for name in RAMPED:
        ramp = ramp_of(getattr(settings, name), setting=name)
        if ramp is not None:
            ramps[name] = ramp
    if not ramps:
        return settings, ramps
    if "batch_size" in ramps:
        check_batch_sizes(settings.batch_size, settings.micro_batch_size)
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    of_first_step = {name: ramp.first for name, ramp in ramps.items()}
    return type(settings)(**(values | of_first_step)), ramps


def ramps_in(of_program: Values) -> dict[str, Ramp]:
    """Return the ramps among the values of a program as a session has recorded them."""
    values = {name: of_program.get(name) for name in RAMPED}
    for name, weight in (of_program.get(WEIGHTS) or {}).items():
        values[f"{WEIGHTS}.{name}"] = weight
    ramps = {}
    for name, value in values.items():
        ramp = ramp_of(value, setting=name)
        if ramp is not None:
            ramps[name] = ramp
    return ramps


def with_ramps(values: Values, ramps: Mapping[str, Ramp]) -> dict[str, Any]:
    """Return the values of a program with its ramps as texts, for the record of a session."""
    return _with(values, {name: ramp.text for name, ramp in ramps.items()})


def at_first_step(of_program: Values) -> dict[str, Any]:
    """Return the values of a program as a session has recorded them, with the first ones of its
    ramps.
    """
    first_values = {name: ramp.first for name, ramp in ramps_in(of_program).items()}
    return _with(of_program, first_values)


def _with(values: Values, others: Values) -> dict[str, Any]:
    """Return values with others, each weight of a mixture among the others."""
    changed = dict(values)
    for name, value in others.items():
        if is_of_mixture(name):
            weight = {name.removeprefix(f"{WEIGHTS}."): value}
            changed[WEIGHTS] = {**changed[WEIGHTS], **weight}
        else:
            changed[name] = value
    return changed


def ramps_to_write(
    ramps: Mapping[str, Ramp], changes: Sequence[SettingChange], *, step: int
) -> dict[str, Ramp]:
    """Return the ramps of a program whose changes are not in the journal yet. Raises `ConfigError`
    for a run that has begun without them, and for one that was given a journal without them.
    """
    of_ramps = []
    for change in changes:
        if any(_is_of(name, ramp, change) for name, ramp in ramps.items()):
            of_ramps.append(change)
    missing = _unwritten(ramps, changes)
    for name, ramp in missing.items():
        if step > 0 or len(of_ramps) < len(changes):
            raise ConfigError(
                "ramp-of-begun-run",
                problem=f"{name} = {ramp.text!r}: the journal of changes of this run does not have"
                " these values",
                reason="they are written before its first step, and before all other changes",
                remedy=[
                    "leave the program as it was",
                    ("to go on as the journal says:", Setting(name, ramp.first)),
                    ("begin another run with", Setting("run_dir")),
                ],
                setting=name,
                value=ramp.text,
                step=step,
            )
    return missing


def refuse_change_before_ramps(
    run: Path, of_program: Values, changes: Sequence[SettingChange]
) -> None:
    """Raise `ConfigError` for a run that was killed before its journal had the ramps of its
    program: they would be changes of a run that has begun.
    """
    for name, ramp in _unwritten(ramps_in(of_program), changes).items():
        raise ConfigError(
            "ramp-not-written-yet",
            problem=f"{name} = {ramp.text!r} is not in the journal of {run} yet",
            reason="a run writes it there before its first step, and was stopped before",
            remedy=("train the run, and change it then:", Command(f"surefoot resume {run}")),
            setting=name,
            value=ramp.text,
            run=str(run),
        )


def _unwritten(ramps: Mapping[str, Ramp], changes: Sequence[SettingChange]) -> dict[str, Ramp]:
    """Return the ramps whose lines a journal does not have, or not all of them."""
    missing = {}
    for name, ramp in ramps.items():
        written = [change for change in changes if _is_of(name, ramp, change)]
        if len(written) < len(ramp.then):  # more, if the run went back
            missing[name] = ramp
    return missing


def _is_of(name: str, ramp: Ramp, change: SettingChange) -> bool:
    """Return True for a line of the journal that has a value of a ramp."""
    found = ramps_of(change).get(name)
    return found is not None and found.text == ramp.text


@dataclass(frozen=True)
class _Stretch:
    """The steps from `begin` on that have one batch size."""

    begin: int
    length: Length


def changes_of_ramps(
    ramps: Mapping[str, Ramp], values: Values, data: "SizeFacts"
) -> list[SettingChange]:
    """Return the changes with which the journal of a run begins, in the order of their steps.

    `values` are those of the first step. Percentages and epochs are of the length as it is written
    then. Epochs are counted in samples, whatever the batch sizes are, and so are percentages of a
    length in epochs: in 30 epochs, "20%" are the steps that read 6 epochs. Raises `ConfigError` for
    steps that are not in order, or beyond the end, and for data that are cut into whole epochs.
    """
    for name, ramp in ramps.items():
        _refuse_repeats(name, ramp)
    changes: list[SettingChange] = []
    stretches = [_Stretch(0, _planned(values["length"], data, data.step, before=(0, 0)))]
    if "batch_size" in ramps:
        changes = _of_batch_size(ramps["batch_size"], values, data, stretches)
    end = stretches[-1].length.steps
    wishes: dict[tuple[int, str], list[Wish]] = {}  # of each line, by its step and its setting
    for name, ramp in ramps.items():
        if name == "batch_size":
            continue
        before = 0
        for value, when in ramp.then:
            step = _step_of(when, stretches, of=values["length"], setting=name)
            _check_step(name, ramp, when, step, before=before, end=end)
            setting = WEIGHTS if is_of_mixture(name) else name
            wishes.setdefault((step, setting), []).append(Wish(name, value, reason_of(name, ramp)))
            before = step
    for step, setting in sorted(wishes):
        changes += _lines(wishes[step, setting], step, values, changes, data.sizes)
    return sorted(changes, key=lambda change: change.from_step)


def _of_batch_size(
    ramp: Ramp, values: Values, data: "SizeFacts", stretches: list[_Stretch]
) -> list[SettingChange]:
    """Return the changes of the batch size, and add the stretches that they begin."""
    if data.step != data.sizes.batch_size:
        raise ConfigError(
            "ramp-of-whole-epochs",
            problem=f"batch_size = {ramp.text!r}: in this order every epoch begins with a step",
            reason="another batch size could begin only there",
            remedy="change it on the way: surefoot change RUN batch_size=...",
            setting="batch_size",
            value=ramp.text,
        )
    changes: list[SettingChange] = []
    sizes = data.sizes
    for value, when in ramp.then:
        begin, length = stretches[-1].begin, stretches[-1].length
        step = steps_until(when, length=length, of=values["length"], setting="batch_size from")
        _check_step("batch_size", ramp, when, step, before=begin, end=length.steps)
        changes += _lines([Wish("batch_size", value, ramp.text)], step, values, changes, sizes)
        present = values_at(values, changes, step)
        sizes = batching(present["batch_size"], present["micro_batch_size"])
        before = (step, length.samples_before(step))
        later = _planned(values["length"], data, sizes.batch_size, before=before)
        stretches.append(_Stretch(step, later))
    return changes


def _planned(text: str, data: "SizeFacts", batch_size: int, *, before: tuple[int, int]) -> Length:
    return planned(text, samples_per_epoch=data.epoch, batch_size=batch_size, before=before)


def _step_of(when: str, stretches: Sequence[_Stretch], *, of: str, setting: str) -> int:
    """Return the step after a duration, in the stretch in which it is over."""
    step = 0
    for stretch, following in pairwise([*stretches, _Stretch(NEVER, stretches[-1].length)]):
        step = steps_until(when, length=stretch.length, of=of, setting=f"{setting} from")
        if step <= following.begin:
            break
    return step


def _refuse_repeats(name: str, ramp: Ramp) -> None:
    """Raise `ConfigError` for a value that already holds."""
    for before, value in pairwise([ramp.first, *(value for value, _ in ramp.then)]):
        if value == before:
            raise ConfigError(
                "ramp-repeats-value",
                problem=f"{name} = {ramp.text!r}: {value} is already the value before",
                remedy=("leave it out of", _typed(name)),
                setting=name,
                value=ramp.text,
            )


def _typed(name: str) -> Setting | str:
    """Return a setting as a user types it. The weight of a data set is no setting of a run."""
    return name if is_of_mixture(name) else Setting(name)


def _check_step(name: str, ramp: Ramp, when: str, step: int, *, before: int, end: int) -> None:
    if before < step < end:
        return
    reason = f"the run has {end:,} steps"
    if step <= before:
        reason = f"the value before it begins at step {before:,}"
    raise ConfigError(
        "ramp-step-out-of-order",
        problem=f"{name} = {ramp.text!r}: {when!r} is step {step:,}",
        reason=f"{reason}, and each value needs a step",
        remedy=("write another step in", _typed(name)),
        setting=name,
        value=ramp.text,
        step=step,
        before=before,
        end=end,
    )


def _lines(
    wishes: Sequence[Wish],
    step: int,
    values: Values,
    earlier: Sequence[SettingChange],
    sizes: Batching,
) -> list[SettingChange]:
    """Return the line of the values that begin at a step, of one setting or of several weights."""
    present = values_at(values, earlier, step)
    setting = wishes[0].setting
    if is_of_mixture(setting):
        setting = WEIGHTS
    lines = changes_of(
        present, wishes, from_step=step, sizes=sizes, earlier=earlier, origins={setting: "given"}
    )
    because = "; ".join(wish.because for wish in wishes)
    return [replace(line, because=because) for line in lines]


def length_after(changes: Sequence[SettingChange], length: Length, *, text: str) -> Length:
    """Return the length of a run whose batch size will change. `length` is that of the first batch
    size, and `text` is the setting.
    """
    for change in changes:
        if change.setting == "batch_size":
            length = planned(
                text,
                samples_per_epoch=length.samples_per_epoch,
                batch_size=change.now,
                before=(change.from_step, length.samples_before(change.from_step)),
            )
    return length


def not_written(
    planned_changes: Sequence[SettingChange], changes: Sequence[SettingChange]
) -> tuple[SettingChange, ...]:
    """Return the planned changes that a journal does not have. A kill may have cut it off."""
    written = {(change.setting, change.from_step) for change in changes}
    return tuple(
        change for change in planned_changes if (change.setting, change.from_step) not in written
    )
