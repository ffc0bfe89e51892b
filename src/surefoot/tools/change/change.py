"""Changes of the settings of a saved run: what a user wishes becomes lines of its journal. Imports
no torch, and executes nothing of the run's author.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surefoot.config.batch_size import batching
from surefoot.config.durations import Length, planned
from surefoot.config.setting_change import SettingChange
from surefoot.errors import CheckpointError, ConfigError
from surefoot.schedules.curves import SHAPES, Factors
from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes
from surefoot.tracking.run_reader import (
    SessionEntry,
    is_running,
    newest_state,
    read_sessions,
    run_file_not_written,
)
from surefoot.train.changed_settings import (
    PLAIN,
    Wish,
    changes_of,
    described,
    is_journal_of,
    schedule_of,
    values_at,
)
from surefoot.train.course import Leg, course_of

_SHOWN = 4  # significant digits of a rate


@dataclass(frozen=True)
class ChangePlan:
    """Changes that are not yet written, and lines about what they will do."""

    run: Path
    changes: list[SettingChange]
    lines: list[str]
    earlier: tuple[SettingChange, ...]  # the journal for which they were planned
    step: int  # of the newest checkpoint then

    def write(self) -> tuple[SettingChange, ...]:
        """Add the changes to the journal of the run, and return them. Raises `CheckpointError` if
        the file cannot be written, and `ConfigError` if the run has gone on since they were planned.
        """
        if newest_state(self.run)[0] != self.step or read_changes(self.run) != self.earlier:
            raise ConfigError(
                "change-planned-before",
                problem=f"{self.run} has gone on or was changed since this change was planned",
                remedy="make the change again",
                run=str(self.run),
                step=self.step,
            )
        if not self.changes:
            return ()
        try:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            return append_changes(self.run, [replace(change, when=when) for change in self.changes])
        except OSError as problem:
            raise run_file_not_written(self.run / CHANGES, problem) from problem


def wish_of(text: str, *, because: str = "") -> Wish:
    """Return what a user typed as SETTING=VALUE. The value is JSON, or else a text.

    >>> wish_of("optimizer.lr=1e-4").value, wish_of("length=30 epochs").value
    (0.0001, '30 epochs')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(
            "change-not-an-assignment",
            problem=f"{text!r} does not say which setting gets which value",
            remedy="write SETTING=VALUE, such as optimizer.lr=1e-4",
            value=text,
        )
    return Wish(name.strip().replace("-", "_"), _parsed(name, value.strip()), because)


def _parsed(name: str, text: str) -> Any:
    """Return a value that was typed: JSON, a list without or in parentheses, None, or a text.

    >>> _parsed("optimizer.betas", "(0.9, 0.95)"), _parsed("ema", "none"), _parsed("clip", "off")
    ([0.9, 0.95], None, 'off')
    """
    as_list = "[" + text.removeprefix("(").removesuffix(")") + "]"
    for form in (text, as_list if "," in text else text):
        with suppress(ValueError):
            return json.loads(form)
    if text.lower() == "none" or (text.lower() == "off" and name != "clip"):
        return None
    return text


def plan_changes(run: Path, wishes: Sequence[Wish]) -> ChangePlan:
    """Return the changes that wishes make of a run, from its newest checkpoint on. Nothing is
    written.

    Raises `ConfigError` for a run that trains, for a setting that cannot change, for a value that
    it cannot have, and for a finished run that would have nothing left to do.
    """
    if is_running(run):
        raise ConfigError(
            "change-of-training-run",
            problem=f"a process is training {run}",
            reason="a change holds from a checkpoint on, and the next one is not known yet",
            remedy="stop it with Ctrl-C or SIGTERM, change it, and resume it",
            run=str(run),
        )
    step, state = newest_state(run)
    if state is None:
        raise CheckpointError(
            "change-without-checkpoint",
            problem=f"{run} has no readable checkpoint, from which a change could hold",
            run=str(run),
        )
    identity = state.identity
    earlier = read_changes(run)
    if not is_journal_of(state.changes, step, earlier):
        raise CheckpointError(
            "journal-of-another-checkpoint",
            problem=f"the newest checkpoint of {run}, of step {step}, was saved after other changes than"
            f" {CHANGES} has",
            reason="the journal says which settings the run had at which step",
            remedy="restore the file from a copy of the run",
            number=0 if state.changes is None else state.changes["number"],
        )
    if earlier and earlier[-1].from_step > step:
        raise ConfigError(
            "change-before-another",
            problem=f"the newest checkpoint of {run} is of step {step}, and its journal has a change"
            f" from step {earlier[-1].from_step} on",
            reason="lines of a journal are in the order of their steps",
            remedy="resume the run until it has reached that step",
            run=str(run),
            step=step,
        )
    of_program = _values_of_program(run, identity)
    present = values_at(of_program, earlier, step)
    micro_batch_size = present["micro_batch_size"] or identity["micro_batch_size"]
    sizes = batching(present["batch_size"], micro_batch_size)
    changes = changes_of(present, wishes, from_step=step, sizes=sizes)
    now = _course_of(identity, of_program, earlier)
    then = _course_of(identity, of_program, [*earlier, *changes])
    steps = state.planned_steps if then is None else then.length.steps
    names = {change.setting for change in changes}
    if "batch_size" in names and _samples_per_epoch(identity) is None:
        raise ConfigError(
            "batch-size-fixed",
            problem=f"batch_size cannot change in {run}",
            reason="streams, lanes, batches in tokens and batches of a sampler are cut into steps from"
            " the beginning",
            setting="batch_size",
        )
    has_patience = any(name.startswith("early_stopping.") for name in names)
    if changes and state.stopped_early and not has_patience:
        raise ConfigError(
            "change-after-early-stopping",
            problem=f"early stopping has ended {run} at step {step}",
            reason="no step is left in which the change would hold",
            remedy="change early_stopping.patience too",
            run=str(run),
            step=step,
        )
    is_longer = has_patience or (then is None and "length" in names)
    if changes and step >= steps and not is_longer:
        raise ConfigError(
            "change-of-finished-run",
            problem=f"all {steps} steps of {run} are completed",
            reason="no step is left in which the change would hold",
            remedy="change its length too, such as length='NUMBER steps'",
            run=str(run),
            step=step,
        )
    lines = _lines_about_present(wishes, names)
    for number, change in enumerate(changes, start=len(earlier) + 1):
        lines.append(described(replace(change, number=number)))
    if changes and now is not None and then is not None:
        lines += _comparison(now, then, step)
    return ChangePlan(run, changes, lines, earlier, step)


def _lines_about_present(wishes: Sequence[Wish], names: Collection[str]) -> list[str]:
    """Return a line for each wish that changes nothing, because the setting has this value."""
    lines = []
    for wish in wishes:
        group = wish.setting.partition(".")[0]
        if wish.setting not in names and group not in names:
            lines.append(f"{wish.setting} has this value already")
    return lines


def settings_at(run: Path, step: int) -> dict[str, Any]:
    """Return the settings that can change, with the values that they have in the step after `step`
    finished ones.
    """
    _, state = newest_state(run)
    identity = {} if state is None else state.identity
    values = values_at(_values_of_program(run, identity), read_changes(run), step)
    values.pop("optimizer.name", None)
    return values


def _values_of_program(run: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the program, as the newest session had them."""
    sessions: tuple[SessionEntry, ...] = ()
    with suppress(OSError, ValueError):
        sessions = read_sessions(run)
    for session in reversed(sessions):
        if "settings" in session:
            return dict(session["settings"])
    return values_of_identity(identity)


@dataclass(frozen=True)
class _Course:
    """How long a run is, and its learning rate at each step, if an optimizer of ours has one."""

    length: Length
    factors: Factors
    lr_at: Mapping[int, float | None]  # from these steps on

    def rate(self, step: int) -> float | None:
        lr = None
        for begin, value in self.lr_at.items():
            if begin <= step:
                lr = value
        return None if lr is None else lr * self.factors(step)


def _course_of(
    identity: Mapping[str, Any], of_program: Mapping[str, Any], changes: Sequence[SettingChange]
) -> _Course | None:
    """Return the course of a run by its journal; None if only its program knows the sizes of its
    epochs or its schedule.
    """
    samples = _samples_per_epoch(identity)
    begins = sorted({0, *(change.from_step for change in changes)})
    if samples is None:
        return None
    legs = []
    lr_at = {}
    for begin in begins:
        values = values_at(of_program, changes, begin)
        if values["schedule"]["shape"] not in SHAPES:
            return None
        batch_size = batching(values["batch_size"], None)
        if batch_size.unit != "samples":
            return None
        schedule = schedule_of(values["schedule"])
        legs.append(Leg(begin, values["length"], batch_size.batch_size, schedule))
        lr_at[begin] = values.get("optimizer.lr")
    first = planned(legs[0].length, samples_per_epoch=samples, batch_size=legs[0].batch_size)
    began = replace(first, steps=identity["schedule_of_steps"])
    first_schedule = legs[0].schedule.resolved(began)
    length, schedule = course_of(legs, first_length=first, first_schedule=first_schedule)
    return _Course(length, schedule.factors(length), lr_at)


def _samples_per_epoch(identity: Mapping[str, Any]) -> int | None:
    """Return the samples of an epoch if every step has as many of them, else None."""
    plan = identity["data"]["plan"]
    if plan.get("order") == "mixture":
        return sum(map(int, plan["sizes"]))
    if plan.get("order") in ("permutation per epoch", "sequential", "weighted"):
        return int(plan["samples"])
    return None


def _comparison(now: _Course, then: _Course, step: int) -> list[str]:
    """Return lines about the steps and the learning rates before and after changes."""
    lines = []
    if now.length.steps != then.length.steps:
        lines.append(f"length: {now.length.steps:,} -> {then.length.steps:,} steps")
    left = then.length.steps - step
    samples = left * then.length.batch_size
    lines.append(f"{left:,} steps with {samples:,} samples are left from step {step:,} on")
    next_now = now.rate(min(step, now.length.steps - 1))
    next_then = then.rate(step)
    last_now = now.rate(now.length.steps - 1)
    last_then = then.rate(then.length.steps - 1)
    if None not in (next_now, next_then, last_now, last_then) and left > 0:
        lines.append(
            f"lr: {next_now:.{_SHOWN}g} -> {next_then:.{_SHOWN}g} in the next step,"
            f" {last_now:.{_SHOWN}g} -> {last_then:.{_SHOWN}g} in the last"
        )
    return lines


def values_of_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings that can change as a checkpoint has them, for a run whose
    sessions did not record those of its program.
    """
    values = {name: identity[name] for name in PLAIN if name in identity}
    optimizer = identity.get("optimizer", {})
    for name, value in optimizer.items():
        if name not in ("decay", "lr_multipliers", "learning_rates"):
            values[f"optimizer.{name}"] = value
    values["schedule"] = identity["schedule"]
    rule = identity.get("early_stopping")
    if isinstance(rule, Mapping):
        for name in ("patience", "min_delta"):
            values[f"early_stopping.{name}"] = rule[name]
    return values
