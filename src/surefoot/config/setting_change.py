"""A change of a setting while a run goes on, as a line of the journal of changes has it, and which
lines of a journal hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

DATA = "data"
"""What a line names as its setting that brings other data (`config/data_change.py`)."""
STEP = "step"
"""What a line names as its setting that goes back: from step `was` to step `now`."""


SCHEDULE = "schedule"
"""What a line names as its setting with which a schedule begins, or is stretched."""


@dataclass(frozen=True)
class SettingChange:
    """One line of the journal.

    number: from 1. from_step: the number of finished steps when the value first holds. was and now:
    JSON values. follows: other settings that change with this one, each with its two values.
    sha256: of the line before and of this one. origins: where `was` and `now` come from: "given",
    "default", "auto" (chosen for the user), "beginning" or "changed"; () if it is not known.
    stretches: of a schedule that stays, and runs over the whole length from here on.

    A line that goes back has the setting "step", and `from_step` is the step to which it goes. The
    lines before it that hold from there on are superseded. What these had changed is in `follows`,
    each setting twice with the value that it has again.
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

    @property
    def goes_back(self) -> bool:
        """True if the line supersedes earlier ones, and changes nothing itself."""
        return self.setting == STEP

    @property
    def begins_schedule(self) -> bool:
        """True if a schedule begins anew with the line, also one with the same settings."""
        return self.setting == SCHEDULE and not self.stretches

    @property
    def names(self) -> set[str]:
        """The names of the settings that have another value in the next step than in the one
        before.
        """
        return set() if self.goes_back else {self.setting, *self.follows}

    @property
    def values(self) -> dict[str, tuple[Any, Any]]:
        """The two values of each setting in the line, by name. Other data are no value."""
        values = {name: (was, now) for name, (was, now) in self.follows.items()}
        if self.setting not in (STEP, DATA):
            values[self.setting] = (self.was, self.now)
        return values


def in_effect(lines: Iterable[SettingChange]) -> list[SettingChange]:
    """Return the changes that hold at some step, in the order of their steps.

    A line supersedes those before it in the journal that change the same setting at its step or
    later: what was still to come of that setting never holds. Lines of other settings stay, so a
    journal need not be in the order of its steps. A line that goes back supersedes all of them.

    >>> ramp = [
    ...     SettingChange(1, 20, "batch_size", 8, 16),
    ...     SettingChange(2, 40, "batch_size", 16, 32),
    ... ]
    >>> clip = SettingChange(3, 10, "clip", "norm 1.0", "off")
    >>> [change.number for change in in_effect([*ramp, clip])]
    [3, 1, 2]
    >>> [change.number for change in in_effect([*ramp, SettingChange(3, 30, "batch_size", 16, 24)])]
    [1, 3]
    >>> [change.number for change in in_effect([*ramp, clip, SettingChange(4, 20, "step", 50, 20)])]
    [3, 4]
    """
    holding: list[SettingChange] = []
    for change in lines:
        names = {change.setting, *change.follows}
        before = [each for each in holding if each.from_step < change.from_step]
        to_come = []
        for each in holding[len(before) :]:
            if not change.goes_back and each.setting not in names:
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
    number = 0 if recorded is None else int(recorded.get("number", 0))
    return [
        change
        for change in in_effect(changes)
        if change.number > number or change.from_step >= step
    ]


def at_beginning(lines: Iterable[SettingChange]) -> dict[str, Any]:
    """Return the values at the beginning of a run, of the settings that its journal names."""
    values: dict[str, Any] = {}
    for line in lines:
        for name, (was, _) in line.values.items():
            values.setdefault(name, was)
    return values


def going_back(
    lines: Sequence[SettingChange], *, was: int, now: int, because: str
) -> SettingChange:
    """Return the line with which a run whose journal has these `lines` goes back from step `was` to
    step `now`.
    """
    values = at_beginning(lines)
    superseded: set[str] = set()
    for line in in_effect(lines):
        if line.from_step < now:
            values |= {name: after for name, (_, after) in line.values.items()}
        elif line.from_step <= was:
            superseded |= line.values.keys()
    follows = {name: [values[name], values[name]] for name in sorted(superseded)}
    return SettingChange(len(lines) + 1, now, STEP, was, now, follows, because)


def left_by(
    recorded: Mapping[str, Any] | None, step: int, lines: Sequence[SettingChange]
) -> int | None:
    """Return the number of the line with which a run has left the branch of a checkpoint, or None
    for a checkpoint that it still has. `recorded` has the number of the last line that the
    checkpoint's steps had.
    """
    number = 0 if recorded is None else int(recorded.get("number", 0))
    begin = lines[number - 1].from_step if 0 < number <= len(lines) else None
    for line in lines[number:]:
        if line.goes_back:
            had_superseded = begin is not None and begin >= line.from_step
            if had_superseded or step > line.from_step:
                return line.number
    return None


def is_journal_of(
    recorded: Mapping[str, Any] | None, step: int, changes: Sequence[SettingChange]
) -> bool:
    """Return True if a checkpoint of a step may belong to a run with these changes. `recorded` has
    the number and the hash of the last one that its steps had.
    """
    number = 0 if recorded is None else int(recorded.get("number", 0))
    if number > len(changes) or left_by(recorded, step, changes) is not None:
        return False
    if number and recorded is not None and changes[number - 1].sha256 != recorded.get("sha256"):
        return False
    # later ones begin where the checkpoint ends: else its steps would have had them
    return all(change.from_step >= step for change in changes[number:])
