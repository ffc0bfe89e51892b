"""Concatenation of two schedules, their continuation after a change, and the union type of all
schedules.
"""

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
        pairs = _pairs_of_groups(resolved.first, before, resolved.second, after)
        if pairs is None:
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


def _pairs_of_groups(
    first: "AnySchedule", before: Length, second: "AnySchedule", after: Length
) -> list[tuple[Factors, Factors]] | None:
    """Return the factors of each parameter group in two parts of a schedule, or None if all groups
    have the same.
    """
    of_first = first.group_factors(before)
    of_second = second.group_factors(after)
    if of_first is not None and of_second is not None:
        return list(zip(of_first, of_second, strict=True))
    if of_first is not None:
        factors = second.factors(after)
        return [(of_group, factors) for of_group in of_first]
    if of_second is not None:
        factors = first.factors(before)
        return [(factors, of_group) for of_group in of_second]
    return None


def _joined(first: Factors, second: Factors, at: int) -> Factors:
    return lambda step: first(step) if step < at else second(step - at)


@dataclass(frozen=True)
class Continued:
    """The schedule of a run that was changed: `first`, as in a run of `first_steps` steps, before
    step `at`; then `scale` times `second`, whose own step 0 is step `origin`, by default `at`.
    """

    first: "AnySchedule"
    first_steps: int
    second: "AnySchedule"
    at: int
    scale: float = 1.0
    origin: int | None = None

    @property
    def warmup(self) -> str | int | None:
        return self.first.warmup

    def resolved(self, length: Length) -> "Continued":
        """Return the schedule with both parts resolved to steps."""
        before, after = self._cut(length)
        return replace(self, first=self.first.resolved(before), second=self.second.resolved(after))

    def factors(self, length: Length) -> Factors:
        before, after = self._cut(length)
        return self._join(self.first.factors(before), self.second.factors(after), self.scale)

    def group_factors(self, length: Length) -> list[Factors] | None:
        """Return the factors of each parameter group, or None if all have those of `factors`."""
        before, after = self._cut(length)
        pairs = _pairs_of_groups(self.first, before, self.second, after)
        if pairs is None:
            return None
        return [self._join(first, second, self.scale) for first, second in pairs]

    def momentum(self, length: Length) -> Factors | None:
        """Return the momentum as a function of the step. A part without one keeps that of the last
        step before it.
        """
        before, after = self._cut(length)
        first = self.first.momentum(before)
        second = self.second.momentum(after)
        if first is None and second is None:
            return None
        if first is None:
            assert second is not None
            begin = second(self.at - self._origin)
            return self._join(lambda _: begin, second)
        if second is None:
            last = first(min(self.at, self.first_steps) - 1)
            return self._join(first, lambda _: last)
        return self._join(first, second)

    def shared_steps(self, length: Length) -> int:
        _, after = self._cut(length)
        return self._origin + self.second.shared_steps(after)

    def to_dict(self) -> dict[str, Any]:
        values = {
            "shape": "continued",
            "first": self.first.to_dict(),
            "first_steps": self.first_steps,
            "second": self.second.to_dict(),
            "at": self.at,
            "scale": self.scale,
        }
        if self.origin is not None:
            values["origin"] = self.origin
        return values

    @property
    def _origin(self) -> int:
        return self.at if self.origin is None else self.origin

    def _cut(self, length: Length) -> tuple[Length, Length]:
        before = replace(length, steps=self.first_steps)
        # one step has no room for a fall: it has the first factor of two
        return before, replace(length, steps=max(2, length.steps - self._origin))

    def _join(self, first: Factors, second: Factors, scale: float = 1.0) -> Factors:
        at = self.at
        origin = self._origin
        if scale == 1.0:
            return lambda step: first(step) if step < at else second(step - origin)
        return lambda step: first(step) if step < at else scale * second(step - origin)


AnySchedule = Schedule | Joined | Continued | Sampled

_FALLS = {"one_cycle": "cosine", "cosine_restarts": "cosine"}
"""The shape of the fall of shapes that also rise."""


def continued(schedule: AnySchedule, *, before: Length, after: Length, at: int) -> AnySchedule:
    """Return the schedule of a run whose length changes at step `at` from `before` to `after`.

    A schedule whose steps up to there are the same in a run of the other length goes on as in that
    run. Any other falls in the same shape, from its present factor to its minimum, over the steps
    left. Raises `ConfigError` for a schedule that cannot go on.

    >>> from surefoot.schedules.lr_schedule import linear
    >>> ten = Length(steps=10, samples_per_epoch=8, batch_size=1)
    >>> twenty = Length(steps=20, samples_per_epoch=8, batch_size=1)
    >>> factor = continued(linear(), before=ten, after=twenty, at=6).factors(twenty)
    >>> [round(factor(step), 2) for step in (5, 6, 13, 20)]
    [0.5, 0.4, 0.2, 0.0]
    """
    shorter = replace(before, steps=min(before.steps, after.steps))
    if at <= schedule.shared_steps(shorter):
        return schedule.resolved(after)
    last_step = min(at, before.steps - 1)  # a fall to 0 has nothing left at its end
    present = schedule.factors(before)(last_step)
    fall = _fall_of(schedule, present=present, steps=max(2, after.steps - at))
    return Continued(schedule, before.steps, fall, at, scale=present)


def _fall_of(schedule: AnySchedule, *, present: float, steps: int) -> Schedule:
    """Return the fall of a schedule from 1, the present factor, to its minimum."""
    while isinstance(schedule, Joined | Continued):
        if isinstance(schedule, Continued):
            present /= schedule.scale
        schedule = schedule.second
    if isinstance(schedule, Sampled):
        raise ConfigError(
            "schedule-cannot-continue",
            problem="the schedule of this run comes from a function or a torch scheduler, which"
            " knows no run of another length",
            remedy=("choose how it goes on:", Setting("schedule.name", "cosine")),
            setting="schedule",
        )
    settings = dict(schedule.to_dict())
    shape = settings.pop("shape")
    minimum = settings.get("min_lr_ratio") or 0.0
    if present <= minimum:
        return Schedule("constant", warmup=0)
    kept: dict[str, Any] = {}
    for name in ("power", "cooldown_shape"):
        if name in settings:
            kept[name] = settings[name]
    if shape == "wsd":
        kept["cooldown"] = steps if minimum == 0.0 else max(1, steps - 1)
    return Schedule(_FALLS.get(shape, shape), warmup=0, min_lr_ratio=minimum / present, **kept)


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
    if isinstance(schedule, Joined | Continued):
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
