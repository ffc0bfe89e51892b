"""Changes of the settings of a saved run: what a user wishes becomes lines of its journal. Imports
no torch, and executes nothing of the run's author.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surefoot.checkpoint.state_json import SavedState
from surefoot.config.accepted_changes import FROM_ITS_WEIGHTS
from surefoot.config.batch_size import batching
from surefoot.config.behavior import newest_behavior
from surefoot.config.closest import closest
from surefoot.config.data_change import data_changes
from surefoot.config.durations import Length
from surefoot.config.mixture_weights import SLOTS, WEIGHTS, first_of_next_block
from surefoot.config.setting_change import DATA, SettingChange, in_effect
from surefoot.errors import CheckpointError, Command, ConfigError, Remedy, Setting
from surefoot.tools.change.data_change import change_of_data
from surefoot.tools.change.frozen_parts import refuse_unknown_parts
from surefoot.tools.change.preview import are_equal, preview
from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes
from surefoot.tracking.run_reader import is_running, journal_of, newest_state, run_file_not_written
from surefoot.train.changed_settings import (
    RULES,
    Wish,
    changes_of,
    described,
    is_optimizer_name,
    rules_from,
    schedule_line,
)
from surefoot.train.next_epoch import changes_with_epochs, next_epoch
from surefoot.train.patience import feedback, load_stopping, rules_of, watched
from surefoot.train.ramps import refuse_change_before_ramps
from surefoot.train.recorded_settings import (
    RecordedSettings,
    origins_of_present,
    values_of_program,
    with_auto,
)
from surefoot.train.skipped_steps import SKIP_STEPS, changes_of_skips


@dataclass(frozen=True)
class ChangePlan:
    """Changes that are not yet written, and lines about what they will do."""

    run: Path
    changes: list[SettingChange]
    lines: list[str]
    earlier: tuple[SettingChange, ...]  # the journal for which they were planned
    saved_step: int | None  # of the newest checkpoint then; None: the run itself has planned them

    def write(self) -> tuple[SettingChange, ...]:
        """Add the changes to the journal of the run, and return them. Raises `CheckpointError` if
        the file cannot be written, and `ConfigError` if the run has gone on since they were planned.
        """
        step, _ = newest_state(self.run)
        has_gone_on = self.saved_step is not None and step != self.saved_step
        if has_gone_on or read_changes(self.run) != self.earlier:
            raise planned_before(self.run, step=step)
        return write_lines(self.run, self.changes)


def write_lines(run: Path, lines: Sequence[SettingChange]) -> tuple[SettingChange, ...]:
    """Add lines to the journal of a run with the present time, and return them. Raises
    `CheckpointError` if the file cannot be written.
    """
    if not lines:
        return ()
    try:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return append_changes(run, [replace(line, when=when) for line in lines])
    except OSError as problem:
        raise run_file_not_written(run / CHANGES, problem) from problem


def planned_before(run: Path, *, step: int) -> ConfigError:
    """Return the error for a change of a run that has gone on from step `step` since it was
    planned.
    """
    return ConfigError(
        "change-planned-before",
        problem=f"{run} has gone on or was changed since this change was planned",
        remedy="make the change again",
        run=str(run),
        step=step,
    )


def wish_of(text: str, *, because: str = "") -> Wish:
    """Return what a user typed as SETTING=VALUE. The value is JSON, or else a text.

    >>> wish_of("optimizer.lr=1e-4").value, wish_of("length=30 epochs").value
    (0.0001, '30 epochs')
    >>> wish_of("train-data.weights.stack-v2=0.5").setting
    'train_data.weights.stack-v2'
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(
            "change-not-an-assignment",
            problem=f"{text!r} does not say which setting gets which value",
            remedy="write SETTING=VALUE, such as optimizer.lr=1e-4",
            value=text,
        )
    setting = name.strip().replace("-", "_")
    if setting.startswith(f"{WEIGHTS}."):  # the program names the data sets of a mixture
        setting = WEIGHTS + name.strip()[len(WEIGHTS) :]
    return Wish(setting, _parsed(name, value.strip()), because)


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


def plan_changes(run: Path, wishes: Sequence[Wish], *, step: int | None = None) -> ChangePlan:
    """Return the changes that wishes make of a run, from its newest checkpoint on. Nothing is
    written. `step` is that from which they hold in a run that trains.

    Raises `ConfigError` for a run that trains, for a setting that cannot change, for a value that
    it cannot have, and for a finished run that would have nothing left to do.
    """
    if step is None and is_running(run):
        raise ConfigError(
            "change-of-training-run",
            problem=f"a process is training {run}",
            reason="no other process can resume it",
            remedy=[
                "stop it with Ctrl-C or SIGTERM",
                ("change it while it trains:", Command(f"surefoot change {run} SETTING=VALUE")),
            ],
            run=str(run),
        )
    saved_step, state = newest_state(run)
    trains = step is not None
    if step is None:
        step = saved_step
    if state is None:
        raise CheckpointError(
            "change-without-checkpoint",
            problem=f"{run} has no readable checkpoint, from which a change could hold",
            run=str(run),
        )
    earlier = journal_of(run, saved_step, state)
    # a run that went back to a later step than that of its checkpoint changes from there on
    backs = [change.from_step for change in in_effect(earlier) if change.goes_back]
    plan = plan_from(run, wishes, step=max([step, *backs]), state=state, earlier=earlier)
    return replace(plan, saved_step=None if trains else saved_step)


def plan_from(
    run: Path,
    wishes: Sequence[Wish],
    *,
    step: int,
    state: SavedState,
    earlier: tuple[SettingChange, ...],
) -> ChangePlan:
    """Return the changes that wishes make of a run from a step on. `state` is that of the checkpoint
    from which it goes on, and `earlier` has the changes in force.
    """
    identity = state.identity
    of_program = values_of_program(run, identity)
    refuse_change_before_ramps(run, of_program, earlier)
    recorded = RecordedSettings(of_program, earlier, identity)
    wishes = with_auto(run, wishes)
    origins = origins_of_present(run, earlier)
    other_wishes = [wish for wish in wishes if wish.setting != DATA]
    with naming_way_out():
        changes = _wished(recorded, other_wishes, state, step, origins)
    refuse_unknown_parts(run, changes, state)
    if changes_no_rate(recorded, changes, step=step):
        changes = []
    now = recorded.course()
    then = replace(recorded, changes=(*earlier, *changes)).course()
    steps = state.planned_steps if then is None else then.length.steps
    wish_for_data = _wish_for_data(wishes, changes, earlier, step=step)
    with_data = changes
    lines_about_data: list[str] = []
    if wish_for_data is not None:
        with_others = replace(recorded, changes=(*earlier, *changes))
        of_data, lines_about_data = change_of_data(run, wish_for_data, with_others, step=step)
        with_data = [*changes, *of_data]
    names = {change.setting for change in with_data}
    is_steered = state.stopped_early or not names.isdisjoint(RULES)
    if with_data and is_steered and _is_out_of_patience(recorded.at(step), changes, state):
        raise ConfigError(
            "change-after-early-stopping",
            problem=f"early stopping has ended {run} at step {step}",
            reason="no step is left in which the change would hold",
            remedy="change early_stopping.patience too, or write early_stopping=off",
            run=str(run),
            step=step,
        )
    last_number = 0 if state.changes is None else int(state.changes["number"])
    not_saved = {change.setting for change in earlier if change.number > last_number}
    is_longer = then is None and "length" in names | not_saved
    if with_data and step >= steps and not is_longer:
        raise ConfigError(
            "change-of-finished-run",
            problem=f"all {steps} steps of {run} are completed",
            reason="no step is left in which the change would hold",
            remedy="change its length too, such as length='NUMBER steps'",
            run=str(run),
            step=step,
        )
    lines = _lines_about_present(wishes, names, schedule_line(earlier, step=step))
    for number, change in enumerate(with_data, start=len(earlier) + 1):
        lines.append(described(replace(change, number=number)))
    others = [change for change in changes if change.setting != SKIP_STEPS]
    lines += _lines_about_next_epoch(others, step, steps=None if is_longer else steps)
    lines += lines_about_data
    has_other_length = DATA in names and then is not None and then.length.in_epochs
    if with_data and not has_other_length:  # which no file of the run knows
        lines += preview(now, then, step, in_effect([*earlier, *with_data]))
    at_step = replace(recorded, changes=(*earlier, *changes)).length_at(step)
    if at_step is not None and WEIGHTS in names:
        lines += _lines_about_weights(at_step, step)
    return ChangePlan(run, with_data, lines, earlier, step)


@contextmanager
def naming_way_out() -> Iterator[None]:
    """Let the error about a setting that cannot change name the one that is meant, or another way to
    its value.
    """
    try:
        yield
    except ConfigError as problem:
        if problem.code == "setting-cannot-change":
            meant = _names_meant(problem.fields["setting"], problem.fields["names"])
            problem.fields["meant"] = meant
            problem.remedies = tuple(_ways_out(problem.fields["setting"], meant))
        raise


def _names_meant(name: str, known: Sequence[str]) -> list[str]:
    if name in _roles() or is_optimizer_name(name):
        return []
    of_parts = [each for each in known if each.rpartition(".")[2] == name]
    near = closest(name, known)
    if of_parts or near is None:
        return of_parts
    return [near]


def _ways_out(name: str, meant: Sequence[str]) -> Iterator[Remedy]:
    if meant:
        yield f"did you mean {' or '.join(meant)}?"
    role = _roles().get(name)
    if role not in (None, "identity"):
        yield ("a resume takes another value without a change:", Setting(name, "VALUE"))
    elif not meant or "." in name:
        yield FROM_ITS_WEIGHTS


def _roles() -> dict[str, str]:
    from surefoot.train.run_settings import RunSettings  # imports torch

    return {field.name: field.metadata["role"] for field in fields(RunSettings)}


def changes_no_rate(
    recorded: RecordedSettings, changes: Sequence[SettingChange], *, step: int
) -> bool:
    """Return True if the only change stretches a schedule, which already runs over the whole length."""
    if len(changes) != 1 or not changes[0].stretches:
        return False
    then = replace(recorded, changes=(*recorded.changes, *changes))
    return are_equal(recorded.course(), then.course(), step)


def _wished(
    recorded: RecordedSettings,
    wishes: Sequence[Wish],
    state: SavedState,
    step: int,
    origins: Mapping[str, str],
) -> list[SettingChange]:
    """Return the changes that wishes make from a step on, or from the next epoch on where a setting
    waits for it.
    """
    skips = [wish for wish in wishes if wish.setting == SKIP_STEPS]
    wishes = [wish for wish in wishes if wish.setting != SKIP_STEPS]
    waiting = changes_with_epochs(recorded.identity)
    if any(wish.setting in waiting for wish in wishes):
        waiting = ("batch_size", "micro_batch_size")  # these two fit each other
    at_once = [wish for wish in wishes if wish.setting not in waiting]
    with_epoch = [wish for wish in wishes if wish.setting in waiting]
    changes = _changes_from(recorded, step, at_once, origins)
    if with_epoch:
        begin = next_epoch(recorded, state, step)
        then = replace(recorded, changes=(*recorded.changes, *changes))
        changes += _changes_from(then, begin, with_epoch, origins)
    for wish in skips:
        lines = (*recorded.changes, *changes)
        course = replace(recorded, changes=lines).course()
        steps = state.planned_steps if course is None else course.length.steps
        changes += changes_of_skips(wish.value, lines, step=step, steps=steps, because=wish.because)
    return changes


def _changes_from(
    recorded: RecordedSettings, step: int, wishes: Sequence[Wish], origins: Mapping[str, str]
) -> list[SettingChange]:
    """Return the changes that wishes make of the settings from a step on."""
    values = recorded.at(step)
    if values["micro_batch_size"] is None:
        values["micro_batch_size"] = recorded.identity["micro_batch_size"]
    total = batching(values["batch_size"], None)
    micro_batch_size = batching(values["micro_batch_size"], None).batch_size
    sizes = replace(total, micro_batch_size=micro_batch_size)
    return changes_of(
        values, wishes, from_step=step, sizes=sizes, earlier=recorded.changes, origins=origins
    )


def _lines_about_next_epoch(
    changes: Sequence[SettingChange], step: int, *, steps: int | None
) -> list[str]:
    """Return a line about a change that waits for the next epoch. Raises `ConfigError` if the run
    has `steps` steps, and so ends before.
    """
    if not changes or changes[-1].from_step == step:
        return []
    last = changes[-1]
    if steps is not None and last.from_step >= steps:
        raise ConfigError(
            "change-after-last-step",
            problem=f"{last.setting} changes with the next epoch, from step {last.from_step} on, and"
            f" the run has {steps} steps",
            reason="no step is left in which the change would hold",
            remedy="change its length too, such as length='NUMBER epochs'",
            setting=last.setting,
            step=last.from_step,
        )
    return [
        f"{last.setting} changes with the next epoch, at step {last.from_step:,}: in this order, an"
        " epoch is cut into steps as a whole"
    ]


def _is_out_of_patience(
    present: Mapping[str, Any], changes: Sequence[SettingChange], state: SavedState
) -> bool:
    """Return True if a rule of early stopping that holds after changes has ended the run. Raises
    `ConfigError` for rules that the splits of the run cannot have.
    """
    values = dict(present)
    for change in changes:
        values[change.setting] = change.now
    rules = rules_of(rules_from("early_stopping", values.get("early_stopping")))
    plateau = rules_from("plateau", values.get("plateau"))
    _, stopping = watched(
        None, rules, keep_best=1, splits=state.splits, at_end=(), behavior=newest_behavior()
    )
    feedback(plateau, rules, splits=state.splits)
    load_stopping(stopping, state.stopping, monitor=state.monitor)
    return any(rule.exhausted for rule in stopping)


def _wish_for_data(
    wishes: Sequence[Wish],
    changes: Sequence[SettingChange],
    earlier: Sequence[SettingChange],
    *,
    step: int,
) -> Wish | None:
    """Return the wish for other data, unless the journal has it for the same reason. An earlier one
    for the next epoch is made again if the `changes` move the end of the epoch.
    """
    to_come = data_changes(earlier)
    for wish in reversed(wishes):
        if wish.setting == DATA:
            made = [(change.now, change.because) for change in to_come.values()]
            return None if (wish.value, wish.because) in made else wish
    if any(change.setting == "batch_size" for change in changes):
        for begin, change in to_come.items():
            if begin > step:
                return Wish(DATA, change.now, change.because)
    return None


def _lines_about_present(
    wishes: Sequence[Wish], names: Collection[str], schedule: SettingChange | None
) -> list[str]:
    """Return a line for each wish that changes nothing, because the setting has this value.
    `schedule` is the line of the present schedule.
    """
    lines = []
    for wish in wishes:
        # a wish for a part, such as schedule.name, changes the whole
        if any(f"{wish.setting}.".startswith(f"{name}.") for name in names):
            continue
        lines.append(f"{wish.setting} has this value already")
        if wish.setting == "schedule.name" and schedule is not None:
            lines.append(
                f"the schedule began at step {schedule.from_step:,}: another --because begins it anew"
            )
    return lines


def _lines_about_weights(length: Length, step: int) -> list[str]:
    """Return a line about the first sample of a mixture with the weights that are set at a step."""
    samples = length.samples_before(step)
    first = first_of_next_block(samples)
    if first == samples:
        return []
    first_step = step + (first - samples) // length.batch_size
    return [
        f"the new weights hold from sample {first:,} on, in step {first_step:,}: a block of"
        f" {SLOTS:,} samples is completed first"
    ]
