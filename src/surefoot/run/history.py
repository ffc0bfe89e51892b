"""The settings of a run up to the step from which a session goes on, by its journal of changes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from surefoot.config.averaging import OF_AVERAGE
from surefoot.config.batch_size import batching
from surefoot.config.data_change import epoch_sizes, first_epoch
from surefoot.config.paths import absolute_path, run_path
from surefoot.config.ramps import Ramp
from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.config.train_settings import TrainSettings
from surefoot.data.mixture import Mixture
from surefoot.data.order import NOTHING_PASSED, Passed
from surefoot.data.pipeline import TrainData
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, ConfigError
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.numbered import rebuilt_run
from surefoot.train.changed_settings import (
    SegmentSettings,
    changeable,
    history_of,
    specs_of,
    with_specs,
)
from surefoot.train.ramps import ramps_to_write, with_ramps
from surefoot.train.run_settings import RunSettings


@dataclass(frozen=True)
class SettingsHistory:
    """The settings that held, hold and will hold in a run.

    of_program: the values in the program, of settings that can change. segments: up to the step
    from which the session goes on, the present one last. to_come: those behind it.
    next_change: the step of the change that follows, at which the session ends. ramps: those of the
    program that the journal does not have yet. first_changes: their changes, with which the journal
    will begin.
    """

    of_program: dict[str, Any]
    changes: tuple[SettingChange, ...]
    segments: tuple[SegmentSettings, ...]
    to_come: tuple[SegmentSettings, ...] = ()
    next_change: int | None = None
    ramps: Mapping[str, Ramp] = field(default_factory=dict)
    first_changes: tuple[SettingChange, ...] = ()

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""
        settings = self.segments[-1].settings
        if settings.ema is None:  # a change has ended the average, and its settings have no effect
            defaults = {name: getattr(TrainSettings, name) for name in OF_AVERAGE}
            settings = replace(settings, **defaults)
        return self._with_groups(settings)

    def _with_groups(self, settings: RunSettings) -> RunSettings:
        """Return the settings with optimizers whose groups stay apart once they had a decay."""
        specs = {}
        for prefix, spec in specs_of(settings.optimizer).items():
            decays = [
                specs_of(each.settings.optimizer)[prefix].weight_decay for each in self.segments
            ]
            if any(decays) and not decays[-1]:
                specs[prefix] = replace(spec, has_decayed=True)
        return replace(settings, optimizer=with_specs(settings.optimizer, specs))

    @property
    def begins(self) -> list[int]:
        return [segment.begin for segment in self.segments]

    @property
    def changed(self) -> set[str]:
        """The names of the settings whose present value is by the journal."""
        begin = self.segments[-1].begin
        names = set()
        for change in in_effect(self.changes):
            if change.from_step <= begin:
                names |= {name.partition(".")[0] for name in change.names}
        return names

    @property
    def weights_from(self) -> list[tuple[int, list[float]]]:
        """The weights of a mixture since the beginning, each with the number of samples after which
        they were set; [] for other data.
        """
        mixture = self.segments[0].settings.train_data
        if not isinstance(mixture, Mixture):
            return []
        samples = 0
        weights = [(0, mixture.weights)]
        for previous, segment in pairwise(self.segments):
            batch_size = batching(previous.settings.batch_size, None).batch_size
            samples += (segment.begin - previous.begin) * batch_size
            weights.append((samples, segment.settings.train_data.weights))
        return weights


class OtherSettings(Exception):  # noqa: N818  the run goes on
    """The next step of a run has other settings than those with which it was built.

    step: that of the checkpoint from which it goes on, or None for the newest one. refusal: the
    error for a run that cannot be built again.
    """

    def __init__(self, step: int | None, refusal: CheckpointError) -> None:
        super().__init__(step)
        self.step = step
        self.refusal = refusal


def read_history(
    settings: RunSettings,
    ramps: Mapping[str, Ramp],
    data: TrainData,
    world: World,
    *,
    step: int,
    evaluation_due: bool,
) -> SettingsHistory:
    """Return the history of the run in the directory of the settings, for a session that goes on
    after `step` steps.

    `settings` are those of the program for the first step, and `ramps` has the values of later
    ones. An evaluation that is still due belongs to the settings of the steps before: the session
    makes it, and ends if others hold in the next step. Raises `ConfigError` if the program has
    other settings than the run had or has. Collective.
    """
    # a `DataLoader` may have given them
    as_read = replace(settings, batch_size=data.batch_size, train_data=data.dataset)
    of_program = with_ramps(changeable(as_read), ramps)
    changes = _changes_of_run(settings, world)
    missing = ramps_to_write(ramps, changes, step=step)
    if not changes:
        return SettingsHistory(of_program, (), (SegmentSettings(0, settings),), ramps=missing)
    shown = str(rebuilt_run() or settings.run_dir)
    segments = history_of(as_read, changes, shown=shown)
    last_begin = max(0, step - 1) if evaluation_due else step
    past = tuple(segment for segment in segments if segment.begin <= last_begin)
    to_come = segments[len(past) :]
    next_change = to_come[0].begin if to_come else None
    return SettingsHistory(of_program, changes, past, to_come, next_change, missing)


def _changes_of_run(settings: RunSettings, world: World) -> tuple[SettingChange, ...]:
    """Return the changes in the directory of the settings, as rank 0 reads them. Collective."""
    shown = rebuilt_run() or settings.run_dir
    if shown is None:
        return ()
    read = None
    if world.is_main:
        directory = absolute_path(run_path(shown, setting="run_dir"))
        read = [asdict(change) for change in read_changes(directory)]
    return tuple(SettingChange(**values) for values in world.from_main(read))


@dataclass(frozen=True)
class StepSize:
    """The samples of a step and of an epoch, and the steps of an epoch if every epoch begins with a
    step. An epoch of a stream has as many samples as a present one.
    """

    batch_size: int
    samples: int | None
    steps: int | None


def passed_in(
    history: SettingsHistory,
    step_size: Callable[[RunSettings, int], StepSize],
    *,
    samples: int,
) -> tuple[Passed, tuple[StepSize, ...]]:
    """Return what the steps before the last change of the batch size or of the data have read, and
    the sizes of the steps before each change of settings; no sizes if they are the present ones.

    `step_size` takes settings and the size of a data set; `samples` is that of the present one.
    After a change of the data, the first epoch begins as if all epochs had had as many samples.

    Raises `ConfigError` if the size of a step changes within an epoch, and every epoch begins with
    a step.
    """
    segments = history.segments
    passed = NOTHING_PASSED
    sizes: list[StepSize] = []
    has_new_data = any(segment.new_data for segment in segments)
    if len({_cut(segment.settings) for segment in segments}) == 1 and not has_new_data:
        return passed, ()
    sizes_of_data = epoch_sizes(history.changes, history.begins, present=samples)
    for index, (previous, segment) in enumerate(pairwise(segments)):
        size = step_size(previous.settings, sizes_of_data[index])
        sizes.append(size)
        if _cut(previous.settings) == _cut(segment.settings) and not segment.new_data:
            continue
        steps = segment.begin - passed.steps
        position = passed.samples + steps * size.batch_size
        epochs = 0
        if size.steps is not None:
            epochs, rest = divmod(steps, size.steps)
            if rest > 0:
                raise _within_epoch(segment, next_epoch=segment.begin + size.steps - rest)
        if segment.new_data:
            epoch = first_epoch(position, sizes_of_data[index], segment.new_data)
            position = epoch * sizes_of_data[index + 1]
        passed = Passed(segment.begin, position, passed.epochs + epochs)
    return passed, tuple(sizes)


def _cut(settings: RunSettings) -> tuple[int | str | None, ...]:
    """Return the settings that decide which samples share a step."""
    if isinstance(settings.batch_size, str):  # tokens: of a micro-batch
        return settings.batch_size, settings.micro_batch_size
    return (settings.batch_size,)


def _within_epoch(segment: SegmentSettings, *, next_epoch: int) -> ConfigError:
    return ConfigError(
        "batch-size-changes-within-epoch",
        problem=f"batch_size changes from step {segment.begin} on, in the middle of an epoch",
        reason="in this order every epoch begins with a step, and is cut into steps as a whole",
        remedy=f"let it change from step {next_epoch} on, where the next epoch begins",
        setting="batch_size",
        step=segment.begin,
        next_epoch=next_epoch,
    )
