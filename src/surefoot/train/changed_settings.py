"""The settings of a run at each step, from its program and its journal of changes.

A program and a journal together say what holds when: the program names the value at the beginning
or the value at present, and the journal knows both. Values are JSON, by dotted names. Imports no
torch.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from surefoot.config.averaging import average_of_average
from surefoot.config.batch_size import Batching, batching
from surefoot.config.data_change import UNCHANGED
from surefoot.config.mixture_weights import WEIGHTS, quotas
from surefoot.config.ramps import ramp_of
from surefoot.config.setting import names_that_change, number
from surefoot.config.setting_change import (
    DATA,
    SCHEDULE,
    SettingChange,
    at_beginning,
    in_effect,
)
from surefoot.config.train_settings import TrainSettings, problem_of_value
from surefoot.errors import Command, ConfigError, Setting, out_of_range
from surefoot.optim.lr_multipliers import FROZEN, frozen, frozen_patterns, with_frozen
from surefoot.optim.optimizers import AVERAGING, OptimizerSpec, named
from surefoot.schedules.curves import SHAPES
from surefoot.schedules.joined import AnySchedule
from surefoot.schedules.lr_schedule import Schedule, constant
from surefoot.train.patience import EarlyStopping, ReduceLROnPlateau
from surefoot.train.skipped_steps import SKIP_STEPS
from surefoot.train.skipped_steps import in_words as skipping_in_words

if TYPE_CHECKING:  # imports torch
    from surefoot.train.run_settings import RunSettings

Values = Mapping[str, Any]  # of settings that can change, by name
_OF_OPTIMIZER = ("lr", "weight_decay")
RULES: Mapping[str, type[EarlyStopping] | type[ReduceLROnPlateau]] = {
    "early_stopping": EarlyStopping,
    "plateau": ReduceLROnPlateau,
}
_RULE: Values = {"monitor": "min val/loss", "patience": 3}  # an example
_SCHEDULE_NAMES = (SCHEDULE, f"{SCHEDULE}.name")
STRETCH = "stretch"  # a wish for the schedule: the present one over the whole new length
_NAME_OF_SHAPE = {"shape": "name"}  # in a schedule's dictionary, and for a user
_CHOSEN_BY_RUN = ("batch_size", "micro_batch_size")  # where they are None
PLAIN = names_that_change(TrainSettings)


@dataclass(frozen=True)
class Wish:
    """What a user asks for: a setting, its new value, and the reason."""

    setting: str
    value: Any
    because: str = ""
    origin: str = "given"  # "auto" if the value was chosen for the user


@dataclass(frozen=True)
class SegmentSettings:
    """The settings that hold from step `begin` on.

    begins_schedule: the schedule begins there anew. stretches: from there on it is that of a run
    that had this length from the start.
    new_data: when other data begin there, as in `config/data_change.py`.
    skips: the range of steps that are passed over, or None if the steps are made.
    """

    begin: int
    settings: "RunSettings"
    begins_schedule: bool = False
    stretches: bool = False
    new_data: str = ""
    skips: str | None = None


def can_change(name: str) -> bool:
    """Return True for a setting that a journal can name, of this run or another."""
    whole, _, part = name.partition(".")
    of_whole = (SCHEDULE, "optimizer", "model", *RULES)
    return name in PLAIN or (whole in of_whole and part != "")


# --- of settings ----------------------------------------------------------------------------------


def changeable(settings: "RunSettings") -> dict[str, Any]:
    """Return the value of every setting that can change while the run goes on."""
    from surefoot.data.mixture import Mixture  # imports torch

    values = {name: getattr(settings, name) for name in PLAIN}
    for prefix, spec in specs_of(settings.optimizer).items():
        values[f"{prefix}name"] = spec.name  # cannot change; says which settings there are
        values[f"{prefix}lr"] = spec.lr
        values[f"{prefix}weight_decay"] = spec.weight_decay
        for name, value in spec.settings.items():
            values[f"{prefix}{name}"] = value
        values[f"{prefix}{FROZEN}"] = frozen_patterns(spec.lr_multipliers) or None
    for name, value in (settings.model_settings or {}).items():
        values[f"model.{name}"] = value
    values["schedule"] = (settings.schedule or constant()).to_dict()
    if isinstance(settings.train_data, Mixture):
        values[WEIGHTS] = settings.train_data.weights_by_name()
    values["plateau"] = None if settings.plateau is None else asdict(settings.plateau)
    values["early_stopping"] = None
    if isinstance(settings.early_stopping, EarlyStopping):
        values["early_stopping"] = asdict(settings.early_stopping)
    elif settings.early_stopping is not None:
        values["early_stopping"] = [asdict(rule) for rule in settings.early_stopping]
    as_json: dict[str, Any] = json.loads(json.dumps(values))
    return as_json


def origins_of(values: Values, of_settings: Mapping[str, str]) -> dict[str, str]:
    """Return where the values of settings that can change come from. The origin of a whole, such as
    `optimizer`, is that of its parts.

    >>> origins_of({"optimizer.lr": 0.1}, {"optimizer": "given", "clip": "default"})
    {'optimizer.lr': 'given'}
    """
    return {name: of_settings[name.partition(".")[0]] for name in values}


def with_values(settings: "RunSettings", values: Values) -> "RunSettings":
    """Return the settings with other values of some that can change. Raises `ConfigError` for a
    value that a setting cannot have.
    """
    present = changeable(settings)
    changed = {name: value for name, value in values.items() if value != present[name]}
    if not changed:
        return settings
    keywords = {name: value for name, value in changed.items() if name in PLAIN}
    for name in RULES:
        if name in changed:
            keywords[name] = rules_from(name, changed[name])
    of_model = _parts(changed, "model.")
    if of_model:
        keywords["model_settings"] = {**(settings.model_settings or {}), **of_model}
        keywords["identity"] = _with_model(settings.identity or {}, of_model)
    specs = {}
    for prefix, spec in specs_of(settings.optimizer).items():
        parts = _parts(changed, prefix)
        if parts:
            specs[prefix] = _optimizer(spec, parts)
    if specs:
        keywords["optimizer"] = with_specs(settings.optimizer, specs)
    if "schedule" in changed:
        keywords["schedule"] = schedule_of(changed["schedule"])
    if WEIGHTS in changed:
        keywords["train_data"] = settings.train_data.with_weights(changed[WEIGHTS])
    return replace(settings, **keywords)


def _with_model(identity: Mapping[str, Any], of_model: Values) -> dict[str, Any]:
    """Return what a program says of itself, with the present settings of its model."""
    described = identity.get("model")
    if not isinstance(described, Mapping):
        return dict(identity)
    present = {name: value for name, value in of_model.items() if name in described}
    return {**identity, "model": {**described, **present}}


def _parts(values: Values, prefix: str) -> dict[str, Any]:
    """Return the values whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def specs_of(optimizer: Any) -> dict[str, OptimizerSpec]:
    """Return the optimizers of ours, by the prefix of the names of their settings. With several
    optimizers it has the name of the model.

    >>> adam = named("adam", lr=0.1)
    >>> [*specs_of(adam)], [*specs_of({"one": adam, "other": adam})]
    (['optimizer.'], ['optimizer.one.', 'optimizer.other.'])
    """
    specs = {}
    for name, source in _sources(optimizer).items():
        if isinstance(source, OptimizerSpec):
            specs[name] = source
    return specs


def with_specs(optimizer: Any, specs: Mapping[str, OptimizerSpec]) -> Any:
    """Return the setting `optimizer` with other optimizers of ours, by their prefixes."""
    sources = _sources(optimizer) | dict(specs)
    if isinstance(optimizer, Mapping):
        return dict(zip(optimizer, sources.values(), strict=True))
    return sources["optimizer."]


def _sources(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, Mapping):
        return {"optimizer.": optimizer}
    if len(optimizer) == 1:
        (sole,) = optimizer.values()
        return {"optimizer.": sole}
    return {f"optimizer.{name}.": source for name, source in optimizer.items()}


def _optimizer(spec: OptimizerSpec, parts: Values) -> OptimizerSpec:
    settings = dict(spec.settings)
    for name, value in parts.items():
        if name not in (*_OF_OPTIMIZER, FROZEN):
            settings[name] = value
    lr_multipliers = spec.lr_multipliers
    if FROZEN in parts:
        lr_multipliers = with_frozen(lr_multipliers, parts[FROZEN] or ())
    return named(
        spec.name,
        lr=parts.get("lr", spec.lr),
        weight_decay=parts.get("weight_decay", spec.weight_decay),
        settings=settings,
        decay=spec.decay,
        lr_multipliers=lr_multipliers,
    )


def rules_from(name: str, described: Any) -> Any:
    """Return the rule that a JSON value describes, or several, or None. Raises `ConfigError` for one
    that cannot be.
    """
    if isinstance(described, list) and name == "early_stopping":
        return [_rule(name, each) for each in described]
    return None if described is None else _rule(name, described)


def _rule(name: str, described: Any) -> EarlyStopping | ReduceLROnPlateau:
    kind = RULES[name]
    if not isinstance(described, Mapping):
        meaning = f"a rule, such as {name}.monitor='min val/loss' {name}.patience=3, or off"
        raise out_of_range(name, described, meaning)
    _refuse_incomplete(name, described)
    unknown = set(described) - {field.name for field in fields(kind)}
    if unknown:
        raise _cannot_change(
            f"{name}.{min(unknown)}", [f"{name}.{each.name}" for each in fields(kind)]
        )
    return kind(**described)


def _refuse_incomplete(name: str, described: Values, *, before: Values = _RULE) -> None:
    """Raise `ConfigError` if a rule has too few parts. The error names those of the rule before."""
    missing = [part for part in ("monitor", "patience") if part not in described]
    if missing:
        values = {**_RULE, **before}
        parts = [f"{name}.{part}={shlex.quote(in_words(values[part]))}" for part in missing]
        raise ConfigError(
            "rule-incomplete",
            problem=f"{name} has no {' and no '.join(missing)}",
            remedy=f"add {' '.join(parts)}",
            setting=name,
            value=dict(described),
            missing=missing,
            example={part: values[part] for part in missing},
        )


def schedule_of(described: Mapping[str, Any]) -> AnySchedule:
    """Return the schedule that its `to_dict` describes. Raises `ConfigError` for one that cannot
    be.
    """
    values: dict[str, Any] = {}
    for name, value in described.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    unknown = set(values) - {field.name for field in fields(Schedule)}
    if unknown:
        name = min(unknown)
        raise _cannot_change(
            f"schedule.{name}", [f"schedule.{each.name}" for each in fields(Schedule)]
        )
    return Schedule(**values)


# --- of a journal ---------------------------------------------------------------------------------


def history_of(
    settings: "RunSettings", changes: Sequence[SettingChange], *, shown: str = "RUN"
) -> tuple[SegmentSettings, ...]:
    """Return the settings of a run from each step on at which they changed.

    `settings` are those of the program: each has its value at the beginning or its value at
    present. `shown` is the run's directory. Raises `ConfigError` for another value.
    """
    of_program = changeable(settings)
    beginning = at_beginning(changes)
    beginning.pop(SKIP_STEPS, None)  # no program has it
    at_present = dict(beginning)
    for change in in_effect(changes):
        for name, (_, now) in change.values.items():
            at_present[name] = now
    for name, value in beginning.items():
        if name not in of_program:
            raise _cannot_change(name, of_program)
        # the run has chosen it at its beginning, or where it follows from another
        is_open = of_program[name] == "auto" or (
            name in _CHOSEN_BY_RUN and of_program[name] is None
        )
        allowed = (_in_full(value), _in_full(at_present[name]))
        if not is_open and _in_full(of_program[name]) not in allowed:
            raise _neither(name, of_program[name], value, at_present[name], shown=shown)
    history = [SegmentSettings(0, with_values(settings, beginning))]
    for change in in_effect(changes):
        values = {name: now for name, (_, now) in change.values.items()}
        skips = values.pop(SKIP_STEPS, history[-1].skips)
        changed = with_values(history[-1].settings, values)
        begins_schedule = change.begins_schedule
        stretches = change.stretches
        new_data = ""
        if change.from_step == history[-1].begin and len(history) > 1:
            before = history.pop()
            begins_schedule |= before.begins_schedule
            stretches |= before.stretches
            new_data = before.new_data
        if change.setting == DATA:
            new_data = "" if change.now == UNCHANGED else change.now
        segment = SegmentSettings(
            change.from_step, changed, begins_schedule, stretches, new_data, skips
        )
        history.append(segment)
    return tuple(history)


def _in_full(value: Any) -> Any:
    """Return a value, of a schedule with the defaults of its shape."""
    if isinstance(value, Mapping) and value.get("shape") in SHAPES:
        defaults = json.loads(json.dumps(dict(SHAPES[value["shape"]].takes)))
        return {**defaults, **value}
    return value


def _neither(
    name: str, value: Any, at_beginning: Any, at_present: Any, *, shown: str
) -> ConfigError:
    line = ["surefoot", "change", shown, *assignments({name: None}, {name: value})]
    return ConfigError(
        "changed-setting-differs",
        problem=f"{name} is {in_words(value)} in the program; it was {in_words(at_beginning)} at the"
        f" beginning of this run and is {in_words(at_present)} by its journal of changes",
        remedy=[
            Command(shlex.join(line)),
            ("leave the program as it was, or write", Setting(name, at_present)),
        ],
        setting=name,
        value=value,
        at_beginning=at_beginning,
        at_present=at_present,
    )


def values_at(values: Values, changes: Sequence[SettingChange], step: int) -> dict[str, Any]:
    """Return the values of settings that hold in the step after `step` finished ones. `values` are
    those of the program.
    """
    at_step: dict[str, Any] = {}
    for change in in_effect(changes):
        if change.from_step <= step:
            for name, (_, now) in change.values.items():
                at_step[name] = now
    return {**values, **at_beginning(changes), **at_step}


# --- of a wish ------------------------------------------------------------------------------------


def changes_of(
    values: Values,
    wishes: Sequence[Wish],
    *,
    from_step: int,
    sizes: Batching,
    earlier: Sequence[SettingChange] = (),
    origins: Mapping[str, str] = MappingProxyType({}),
) -> list[SettingChange]:
    """Return the changes that a user's wishes make of the present values. A wish for the present
    value is none, unless the setting is to change later: then it keeps this value. A wish for a
    schedule by its name begins it anew, unless it repeats one, and all others change nothing.

    `sizes` are those of the present steps, `earlier` is the journal, and `origins` says where the
    present values come from, as far as it is known. Raises `ConfigError` for a setting that is
    unknown or cannot change, and for a value that it cannot have.
    """
    to_come = {change.setting for change in in_effect(earlier) if change.from_step > from_step}
    by_setting = {wish.setting: wish for wish in wishes}  # of one named twice, the last value
    wishes = list(by_setting.values())
    names_schedule = any(wish.setting in _SCHEDULE_NAMES for wish in wishes)
    changes: list[SettingChange] = []
    for wish in _with_whole_weights(
        values, _with_whole_rules(values, _with_whole_schedules(values, wishes), earlier)
    ):
        name = wish.setting
        if name not in values or is_optimizer_name(name):
            names = [each for each in values if not is_optimizer_name(each)]
            raise _cannot_change(name, [*names, "schedule.name"])
        was = values[name]
        if name == "schedule" and wish.value == STRETCH:
            changes.append(
                SettingChange(0, from_step, name, was, was, because=wish.because, stretches=True)
            )
            continue
        now = json.loads(json.dumps(wish.value))
        if isinstance(now, str) and name.rpartition(".")[2] == FROZEN:
            now = now.replace(",", " ").split()
        _check_value(values, name, now)
        begins_anew = name == SCHEDULE and names_schedule
        if _in_full(now) == _in_full(was) and not begins_anew and name not in to_come:
            continue
        follows = {}
        if name == "batch_size" and not any(
            other.setting == "micro_batch_size" for other in wishes
        ):
            past = [change for change in in_effect(earlier) if change.from_step <= from_step]
            follows = _micro_batches_of(sizes, now, chosen=_chosen_micro_batch_size(sizes, past))
        change = SettingChange(0, from_step, name, was, now, follows=follows, because=wish.because)
        if name in origins:
            change = replace(change, origins=[origins[name], wish.origin])
        changes.append(change)
    if all(_repeats_schedule(change, earlier) for change in changes):
        return []
    if not any(change.setting in ("batch_size", "micro_batch_size") for change in changes):
        return changes
    lines = [*earlier, *changes]
    for step in sorted({from_step, *(line.from_step for line in lines)}):
        if step >= from_step:
            changed = values_at(values, lines, step)
            if changed["micro_batch_size"] is not None:
                # raises if it does not divide
                batching(changed["batch_size"], changed["micro_batch_size"])
    return changes


def _repeats_schedule(change: SettingChange, earlier: Sequence[SettingChange]) -> bool:
    """Return True if the present schedule has begun with a line as this one, for the same reason or
    at the same step.
    """
    line = schedule_line(earlier, step=change.from_step)
    is_present = _in_full(change.now) == _in_full(change.was)
    if line is None or line.stretches or not (change.begins_schedule and is_present):
        return False
    return line.because == change.because or line.from_step == change.from_step


def schedule_line(lines: Iterable[SettingChange], *, step: int) -> SettingChange | None:
    """Return the line that says which schedule holds after `step` steps, or None for that of the
    beginning.
    """
    last = None
    for line in in_effect(lines):
        if line.from_step <= step and line.setting == SCHEDULE:
            last = line
    return last


def _chosen_micro_batch_size(sizes: Batching, past: Iterable[SettingChange]) -> int:
    """Return the micro-batch size that a user or the run has chosen, which no batch size made
    smaller. `sizes` are those of the present steps.
    """
    chosen = None
    for change in past:
        if change.setting == "micro_batch_size":
            chosen = change.now
        elif chosen is None and "micro_batch_size" in change.follows:
            chosen, _ = change.follows["micro_batch_size"]
    return sizes.micro_batch_size if chosen is None else batching(chosen, None).batch_size


def _micro_batches_of(
    sizes: Batching, batch_size: int | str, *, chosen: int
) -> dict[str, list[Any]]:
    """Return what follows from another batch size: micro-batches of the `chosen` size, or the next
    smaller ones that divide the batch.
    """
    total = batching(batch_size, None).batch_size
    size = min(chosen, total)
    while total % size:
        size -= 1
    before = sizes.to_dict()["micro_batch_size"]
    after = Batching(total, size, sizes.unit).to_dict()["micro_batch_size"]
    return {"micro_batch_size": [before, after]}


def _with_whole_schedules(values: Values, wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes with those for parts of a schedule put together: one for the schedule. It
    begins anew, so it has a warm-up only if one is asked for.
    """
    parts: dict[str, Any] = {}
    because = ""
    others = []
    for wish in wishes:
        group, _, part = wish.setting.partition(".")
        if group == "schedule":
            parts[part or "name"] = wish.value
            because = because or wish.because
        else:
            others.append(wish)
    if not parts:
        return others
    shape = parts.pop("name", None)
    if shape == STRETCH:
        if parts:
            raise ConfigError(
                "stretch-with-other-settings",
                problem=f"schedule={STRETCH} keeps the present schedule, and {', '.join(parts)} would"
                " change it",
                remedy=[("leave out", Setting(f"schedule.{name}")) for name in parts],
                setting="schedule",
                names=list(parts),
            )
        return [*others, Wish("schedule", STRETCH, because)]
    described = {"shape": shape}
    if shape is None:
        described = dict(values["schedule"])
    return [*others, Wish("schedule", described | {"warmup": 0} | parts, because)]


def _with_whole_rules(
    values: Values, wishes: Sequence[Wish], earlier: Iterable[SettingChange]
) -> list[Wish]:
    """Return the wishes with those for parts of a rule put together: one for the rule. Raises
    `ConfigError` with the parts of the last rule if the present one has too few.
    """
    parts: dict[str, dict[str, Any]] = {}
    because: dict[str, str] = {}
    others = []
    for wish in wishes:
        name, _, part = wish.setting.partition(".")
        is_part = name in RULES and part != "" and not isinstance(values.get(name), list)
        if not is_part:
            others.append(wish)
            continue
        parts.setdefault(name, {})[part] = wish.value
        because[name] = because.get(name) or wish.because
    for name, of_rule in parts.items():
        rule = {**(values.get(name) or {}), **of_rule}
        _refuse_incomplete(name, rule, before=_last_rule(name, earlier))
        others.append(Wish(name, rule, because[name]))
    return others


def _last_rule(name: str, lines: Iterable[SettingChange]) -> Values:
    """Return the last rule that a run had by its journal, or {}."""
    last: Values = {}
    for line in in_effect(lines):
        for rule in line.values.get(name, ()):
            if isinstance(rule, Mapping):
                last = rule
    return last


def _with_whole_weights(values: Values, wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes with those for weights of a mixture put together: one for all weights."""
    weights: dict[str, Any] = {}
    because = ""
    others = []
    for wish in wishes:
        name = wish.setting.removeprefix(f"{WEIGHTS}.")
        if WEIGHTS in values and name != wish.setting:
            weights[name] = wish.value
        elif wish.setting == WEIGHTS and isinstance(wish.value, Mapping):
            weights |= wish.value
        else:
            others.append(wish)
            continue
        because = because or wish.because
    if not weights or WEIGHTS not in values:
        return list(wishes)
    return [*others, Wish(WEIGHTS, {**values[WEIGHTS], **weights}, because)]


def is_optimizer_name(setting: str) -> bool:
    """Return True for the setting that says which optimizer it is, or one of several."""
    return setting.startswith("optimizer.") and setting.endswith(".name")


def _check_value(values: Values, name: str, value: Any) -> None:
    """Raise `ConfigError` for a value that a setting cannot have, as far as it shows without the
    program.
    """
    texts = value if name == WEIGHTS and isinstance(value, Mapping) else {"": value}
    can_be_ramp = name in ("batch_size", "clip", WEIGHTS)
    if can_be_ramp and any(ramp_of(text, setting=name) is not None for text in texts.values()):
        raise ConfigError(
            "ramp-begins-with-run",
            problem=f"{name} cannot change to several values at once",
            reason="the steps of a ramp are known before the run begins",
            remedy="change it to one value now, and again when the next one is to begin",
            setting=name,
            value=value,
        )
    if name == "schedule":
        schedule_of(value)
    elif name in RULES:
        rules_from(name, value)
    elif name == WEIGHTS:
        _check_weights(values[WEIGHTS], value)
    elif name.startswith("model."):
        _check_of_model(name, values[name], value)
    elif name.startswith("optimizer."):
        prefix, _, part = name.rpartition(".")
        of_optimizer = _parts(values, f"{prefix}.") | {part: value}
        kind = of_optimizer.pop("name")
        lr = of_optimizer.pop("lr")
        weight_decay = of_optimizer.pop("weight_decay")
        patterns = of_optimizer.pop(FROZEN, None)
        if patterns is not None:
            frozen(*(patterns if isinstance(patterns, list) else [patterns]))
        named(kind, lr=lr, weight_decay=weight_decay, settings=of_optimizer)
    elif name in PLAIN:
        if name == "precision" and value == "auto":
            raise ConfigError(
                "precision-auto-unknown",
                problem="precision cannot change to auto",
                reason="no session of this run has recorded which precision that is",
                remedy="name a precision, such as bf16",
                setting="precision",
                value=value,
            )
        problem = problem_of_value(name, value)
        if problem is not None:
            raise problem
        optimizer = values.get("optimizer.name")
        if name == "ema" and value is not None and optimizer in AVERAGING:
            raise average_of_average(value, optimizer=optimizer)


def _check_of_model(name: str, present: Any, value: Any) -> None:
    """Raise `ConfigError` for a value that a setting of the model surely cannot have."""
    if "dropout" in name:
        number(min_value=0, below=1, kind=int | float)(value, setting=name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    was_number = isinstance(present, int | float) and not isinstance(present, bool)
    if not (is_number and was_number) and type(value) is not type(present):
        raise out_of_range(name, value, f"of the type of {in_words(present)}")


def _check_weights(present: Values, weights: Any) -> None:
    """Raise `ConfigError` for weights that the data sets of a mixture cannot have."""
    names = ", ".join(present)
    if not isinstance(weights, Mapping) or weights.keys() != present.keys():
        raise ConfigError(
            "weights-of-other-data-sets",
            problem=f"{WEIGHTS} = {in_words(weights)}: the mixture has the data sets {names}",
            remedy=f"write {WEIGHTS}.NAME=WEIGHT for each weight that changes",
            setting=WEIGHTS,
            value=weights,
            names=list(present),
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise out_of_range(f"{WEIGHTS}.{name}", weight, "a number above 0")
    quotas(list(weights.values()))


def _cannot_change(name: str, names: Iterable[str]) -> ConfigError:
    known = list(names)
    if name.startswith("optimizer.") and not any(each.startswith("optimizer.") for each in known):
        return ConfigError(
            "change-of-own-optimizer",
            problem=f"{name} cannot change: the program builds its optimizer itself",
            reason="only sf.optim.adamw(...) and the like have settings that a journal can name",
            remedy="write the rate of its groups in the body of the loop",
            setting=name,
        )
    return ConfigError(
        "setting-cannot-change",
        problem=f"{name} cannot change while this run goes on",
        reason=f"these settings can: {', '.join(known)}",
        setting=name,
        names=known,
    )


def assignments(before: Values, values: Values) -> list[str]:
    """Return the settings that differ, as `surefoot change` takes them.

    >>> assignments({"clip": "off"}, {"clip": "norm 1.0"})
    ['clip=norm 1.0']
    >>> cosine = {"schedule": {"shape": "cosine", "warmup": "5%"}}
    >>> assignments(cosine, {"schedule": {"shape": "linear", "warmup": "5%"}})
    ['schedule.name=linear', 'schedule.warmup=5%']
    """
    typed: list[str] = []
    for name in {**before, **values}:
        if is_optimizer_name(name) and before.get(name) != values.get(name):
            return typed  # another optimizer is another run
    for name, value in values.items():
        if name not in before or before[name] == value:
            continue
        if not isinstance(value, Mapping) or name == WEIGHTS:
            typed.append(f"{name}={json.dumps(value) if name in RULES else in_words(value)}")
            continue
        for part, of_part in value.items():  # all of them: a schedule begins anew
            typed.append(f"{name}.{_NAME_OF_SHAPE.get(part, part)}={in_words(of_part)}")
    return typed


def in_words(value: Any) -> str:
    """Return a JSON value as a user types it, a schedule as its name with its settings, and data as
    their size.

    >>> in_words("norm 1.0"), in_words(None), in_words([0.9, 0.95])
    ('norm 1.0', 'null', '[0.9, 0.95]')
    >>> in_words({"shape": "linear", "warmup": "5%"})
    'linear (warmup=5%)'
    """
    if isinstance(value, Mapping) and "shape" in value:
        parts = [f"{name}={in_words(part)}" for name, part in value.items() if name != "shape"]
        return f"{value['shape']} ({', '.join(parts)})" if parts else str(value["shape"])
    if isinstance(value, Mapping) and "monitor" in value:
        parts = [f"{name}={in_words(part)}" for name, part in value.items() if name != "monitor"]
        return f"{value['monitor']} ({', '.join(parts)})"
    if isinstance(value, Mapping) and "plan" in value:
        return f"{value['plan']['samples']:,} samples"
    return value if isinstance(value, str) else json.dumps(value)


def described(change: SettingChange) -> str:
    """Return a line about a change of a setting, with what follows from it and its reason.

    >>> described(SettingChange(2, 300, "optimizer.lr", 0.001, 0.0001, because="spikes"))
    'change 2, from step 300 on: optimizer.lr 0.001 -> 0.0001 (spikes)'
    >>> described(SettingChange(3, 300, "step", 500, 300, {"optimizer.lr": [0.001, 0.001]}))
    'change 3: back from step 500 to step 300, optimizer.lr is 0.001 again'
    """
    reason = f" ({change.because})" if change.because else ""
    if change.goes_back:
        parts = [f"back from step {change.was} to step {change.now}"]
        for name, (_, now) in change.follows.items():
            parts.append(f"{name} is {in_words(now)} again")
        return f"change {change.number}: {', '.join(parts)}{reason}"
    chosen = " (auto)" if [*change.origins][1:] == ["auto"] else ""
    parts = [f"{change.setting} {in_words(change.was)} -> {in_words(change.now)}{chosen}"]
    if change.setting == SKIP_STEPS:
        parts = [skipping_in_words(change.was, change.now)]
    elif change.stretches:
        parts = [f"schedule {in_words(change.was)} is stretched over the whole run"]
    elif change.begins_schedule and _in_full(change.was) == _in_full(change.now):
        parts = [f"schedule {in_words(change.now)} begins anew"]
    elif change.was == change.now:
        parts = [f"{change.setting} stays {in_words(change.now)}"]
    for name, (was, now) in change.follows.items():
        if was != now:
            parts.append(f"{name} {in_words(was)} -> {in_words(now)}")
    return f"change {change.number}, from step {change.from_step} on: {', '.join(parts)}{reason}"
