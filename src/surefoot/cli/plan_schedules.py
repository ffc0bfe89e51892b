"""`surefoot plan --schedules LIST`: learning-rate schedules drawn side by side, without
training.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import Positional, arg

from surefoot.cli.options import by_flag, check_excluded, verb_options
from surefoot.cli.settings import configured, file_values, layers_below, read_settings
from surefoot.config.closest import closest
from surefoot.config.durations import Length, in_steps, planned
from surefoot.config.tree import flatten
from surefoot.errors import ConfigError, SurefootError, out_of_range, together
from surefoot.program import build_run, find_program
from surefoot.recipes.optimizer_settings import Schedule
from surefoot.schedules.checks import check_shape
from surefoot.schedules.curves import SHAPES
from surefoot.schedules.joined import Joined, join
from surefoot.schedules.lr_schedule import Schedule as Single

_FACTORS = ("min_lr_ratio", "power", "gamma", "start_lr_ratio", "cycle_growth")
_FORM = "cosine,linear:min_lr_ratio=0.1,wsd:cooldown=30%,constant+linear@50%"


@dataclass(frozen=True, kw_only=True)
class PlanSchedules:
    """Draw schedules side by side. Print the peak, the minimum, the end of warm-up and the mean
    factor of each schedule.
    """

    what: Positional[Annotated[tuple[str, ...], arg(metavar="RECIPE|FILE.py:build")]] = ()
    """Run that supplies length, base learning rate and schedule settings. Default: a run of 1,000
    steps.
    """
    config: str | None = None
    """A TOML file of settings."""
    schedules: str = ""
    """LIST: commas between schedules, a colon before each setting, a slash between milestones. all
    draws every shape.
    """
    out: str = "schedules"
    """PATH of the pictures: PATH.svg, and with the extra plots PATH.png."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A run that has only a length and schedule settings."""

    length: str = "1000 steps"
    """Length of the run in steps."""
    schedule: Schedule = field(default_factory=Schedule)
    """Settings shared by all schedules that have these settings."""


def plan_schedules(arguments: Sequence[str], *, foreign: Collection[str]) -> None:
    """Print and draw the schedules of a list. `foreign` has the options of `plan` to refuse."""
    options, flags = verb_options(PlanSchedules, arguments, verb="plan")
    excluded = {*foreign, "schedule.name"}
    others = [name for name, _ in by_flag(flags) if name in excluded]
    check_excluded("schedules", others, reason="it names the schedules, and trains nothing")
    length, settings, rate = _basis(options, flags)
    from surefoot.tools.plan.schedule_plot import draw_traces, table, trace_schedules
    from surefoot.tools.report.figures import drawn_line

    traces = trace_schedules(schedules(options.schedules, length, shared=settings), length)
    files = draw_traces(traces, out=options.out, rate=rate)
    base = "" if rate is None else f", base learning rate {rate:g}"
    print(f"schedules of a run of {length.steps:,} steps{base}\n\n{table(traces, rate=rate)}\n")
    print(drawn_line(files))


def schedules(
    text: str, length: Length, *, shared: Mapping[str, Any]
) -> dict[str, Single | Joined]:
    """Return the schedules of a list by name. Values in `shared` are the defaults of every schedule
    that has the setting.

    >>> length = Length(steps=100, samples_per_epoch=1, batch_size=1)
    >>> by_name = schedules(
    ...     "cosine,wsd:cooldown=30%", length, shared={"warmup": "10%", "min_lr_ratio": 0.1}
    ... )
    >>> print(by_name["wsd:cooldown=30%"].to_dict())
    {'shape': 'wsd', 'warmup': '10%', 'min_lr_ratio': 0.1, 'cooldown': '30%'}
    """
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        names = list(SHAPES)
    by_name: dict[str, Single | Joined] = {}
    problems: list[SurefootError] = []
    for name in dict.fromkeys(names):
        try:
            by_name[name] = _schedule(name, length, shared)
        except ConfigError as problem:
            problems.append(problem.inside(f"schedules {name}"))
    if problems:
        raise together(problems)
    return by_name


def _schedule(text: str, length: Length, shared: Mapping[str, Any]) -> Single | Joined:
    first, *others = text.split("+")
    if not others:
        return _single(first, shared)
    # a percentage of the whole run
    warmup = in_steps(str(shared.get("warmup", "5%")), length=length, setting="warmup")
    joined: Single | Joined = _single(first, {**shared, "warmup": f"{warmup} steps"})
    # a later part begins at its own step 0 and uses the shared settings except the warm-up
    shared_later = {name: value for name, value in shared.items() if name != "warmup"}
    for other in others:
        shape, mark, at = other.rpartition("@")
        if not mark:
            meaning = f"a schedule and its start, as in {first}+{other}@50%"
            raise out_of_range("schedules", other, meaning)
        following = _single(shape, shared_later, rises=False)
        joined = join(joined, following, at=in_steps(at, length=length, setting="at"))
    return joined


def _single(text: str, shared: Mapping[str, Any], *, rises: bool = True) -> Single:
    shape, *settings = text.split(":")
    check_shape(shape)
    in_text = dict(_setting(setting) for setting in settings)
    all_settings = {name: value for name, value in shared.items() if name in SHAPES[shape].takes}
    if SHAPES[shape].own_rise:
        all_settings.pop("warmup", None)
    all_settings |= in_text
    spec = Schedule(name=shape, **all_settings).spec()
    if not rises and "warmup" not in in_text:
        return replace(spec, warmup=None)
    return spec


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    name = name.strip().replace("-", "_")
    known: list[str] = []
    for shape in SHAPES.values():
        known += shape.takes
    if name not in known:
        raise _no_setting(text, near=closest(name, known))
    if not value:
        raise _no_setting(text)
    if name == "milestones":
        return name, tuple(value.split("/"))
    if name not in _FACTORS:
        return name, value
    try:
        return name, float(value)
    except ValueError:
        raise _no_setting(text) from None


def _no_setting(text: str, *, near: str | None = None) -> ConfigError:
    return out_of_range("schedules", text, f"{near or 'NAME'}=VALUE, as in {_FORM}")


def _basis(
    options: PlanSchedules, flags: Sequence[str]
) -> tuple[Length, dict[str, Any], float | None]:
    classes = [PlanSchedules]
    verb = "plan --schedules LIST"
    if not options.what:
        in_file = file_values(options.config)
        plain, _ = configured(Plain, [("file", in_file)], flags, verb=verb, option_classes=classes)
        from surefoot.tools.plan.schedule_plot import steps_alone

        return steps_alone(plain.length), _settings(flatten(plain)), None
    program = find_program(options.what[0])
    layers = layers_below(program, file_values(options.config), flags)
    config, _ = read_settings(
        program, layers, flags, verb=f"{verb} {options.what[0]}", option_classes=classes
    )
    if program.described["kind"] == "recipe":
        settings = _settings(flatten(config))
        durations = f"{config.length} {options.schedules} {settings}"
        if re.search("epoch", durations, re.IGNORECASE):  # which depend on the size of the data
            length = build_run(program, config).parts.length
        else:
            length = planned(config.length, samples_per_epoch=1, batch_size=1)
        return length, settings, float(config.optimizer.spec().lr)
    parts = build_run(program, config).parts  # a user's program: use its warm-up and minimum
    schedule = parts.plan.schedule
    settings = {"warmup": f"{schedule.warmup or 0} steps"}
    if isinstance(schedule, Single) and schedule.min_lr_ratio is not None:
        settings["min_lr_ratio"] = schedule.min_lr_ratio
    groups = next(iter(parts.state.optimizers.values())).optimizer.param_groups
    return parts.length, settings, float(groups[0]["initial_lr"])


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the schedule that have a value, without its name."""
    settings = {}
    for name, value in values.items():
        table, _, setting = name.rpartition(".")
        if table == "schedule" and setting != "name" and value is not None:
            settings[setting] = value
    return settings
