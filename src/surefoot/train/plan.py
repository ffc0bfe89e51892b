"""The plan of a run: what its settings, data, models and machine, and the beginning of an earlier
session, decide before the first step.

The plan is made in two stages, because a run's length and learning rates need no model, and building
a model may take minutes: `resolve_timeline`, then `resolve`. Both are pure functions of values.
Nothing here imports torch, reads a file or knows how many steps are completed.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config import speed_table
from surefoot.config.averaging import (
    Averaging,
    averaging_in_identity,
    averaging_of_settings,
)
from surefoot.config.batch_size import Batching
from surefoot.config.behavior import behavior_in_identity
from surefoot.config.parallel import Strategy
from surefoot.config.setting import identity_of
from surefoot.config.speed_table import Choice, look_up
from surefoot.config.train_settings import Timetable, timetable
from surefoot.errors import CheckpointError, ConfigError, Setting, first_line
from surefoot.schedules.curves import Groups
from surefoot.schedules.joined import AnySchedule, bound
from surefoot.schedules.lr_schedule import constant
from surefoot.tracking.run_reader import Beginning
from surefoot.train.changed_settings import SegmentSettings
from surefoot.train.course import Leg, course_of
from surefoot.train.patience import EarlyStopping, rules_of

if TYPE_CHECKING:  # imports torch
    from surefoot.train.run_settings import RunSettings


@dataclass(frozen=True)
class WorldFacts:
    """The facts of the ranks and their devices, as rank 0 knows them."""

    device: str  # its type
    computes_bf16: bool  # an accelerator with bf16 instructions
    instructions: str  # of the processor for bf16
    torch: str  # its version, as in "2.13"

    @property
    def is_measured(self) -> bool:
        """True if the table of measured speeds has rows for this processor."""
        return self.device == "cpu" and (self.instructions, self.torch) in speed_table.TABLE


@dataclass(frozen=True)
class SizeFacts:
    """The sizes of the training data, which decide the length of a run.

    epoch and step: the sizes of an epoch and of a step in samples, or in steps if the samples per
    step vary. varied: a name of the batches if they change shape in almost every step, else "".
    earlier: the sizes of an epoch and of a step before each change of settings, if they are others.
    """

    sizes: Batching
    epoch: int
    step: int
    varied: str = ""
    earlier: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DataFacts:
    """What identifies the data, and the shapes of their batches.

    table_rows: the tokens of a micro-batch and the longest row, of batches sized in tokens.
    first_batch: whether the first tensor of the first micro-batch has floating-point numbers, and
    its shape; None if it was not read.
    """

    identity: Mapping[str, Any]
    splits: Mapping[str, Any]  # the identity of each split
    table_rows: tuple[int, int] | None = None
    first_batch: tuple[bool, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What the models and their optimizers are.

    layers and width: the kind of a model's layers and the width of most of its matrices; None if the
    architecture was not measured. groups and every_group: numbers of the parameter groups, as schedules need them.
    """

    optimizer: Any  # identity, or identities by the name of the model
    groups: Groups
    every_group: Groups
    layers: str | None
    width: int
    has_images: bool
    takes_closure: bool
    was_compiled: bool  # by the user


@dataclass(frozen=True)
class Timeline:
    """The part of a plan that needs no model: how long a run is, and its learning rates in steps."""

    sizes: Batching
    times: Timetable
    schedule: AnySchedule
    averaging: Averaging | None
    behavior: int  # `config.behavior` has what each number means
    exact_sums: bool
    varied: str  # see `SizeFacts`
    next_change: int | None = None  # the step from which on other settings hold
    until: int | None = None  # this step, if the session ends there, to go on with these settings


@dataclass(frozen=True)
class Reasons:
    """The reasons for an automatic precision (with memory format) and compilation; None if the user
    or an earlier session chose.

    `unknown` is true if the table of measured speeds has no row for this run. If the user named a
    precision, `auto` is the choice that "auto" would make.
    """

    precision: str | None = None
    compile: str | None = None
    unknown: bool = False
    auto: Choice | None = None


@dataclass(frozen=True)
class Segment:
    """The steps from `begin` to before `end`, which share their settings and so one `Task`."""

    begin: int
    end: int


Origin = Literal["given", "default", "auto", "beginning", "changed"]
"""Where a setting comes from: the program or its user, the default, the machine and the data, the
first session of the run, or its journal of changes."""


@dataclass(frozen=True)
class Plan:
    """All that is decided of a run before its first step. A step never asks the plan."""

    is_new: bool  # no run has begun in the directory
    timeline: Timeline
    segments: tuple[Segment, ...]  # of all steps, in order
    schedule: AnySchedule  # in steps, bound to the parameter groups
    parallel: Strategy
    precision: str
    channels_last: bool
    compiles: bool
    reasons: Reasons
    identity: Mapping[str, Any]  # the settings and data that must be equal at a resume
    splits: Mapping[str, Any]  # the identity of each split
    origins: Mapping[str, Origin]  # of each setting, by name

    @property
    def times(self) -> Timetable:
        return self.timeline.times

    @property
    def behavior(self) -> int:
        return self.timeline.behavior

    @property
    def auto_precision(self) -> str | None:
        """What "auto" is for this run; None if this session did not look it up."""
        if self.reasons.auto is not None:
            return self.reasons.auto.precision
        return self.precision if self.origins["precision"] == "auto" else None

    def segment_of(self, step: int) -> int:
        """Return the index of the segment with this step; that of the last step for a later one."""
        last = len(self.segments) - 1
        return next((i for i, each in enumerate(self.segments) if step < each.end), last)

    def segment_at(self, step: int) -> Segment:
        """Return the segment with this step; the last one for a later step."""
        return self.segments[self.segment_of(step)]


def resolve_timeline(
    settings: "RunSettings",
    data: SizeFacts,
    beginning: Beginning,
    *,
    exact_sums: bool,
    history: Sequence[SegmentSettings] = (),
    next_change: int | None = None,
) -> Timeline:
    """Return the length, intervals and learning rates of a run in steps.

    A run that began with another length keeps the intervals and learning rates of that length.
    `history` has the settings of a run that were changed while it went on, `settings` last, and
    `next_change` is the step of the next change, at which the session ends. Raises `ConfigError`
    for a setting that does not fit the length, or if compiled code would get a new shape in almost
    every step. Raises `CheckpointError` for a schedule that does not fit the length with which the
    run began.
    """
    if settings.compile is True:
        _refuse_varied(data.varied)
    at_beginning = settings
    sizes_at_beginning = data
    if history:
        at_beginning = history[0].settings
    if data.earlier:
        epoch, step = data.earlier[0]
        sizes_at_beginning = replace(data, epoch=epoch, step=step)
    times, schedule = _as_it_began(at_beginning, sizes_at_beginning, beginning)
    averaging = averaging_of_settings(settings, times.length, behavior=beginning.behavior)
    if len(history) > 1:
        times, schedule = _as_it_went_on(history, data, times, schedule)
    until = None
    if next_change is not None:
        # a length that a later change makes longer is not the end
        goes_on_at_end = next_change == times.length.steps and settings.stop_after is None
        if next_change < times.stop_step or goes_on_at_end:
            until = next_change
            times.stop_step = next_change
    return Timeline(
        sizes=data.sizes,
        times=times,
        schedule=schedule,
        averaging=averaging,
        behavior=beginning.behavior,
        exact_sums=exact_sums,
        varied=data.varied,
        next_change=next_change,
        until=until,
    )


def _as_it_began(
    settings: "RunSettings", data: SizeFacts, beginning: Beginning
) -> tuple[Timetable, AnySchedule]:
    """Return the timetable and the schedule of a run with the settings of its beginning."""
    began_steps = beginning.schedule_of_steps
    times = timetable(
        settings, samples_per_epoch=data.epoch, batch_size=data.step, began_steps=began_steps
    )
    own_schedule = settings.schedule or constant()
    schedule = own_schedule.resolved(times.length)
    if began_steps is not None and began_steps != times.length.steps:
        try:
            schedule = own_schedule.resolved(replace(times.length, steps=began_steps))
        except ConfigError as problem:
            raise CheckpointError(
                "schedule-of-shorter-run",
                problem=f"it began as a run of {began_steps} steps: {first_line(problem)}",
                steps=began_steps,
            ) from problem
        try:
            schedule.resolved(times.length)
        except ConfigError as problem:
            from surefoot.train.run_identity import length_changed  # imports torch

            why = first_line(problem)
            raise length_changed(began_steps, times.length.steps, why=why) from problem
    return times, schedule


def _as_it_went_on(
    history: Sequence[SegmentSettings], data: SizeFacts, times: Timetable, schedule: AnySchedule
) -> tuple[Timetable, AnySchedule]:
    """Return the timetable and the schedule of a run after its changes. `times` and `schedule` are
    those with which it began.
    """
    legs = []
    present = (data.epoch, data.step)
    sizes = [*data.earlier, present] if data.earlier else [present] * len(history)
    for segment, (epoch, step) in zip(history, sizes, strict=True):
        settings = segment.settings
        leg = Leg(
            segment.begin,
            settings.length,
            epoch,
            step,
            settings.schedule or constant(),
            begins_schedule=segment.begins_schedule,
            stretches=segment.stretches,
            new_data=segment.new_data,
        )
        legs.append(leg)
    length, schedule = course_of(legs, first_length=times.length, first_schedule=schedule)
    times = timetable(
        history[-1].settings,
        samples_per_epoch=data.epoch,
        batch_size=length.batch_size,
        began_steps=times.began.steps,
        before=length.before,
    )
    return times, schedule


def _refuse_varied(varied: str) -> None:
    if varied:
        raise ConfigError(
            "compile-of-many-shapes",
            problem=f"compile: {varied} change shape in almost every step",
            reason="each shape would be compiled",
            remedy=Setting("compile", False),
            setting="compile",
            value=True,
            batches=varied,
        )


def resolve(
    settings: "RunSettings",
    world: WorldFacts,
    timeline: Timeline,
    data: DataFacts,
    models: ModelFacts,
    beginning: Beginning,
    *,
    parallel: Strategy,
    init_from: str | None = None,
    begins: Sequence[int] = (0,),
    changed: Collection[str] = (),
) -> Plan:
    """Return the plan of a run. A setting "auto" is what the run began with, or else what the table
    of measured speeds says. `init_from` is the path of the initial weights, without links. `begins`
    has the steps from which on other settings hold, and `changed` names these settings.

    Raises `ConfigError` if compiled code would get a new shape in almost every step.
    """
    if models.was_compiled:
        _refuse_varied(timeline.varied)
    measured = _choose_precision(settings, world, data, models)
    compilation = _choose_compilation(settings, world, timeline, models, parallel)
    schedule = bound(timeline.schedule, models.groups, models.every_group)
    choices: dict[str, Any] = {
        "precision": _precision(settings, measured, beginning),
        "channels_last": models.has_images and _channels_last(settings, measured, beginning),
        "compile": _compiles(settings, compilation, models, beginning),
    }
    reasons = Reasons()
    if beginning.is_new:
        reasons = _reasons(settings, world, models, measured, compilation)
    identity = {
        "init_from": init_from,
        "optimizer": models.optimizer,
        "schedule": schedule.to_dict(),
        "data": data.identity,
        "plateau": _plateau(settings, timeline, data),
        **_settings_in_identity(settings, timeline),
        **choices,
    }
    return Plan(
        is_new=beginning.is_new,
        timeline=timeline,
        schedule=schedule,
        segments=_segments(begins, timeline.times.length.steps),
        parallel=parallel,
        precision=choices["precision"],
        channels_last=choices["channels_last"],
        compiles=choices["compile"],
        reasons=reasons,
        identity=identity_of(settings, identity),
        splits=data.splits,
        origins=_origins(settings, beginning, changed),
    )


def _segments(begins: Sequence[int], last_step: int) -> tuple[Segment, ...]:
    ends = [*begins[1:], max(last_step, begins[-1])]
    return tuple(Segment(begin, end) for begin, end in zip(begins, ends, strict=True))


def _origins(
    settings: "RunSettings", beginning: Beginning, changed: Collection[str]
) -> dict[str, Origin]:
    """Return where each setting comes from, by name."""
    origins: dict[str, Origin] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        is_default = field.default is not MISSING and _same(value, field.default)
        is_open = _same(value, "auto")
        if field.name == "micro_batch_size":
            is_open = value is None
        if field.name in changed:
            origins[field.name] = "changed"
        elif is_open and getattr(beginning, field.name, None) is not None:
            origins[field.name] = "beginning"
        elif is_open:
            origins[field.name] = "auto"
        elif is_default:
            origins[field.name] = "default"
        else:
            origins[field.name] = "given"
    return origins


def _same(value: Any, other: Any) -> bool:
    """Return True if two values of a setting are the same object, or equal numbers or texts."""
    is_plain = isinstance(value, bool | int | float | str | tuple)
    return value is other or (is_plain and type(value) is type(other) and value == other)


def _precision(settings: "RunSettings", measured: Choice, beginning: Beginning) -> str:
    if settings.precision != "auto":
        return settings.precision
    return beginning.precision or measured.precision


def _channels_last(settings: "RunSettings", measured: Choice, beginning: Beginning) -> bool:
    if settings.channels_last != "auto":
        return settings.channels_last
    if beginning.channels_last is not None:
        return beginning.channels_last
    # the table has both together: with a named precision, images keep their memory format
    return settings.precision == "auto" and measured.channels_last


def _compiles(
    settings: "RunSettings", measured: "Compilation", models: ModelFacts, beginning: Beginning
) -> bool:
    if settings.compile == "auto" and beginning.compile is not None:
        return beginning.compile
    if models.was_compiled:  # the user's choice
        return True
    return measured.is_faster if settings.compile == "auto" else settings.compile


def _reasons(
    settings: "RunSettings",
    world: WorldFacts,
    models: ModelFacts,
    precision: Choice,
    compilation: "Compilation",
) -> Reasons:
    reasons = Reasons()
    is_known = True
    if settings.precision != "auto":
        reasons = replace(reasons, auto=precision)
    elif not world.computes_bf16:
        reasons = replace(reasons, precision=precision.why)
        is_known = precision.known
    if settings.compile == "auto" and not models.was_compiled:
        reasons = replace(reasons, compile=compilation.why)
        is_known = is_known and compilation.is_known
    return replace(reasons, unknown=settings.loss is not None and not is_known)


def speed_facts(
    settings: "RunSettings",
    world: WorldFacts,
    data: DataFacts,
    models: ModelFacts,
    *,
    unmeasured: bool = False,
) -> speed_table.Facts | str:
    """Return the key of a run in the table of measured speeds, or a text that says why the table has
    no row for the run. `unmeasured` allows a processor without measurements.
    """
    if settings.loss is None:
        return "the training step is custom"
    if world.device != "cpu":
        return f"not measured on this {world.device} device"
    if not (world.is_measured or unmeasured):
        processors = f"with instructions {world.instructions}"
        if world.instructions == "none":
            processors = "without bf16 instructions"
        return f"not measured on processors {processors} in torch {world.torch}"
    if models.layers is None:
        return "these layer types were not measured"
    layers = models.layers
    if layers == "convolution" and settings.channels_last is True:
        layers = "convolution, channels last"
    rows = data.table_rows or _rows(layers, data.first_batch)
    if rows is None:
        return "these data shapes were not measured"
    return speed_table.Facts(world.instructions, world.torch, layers, models.width, *rows)


def _rows(layers: str, first: tuple[bool, tuple[int, ...]] | None) -> tuple[int, int] | None:
    """Return the rows of a layer's input, and the positions per row of tokens; None for unmeasured
    shapes.
    """
    match layers, first:
        case "linear", (True, (samples, _)):
            return samples, 1
        case (("attention" | "encoder-decoder"), (False, (samples, positions))):
            return samples * positions, positions
        case (("convolution" | "convolution, channels last"), (True, (samples, _, height, width))):
            return samples * height * width, 1
    return None


def _choose_precision(
    settings: "RunSettings", world: WorldFacts, data: DataFacts, models: ModelFacts
) -> Choice:
    if world.computes_bf16:
        why = f"this {world.device} device has bf16 instructions"
        return Choice("bf16", channels_last=False, known=True, why=why)
    facts = speed_facts(settings, world, data, models)
    if isinstance(facts, str):
        return Choice("fp32", channels_last=False, known=False, why=facts)
    layout_open = settings.channels_last == "auto" and models.has_images
    return look_up(facts, layout_open=layout_open)


@dataclass(frozen=True)
class Compilation:
    """Whether compiled models are faster, whether this was measured, and the reason as text."""

    is_faster: bool
    is_known: bool
    why: str


def _choose_compilation(
    settings: "RunSettings",
    world: WorldFacts,
    timeline: Timeline,
    models: ModelFacts,
    parallel: Strategy,
) -> Compilation:
    if settings.loss is None:
        return Compilation(False, True, "the training step is custom")
    if models.takes_closure:
        return Compilation(False, True, "the optimizer evaluates a closure")
    if timeline.varied:
        return Compilation(False, True, f"{timeline.varied} change shape in almost every step")
    is_faster = speed_table.COMPILE.get(world.device)
    if is_faster is None or parallel.kind == "fsdp":
        why = f"not measured on {world.device} with parallel = {parallel.kind}"
        return Compilation(False, False, why)
    how = "faster" if is_faster else "no faster"
    return Compilation(is_faster, True, f"{how} in measurements")


def _plateau(settings: "RunSettings", timeline: Timeline, data: DataFacts) -> dict[str, Any] | None:
    if settings.plateau is None:
        return None
    # its decisions also depend on the evaluation interval and the evaluated data
    split = settings.plateau.score.split("/")[0]
    evaluate_every = timeline.times.every["evaluate_every"].described()
    scored = {"evaluate_every": evaluate_every, "scored": data.splits[split]}
    return vars(settings.plateau) | scored


def _settings_in_identity(settings: "RunSettings", timeline: Timeline) -> dict[str, Any]:
    """Return the identity of settings that stand there in another form than they are given."""
    early_stopping: Any = [vars(rule) for rule in rules_of(settings.early_stopping)]
    if settings.early_stopping is None:
        early_stopping = None
    elif isinstance(settings.early_stopping, EarlyStopping):
        early_stopping = vars(settings.early_stopping)
    return {
        "length": f"{timeline.times.length.steps} steps",
        "early_stopping": early_stopping,
        **averaging_in_identity(timeline.averaging),
        **timeline.sizes.to_dict(),
        "exact_sums": timeline.exact_sums,
        **behavior_in_identity(timeline.behavior),
        "buffers": settings.buffers or None,
        "identity": _as_json(settings.identity or {}),
        "schedule_of_steps": timeline.times.began.steps,
    }


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings after a round trip through JSON. Raises `ConfigError` for values that JSON
    cannot represent.
    """
    try:
        return dict(json.loads(json.dumps(dict(settings), allow_nan=False)))
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            "settings-not-json",
            problem=f"settings must be JSON values: {problem}",
            reason="a resume compares them",
            setting="settings",
        ) from problem
