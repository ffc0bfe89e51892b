"""Concatenation of two schedules, and the union type of all schedules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.config.durations import Length, in_steps
from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError, Setting
from surefoot.schedules.checks import as_text
from surefoot.schedules.curves import Factors, Groups
from surefoot.schedules.lr_schedule import Schedule
from surefoot.schedules.sampled import Sampled


@dataclass(frozen=True)
class Joined:
    """The schedule that `join` returns: `first` before step `at`, then `second`, which begins at
    its own step 0.
    """

    first: "AnySchedule"
    second: "AnySchedule"
    at: str | int

    @property
    def warmup(self) -> str | int | None:
        return self.first.warmup

    def resolved(self, length: Length) -> "Joined":
        """Return the schedule with both parts resolved to steps. Raises `ConfigError` with the step
        where they join.
        """
        at, before, after = self._cut(length)
        try:
            return Joined(self.first.resolved(before), self.second.resolved(after), at)
        except ConfigError as problem:
            raise problem.inside(f"joined at step {at} of {length.steps}") from problem

    def factors(self, length: Length) -> Factors:
        resolved = self.resolved(length)
        at, before, after = resolved._cut(length)
        return _joined(resolved.first.factors(before), resolved.second.factors(after), at)

    def group_factors(self, length: Length) -> list[Factors] | None:
        """Return the factors of each parameter group, or None if all have those of `factors`."""
        resolved = self.resolved(length)
        at, before, after = resolved._cut(length)
        of_first = resolved.first.group_factors(before)
        of_second = resolved.second.group_factors(after)
        if of_first is not None and of_second is not None:
            pairs = list(zip(of_first, of_second, strict=True))
        elif of_first is not None:
            second = resolved.second.factors(after)
            pairs = [(first, second) for first in of_first]
        elif of_second is not None:
            first = resolved.first.factors(before)
            pairs = [(first, second) for second in of_second]
        else:
            return None
        return [_joined(first, second, at) for first, second in pairs]

    def momentum(self, length: Length) -> None:
        """Return None; raise `ConfigError` if a part changes the momentum, because the other part
        defines no momentum.
        """
        _, before, after = self._cut(length)
        if self.first.momentum(before) is not None or self.second.momentum(after) is not None:
            raise ConfigError(
                "joined-schedule-changes-momentum",
                problem="schedule: one of two joined schedules changes the momentum",
                reason="the other one does not say what the momentum is in its steps",
                remedy=("leave out", Setting("schedule.momentum_range")),
                setting="schedule.momentum_range",
            )

    def shared_steps(self, length: Length) -> int:
        at, _, after = self._cut(length)
        return at + self.second.shared_steps(after)

    def to_dict(self) -> dict[str, Any]:
        return {
            "shape": "joined",
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
            "at": self.at,
        }

    def _cut(self, length: Length) -> tuple[int, Length, Length]:
        at = in_steps(self.at, length=length, setting="at")
        if not 0 < at < length.steps:
            raise ConfigError(
                "joined-schedule-without-steps",
                problem=f"at = {as_text(at, self.at)}: two joined schedules in a run of"
                f" {length.steps} steps need at least one step each",
                remedy=Setting("at", "50%"),
                setting="at",
                value=self.at,
                step=at,
                steps=length.steps,
            )
        return at, replace(length, steps=at), replace(length, steps=length.steps - at)


def _joined(first: Factors, second: Factors, at: int) -> Factors:
    return lambda step: first(step) if step < at else second(step - at)


AnySchedule = Schedule | Joined | Sampled


def factors_by_optimizer(
    schedule: AnySchedule, length: Length, group_counts: Mapping[str, int]
) -> Callable[[int], dict[str, list[float]]] | None:
    """Return the factors of each optimizer's groups as a function of the step, or None if all
    groups have the same. `group_counts` has the number of groups of each optimizer, in order.
    """
    by_group = schedule.group_factors(length)
    if by_group is None:
        return None
    by_optimizer: dict[str, list[Factors]] = {}
    begin = 0
    for name, count in group_counts.items():
        by_optimizer[name] = by_group[begin : begin + count]
        begin += count

    def factors(step: int) -> dict[str, list[float]]:
        return {name: [factor(step) for factor in group] for name, group in by_optimizer.items()}

    return factors


def bound(schedule: AnySchedule, groups: Groups, every_group: Groups = ()) -> AnySchedule:
    """Return the schedule bound to these parameter groups: the factors of a torch scheduler may
    depend on the groups' values. `groups` has one for each learning rate, `every_group` all.
    """
    if isinstance(schedule, Joined):
        first = bound(schedule.first, groups, every_group)
        return replace(schedule, first=first, second=bound(schedule.second, groups, every_group))
    if isinstance(schedule, Sampled) and groups:
        return replace(schedule, groups=groups, every_group=every_group)
    return schedule


@known_keywords
def join(first: AnySchedule, second: AnySchedule, at: str | int = "50%") -> Joined:
    """Use `first` before step `at`, then `second`; a percentage within a part is relative to the
    length of that part.

    >>> from surefoot.schedules.lr_schedule import constant, linear
    >>> factor = join(constant(), linear(), at=2).factors(
    ...     Length(steps=6, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [factor(step) for step in range(6)]
    [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    return Joined(first, second, at)
