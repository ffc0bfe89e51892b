"""The settings of a run up to the step from which a session goes on, by its journal of changes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from surefoot.config.averaging import OF_AVERAGE
from surefoot.config.batch_size import batching
from surefoot.config.paths import absolute_path, run_path
from surefoot.config.setting_change import SettingChange
from surefoot.config.train_settings import TrainSettings
from surefoot.data.mixture import Mixture
from surefoot.data.pipeline import DataPipeline, TrainData
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, ConfigError, Setting
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.numbered import rebuilt_run
from surefoot.train.changed_settings import (
    SegmentSettings,
    changeable,
    history_of,
    specs_of,
    with_specs,
)
from surefoot.train.run_settings import RunSettings


@dataclass(frozen=True)
class SettingsHistory:
    """The settings that held, hold and will hold in a run.

    of_program: the values in the program, of settings that can change. segments: up to the step
    from which the session goes on, the present one last. next_change: the step of the change that
    follows, at which the session ends.
    """

    of_program: dict[str, Any]
    changes: tuple[SettingChange, ...]
    segments: tuple[SegmentSettings, ...]
    next_change: int | None = None

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
        for change in self.changes:
            if change.from_step <= begin:
                names |= {change.setting.partition(".")[0], *change.follows}
        return names

    @property
    def offset(self) -> int:
        """The position in the order of samples at which step 0 would begin if all steps had the
        present batch size.
        """
        offset = 0
        for previous, segment in pairwise(self.segments):
            before = batching(previous.settings.batch_size, None).batch_size
            after = batching(segment.settings.batch_size, None).batch_size
            offset += segment.begin * (before - after)
        return offset

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
    settings: RunSettings, data: TrainData, world: World, *, step: int
) -> SettingsHistory:
    """Return the history of the run in the directory of the settings, for a session that goes on
    after `step` steps. Raises `ConfigError` if the program has other settings than the run had or
    has. Collective.
    """
    # a `DataLoader` may have given them
    as_read = replace(settings, batch_size=data.batch_size, train_data=data.dataset)
    of_program = changeable(as_read)
    changes = _changes_of_run(settings, world)
    if not changes:
        return SettingsHistory(of_program, (), (SegmentSettings(0, settings),))
    segments = history_of(as_read, changes)
    past = tuple(segment for segment in segments if segment.begin <= step)
    following = [segment.begin for segment in segments if segment.begin > step]
    return SettingsHistory(of_program, changes, past, min(following, default=None))


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


def refuse_other_batches(pipeline: DataPipeline, segments: Sequence[SegmentSettings]) -> None:
    """Raise `ConfigError` if the size of a step has changed, and the data cannot be cut into other
    steps while the run goes on.
    """
    sizes = {segment.settings.batch_size for segment in segments}
    if len(sizes) == 1 or (pipeline.tape is None and pipeline.plan.steps is None):
        return
    what = "the rows of a stream"
    if pipeline.tape is None:
        what = "lanes, batches by tokens and batches of a sampler"
    raise ConfigError(
        "batch-size-cannot-change",
        problem=f"batch_size cannot change while this run goes on: {what} are cut into steps from the"
        " beginning",
        remedy=("change it back:", Setting("batch_size", segments[0].settings.batch_size)),
        setting="batch_size",
        value=segments[-1].settings.batch_size,
    )
