"""The settings of a saved run at each of its steps, from its files: what its program had, and what
its journal of changes says. Imports no torch, and executes nothing of the run's author.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from surefoot.config.batch_size import batching
from surefoot.config.data_change import data_changes, epoch_sizes
from surefoot.config.durations import Length, planned
from surefoot.config.mixture_weights import WEIGHTS
from surefoot.config.setting_change import DATA, SettingChange, in_effect
from surefoot.errors import ConfigError
from surefoot.optim.lr_multipliers import FROZEN, is_frozen
from surefoot.schedules.curves import SHAPES, Factors
from surefoot.schedules.joined import AnySchedule
from surefoot.schedules.lr_schedule import constant
from surefoot.tracking.run_reader import (
    RunFiles,
    SessionEntry,
    journal_of,
    newest_state,
    read_sessions,
)
from surefoot.train.changed_settings import (
    PLAIN,
    RULES,
    Wish,
    schedule_line,
    schedule_of,
    values_at,
)
from surefoot.train.course import Leg, course_of
from surefoot.train.ramps import at_first_step


@dataclass(frozen=True)
class Course:
    """How long a run is, and its learning rate at each step, if an optimizer of ours has one.

    counts_samples: False if only the steps are known: `length` and `batch_sizes` are then in steps.
    """

    length: Length
    schedule: AnySchedule
    factors: Factors
    lr_at: Mapping[int, float | None]  # from these steps on
    batch_sizes: Mapping[int, int]  # in samples
    counts_samples: bool = True

    def samples(self, begin: int, end: int) -> int:
        """Return the samples of the steps from `begin` to before `end`."""
        samples = 0
        for begins, ends in pairwise([*self.batch_sizes, end]):
            steps = min(ends, end) - max(begins, begin)
            samples += max(0, steps) * self.batch_sizes[begins]
        return samples

    def rate(self, step: int) -> float | None:
        lr = None
        for begin, value in self.lr_at.items():
            if begin <= step:
                lr = value
        return None if lr is None else lr * self.factors(step)

    def rates(self, steps: Iterable[int]) -> list[float]:
        """Return the rate of each step, or its factor if no optimizer of ours has one rate."""
        rates = []
        for step in steps:
            rate = self.rate(step)
            rates.append(self.factors(step) if rate is None else rate)
        return rates


LANES = "lanes"
BUCKETS = "length buckets per epoch"
"""Orders that cut each epoch into steps as a whole, as the identity of a run names them."""
_OF_EPOCHS = {DATA, "batch_size", "micro_batch_size"}
Values = list[tuple[int, Any]]
"""The values of a setting, each with the step from which on it holds."""


def values_by_step(changes: Iterable[SettingChange]) -> dict[str, Values]:
    """Return the settings that a journal changes, with all of their values. A schedule is its parts,
    as a user names them.

    >>> changes = [
    ...     SettingChange(1, 300, "optimizer.lr", 0.1, 0.01),
    ...     SettingChange(2, 500, "schedule", {"shape": "linear"}, {"shape": "wsd", "warmup": 0}),
    ... ]
    >>> values_by_step(changes)["optimizer.lr"]
    [(0, 0.1), (300, 0.01)]
    >>> values_by_step(changes)["schedule.name"], values_by_step(changes)["schedule.warmup"]
    ([(0, 'linear'), (500, 'wsd')], [(0, None), (500, 0)])
    """
    settings: dict[str, Values] = {}
    for change in in_effect(changes):
        if change.goes_back:
            continue
        both = change.values
        if all(isinstance(value, Mapping) for value in both.get("schedule", [None])):
            both |= _parts_of_schedules(*both.pop("schedule"))
        for name, (was, now) in both.items():
            values = settings.setdefault(name, [(0, was)])
            if values[-1][0] == change.from_step and len(values) > 1:
                values.pop()
            values.append((change.from_step, now))
    return settings


def _parts_of_schedules(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of each part of two schedules that differs."""
    parts = {}
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            typed = "name" if name == "shape" else name
            parts[f"schedule.{typed}"] = (was.get(name), now.get(name))
    return parts


@dataclass(frozen=True)
class RecordedSettings:
    """The settings of a saved run that can change, by dotted name.

    of_program: their values in the program of the newest session. identity: of the newest
    checkpoint, {} without one.
    """

    of_program: Mapping[str, Any]
    changes: tuple[SettingChange, ...]
    identity: Mapping[str, Any]

    def at(self, step: int) -> dict[str, Any]:
        """Return the values that hold in the step after `step` finished ones."""
        # a kill may have come before the lines of a ramp
        return at_first_step(values_at(self.of_program, self.changes, step))

    def course(self) -> Course | None:
        """Return the course of the run by its journal; None if only its program knows its schedule,
        or the sizes of the epochs in which its durations are given.
        """
        legs = []
        lr_at = {}
        batch_sizes = {}
        in_samples = self._legs(self._epochs())
        for leg in in_samples or self._legs_in_steps():
            values = self.at(leg.begin)
            if values["schedule"]["shape"] not in SHAPES:
                return None
            legs.append(replace(leg, schedule=schedule_of(values["schedule"])))
            lr_at[leg.begin] = values.get("optimizer.lr")
            batch_sizes[leg.begin] = leg.batch_size
        if not legs:
            return None
        length, schedule = self._over(legs)
        return Course(
            length,
            schedule,
            schedule.factors(length),
            lr_at,
            batch_sizes,
            counts_samples=bool(in_samples),
        )

    def known_course(self) -> Course | None:
        """Return the course of the run as `course` does, and None too if its files do not allow
        one, such as those of another program.
        """
        try:
            return self.course()
        except (ConfigError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return None

    def length_at(self, step: int) -> Length | None:
        """Return the length of the run as its settings at a step have it; None if only its program
        knows the sizes of its epochs.
        """
        until = tuple(change for change in in_effect(self.changes) if change.from_step <= step)
        legs = self._legs(replace(self, changes=until)._epochs())
        return self._over(legs)[0] if legs else None

    def _over(self, legs: Sequence[Leg]) -> tuple[Length, AnySchedule]:
        first = planned(
            legs[0].length,
            samples_per_epoch=legs[0].samples_per_epoch,
            batch_size=legs[0].batch_size,
        )
        began = replace(first, steps=self.identity["schedule_of_steps"])
        first_schedule = legs[0].schedule.resolved(began)
        return course_of(legs, first_length=first, first_schedule=first_schedule)

    def _legs(self, epochs: Sequence[tuple[int, int, str]]) -> list[Leg]:
        """Return the legs of the run with a constant schedule, one for each of `_epochs`; [] if
        only its program knows how many samples a step has.
        """
        legs = []
        for begin, samples, new_data in epochs:
            values = self.at(begin)
            batch_size = batching(values["batch_size"], None)
            if batch_size.unit != "samples":
                return []
            size = batch_size.batch_size
            leg = self._leg(begin, values["length"], samples, size)
            legs.append(replace(leg, new_data=new_data))
        return legs

    def _legs_in_steps(self) -> list[Leg]:
        """Return the legs of the run with a constant schedule, and its epochs in steps; [] if these
        are not known. Without a duration in epochs, their size makes no difference.
        """
        lines = in_effect(self.changes)
        begins = sorted({0, *(change.from_step for change in lines)})
        durations: list[Any] = []
        for begin in begins:
            values = self.at(begin)
            durations += [values["length"], *values["schedule"].values()]
        steps: int | None = 1
        if any("epoch" in str(duration) for duration in durations):
            steps = steps_per_epoch(self.identity)
            if any(change.names & _OF_EPOCHS for change in lines):  # they are cut anew
                steps = None
        if steps is None:
            return []
        return [self._leg(begin, self.at(begin)["length"], steps, 1) for begin in begins]

    def _leg(self, begin: int, length: str, samples_per_epoch: int, batch_size: int) -> Leg:
        leg = Leg(begin, length, samples_per_epoch, batch_size, constant())
        line = schedule_line(self.changes, step=begin)
        if line is None or line.from_step < begin:
            return leg
        return replace(leg, begins_schedule=line.begins_schedule, stretches=line.stretches)

    def _epochs(self) -> list[tuple[int, int, str]]:
        """Return the samples of an epoch from each step on at which settings change, and when other
        data begin there; [] if only the program knows the sizes.
        """
        present = samples_per_epoch(self.identity)
        changes_of_data = data_changes(self.changes)
        if present is None:
            return []
        if changes_of_data:
            last = changes_of_data[max(changes_of_data)]
            if last.was == self.identity["data"]:  # no checkpoint has the data that follow
                return []
        begins = sorted({0, *(change.from_step for change in in_effect(self.changes))})
        sizes = epoch_sizes(self.changes, begins, present=present)
        epochs = []
        for begin, samples in zip(begins, sizes, strict=True):
            change = changes_of_data.get(begin)
            epochs.append((begin, samples, "" if change is None else str(change.now)))
        return epochs


def recorded_settings(files: RunFiles) -> RecordedSettings:
    """Return the settings of a run whose files were read."""
    identity: Mapping[str, Any] = {} if files.state is None else files.state.identity
    of_program = _newest_values(files.sessions, identity)
    return RecordedSettings(of_program, files.changes, identity)


def read_recorded_settings(run: Path) -> RecordedSettings:
    """Return the settings of a run. Raises `CheckpointError` for an edited journal."""
    step, state = newest_state(run)
    identity: Mapping[str, Any] = {} if state is None else state.identity
    changes = journal_of(run, step, state)
    return RecordedSettings(values_of_program(run, identity), changes, identity)


def settings_at(run: Path, step: int) -> dict[str, Any]:
    """Return the settings that can change, with the values that they have in the step after `step`
    finished ones. Raises `ConfigError` for a step that the run does not have, and `CheckpointError`
    for an edited journal.
    """
    _, state = newest_state(run)
    recorded = read_recorded_settings(run)
    length = None if state is None else state.planned_steps
    course = recorded.course()
    if course is not None:
        length = course.length.steps
    if step < 0 or (length is not None and step > length):
        until = "" if length is None else f" to {length}"
        raise ConfigError(
            "settings-of-no-step",
            problem=f"step = {step}, and {run} has settings from step 0{until}",
            setting="step",
            value=step,
            path=run,
            length=length,
        )
    values = recorded.at(step)
    values.pop("optimizer.name", None)
    return values


def values_of_program(run: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the program, as the newest session had them. `identity` is that of the
    newest checkpoint.
    """
    sessions: tuple[SessionEntry, ...] = ()
    with suppress(OSError, ValueError):
        sessions = read_sessions(run)
    return _newest_values(sessions, identity)


def origins_of_present(run: Path, changes: Sequence[SettingChange]) -> dict[str, str]:
    """Return where the present values of the settings come from, as far as sessions recorded it."""
    origins: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for session in read_sessions(run):
            origins |= session.get("origins", {})
    for change in changes:
        for name in change.names:
            if name in origins:
                origins[name] = "changed"
    return origins


def with_auto(run: Path, wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes with what "auto" is for a run, as far as one of its sessions recorded it."""
    auto: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for session in read_sessions(run):
            auto |= session.get("auto", {})
    resolved = []
    for wish in wishes:
        is_known = wish.value == "auto" and wish.setting in auto
        resolved.append(
            replace(wish, value=auto[wish.setting], origin="auto") if is_known else wish
        )
    return resolved


def _newest_values(sessions: Sequence[SessionEntry], identity: Mapping[str, Any]) -> dict[str, Any]:
    for session in reversed(sessions):
        if "settings" in session:
            return {**_weights_of(identity), **_frozen_in(identity), **session["settings"]}
    return values_of_identity(identity)


def samples_per_epoch(identity: Mapping[str, Any]) -> int | None:
    """Return the samples of an epoch if every step has as many of them, else None."""
    plan = (identity.get("data") or {}).get("plan") or {}
    if plan.get("order") == "mixture":
        return sum(map(int, plan["sizes"]))
    if plan.get("order") in ("permutation per epoch", "sequential", "weighted"):
        return int(plan["samples"])
    return None


def steps_per_epoch(identity: Mapping[str, Any]) -> int | None:
    """Return the steps of an epoch if every epoch begins with a step, and the batch size never
    changed; None for other orders, and if a sampler of the user lists the batches.
    """
    plan = (identity.get("data") or {}).get("plan") or {}
    if plan.get("order") not in (LANES, BUCKETS):
        return None
    sizes = batching(identity["batch_size"], identity["micro_batch_size"])
    if plan["order"] == LANES:
        return -(-int(plan["samples"]) // sizes.batch_size)
    return -(-int(plan["batches"]) // sizes.pieces)


def values_of_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings that can change as a checkpoint has them, for a run whose
    sessions did not record those of its program.
    """
    values = {name: identity[name] for name in PLAIN if name in identity}
    values |= _weights_of(identity) | _frozen_in(identity)
    optimizer = identity.get("optimizer", {})
    for name, value in optimizer.items():
        if name not in ("decay", "lr_multipliers", "learning_rates"):
            values[f"optimizer.{name}"] = value
    if "schedule" in identity:
        values["schedule"] = identity["schedule"]
    for name, kind in RULES.items():
        values[name] = _rule_in(identity.get(name), kind)
    return values


def _weights_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a mixture by the name of their setting, {} for other data."""
    data = identity.get("data") or {}
    if (data.get("plan") or {}).get("order") != "mixture":
        return {}
    return {WEIGHTS: {name: part["weight"] for name, part in data["parts"].items()}}


def _frozen_in(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each optimizer of ours freezes, by the name of the setting. Older sessions did
    not record it.
    """
    described = identity.get("optimizer", {})
    optimizers = {f"optimizer.{name}": each for name, each in described.items()}
    optimizers["optimizer"] = described
    values: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Mapping) or "decay" not in optimizer:
            continue
        patterns: list[str] = []
        for rate in optimizer.get("lr_multipliers", ()):
            if is_frozen(rate):
                patterns += rate[FROZEN]
        values[f"{name}.{FROZEN}"] = patterns or None
    return values


def _rule_in(described: Any, kind: type[Any]) -> Any:
    """Return a rule as a setting has it; an identity also has what it scores, and when."""
    if not isinstance(described, Mapping):
        return described
    names = [field.name for field in fields(kind)]
    return {name: described[name] for name in names if name in described}
