"""A change of a setting while a run goes on, as a line of the journal of changes has it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class SettingChange:
    """One line of the journal.

    number: from 1. from_step: the number of finished steps when the value first holds. was and now:
    JSON values. follows: other settings that change with this one, each with its two values.
    sha256: of the line before and of this one. origins: where `was` and `now` come from: "given",
    "default", "auto" (chosen for the user), "beginning" or "changed"; () if it is not known.
    stretches: of a schedule that stays, and runs over the whole length from here on.
    """

    number: int
    from_step: int
    setting: str
    was: Any
    now: Any
    follows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    because: str = ""
    when: str = ""
    sha256: str = ""
    origins: Sequence[str] = ()
    stretches: bool = False


def in_effect(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """Return the changes that hold at some step, in the order of their steps.

    A line supersedes those before it in the journal that change the same setting at its step or
    later: what was still to come of that setting never holds. Lines of other settings stay, so a
    journal need not be in the order of its steps.

    >>> ramp = [
    ...     SettingChange(1, 20, "batch_size", 8, 16),
    ...     SettingChange(2, 40, "batch_size", 16, 32),
    ... ]
    >>> clip = SettingChange(3, 10, "clip", "norm 1.0", "off")
    >>> [change.number for change in in_effect([*ramp, clip])]
    [3, 1, 2]
    >>> [change.number for change in in_effect([*ramp, SettingChange(3, 30, "batch_size", 16, 24)])]
    [1, 3]
    """
    holding: list[SettingChange] = []
    for change in changes:
        names = {change.setting, *change.follows}
        before = [each for each in holding if each.from_step < change.from_step]
        to_come = []
        for each in holding[len(before) :]:
            if each.setting not in names:
                follows = {name: each.follows[name] for name in each.follows.keys() - names}
                to_come.append(replace(each, follows=follows))
        at_its_step = [each for each in to_come if each.from_step == change.from_step]
        holding = [*before, *at_its_step, change, *to_come[len(at_its_step) :]]
    return holding


def began_since(
    recorded: Mapping[str, Any] | None, step: int, changes: Iterable[SettingChange]
) -> list[SettingChange]:
    """Return the changes that steps before a checkpoint of `step` did not have. `recorded` has the
    number of the last one that they had.
    """
    number = 0 if recorded is None else int(recorded["number"])
    return [
        change
        for change in in_effect(changes)
        if change.number > number or change.from_step >= step
    ]
