"""The settings of a run up to the step from which a session goes on, by its journal of changes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from surefoot.config.batch_size import batching
from surefoot.config.paths import absolute_path, run_path
from surefoot.data.pipeline import DataPipeline, TrainData
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting
from surefoot.tracking.change_journal import Change, read_changes
from surefoot.tracking.numbered import rebuilt_run
from surefoot.train.changed_settings import Stretch, changeable, history_of
from surefoot.train.run_settings import RunSettings


@dataclass(frozen=True)
class History:
    """The settings that held, hold and will hold in a run.

    of_program: the values in the program, of settings that can change. stretches: up to the step
    from which the session goes on, the present one last. next_change: the step of the change that
    follows, at which the session ends.
    """

    of_program: dict[str, Any]
    changes: tuple[Change, ...]
    stretches: tuple[Stretch, ...]
    next_change: int | None = None

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""
        return self.stretches[-1].settings

    @property
    def begins(self) -> list[int]:
        return [stretch.begin for stretch in self.stretches]

    @property
    def changed(self) -> set[str]:
        """The names of the settings whose present value is by the journal."""
        begin = self.stretches[-1].begin
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
        for previous, stretch in pairwise(self.stretches):
            before = batching(previous.settings.batch_size, None).batch_size
            after = batching(stretch.settings.batch_size, None).batch_size
            offset += stretch.begin * (before - after)
        return offset


def read_history(settings: RunSettings, data: TrainData, world: World, *, step: int) -> History:
    """Return the history of the run in the directory of the settings, for a session that goes on
    after `step` steps. Raises `ConfigError` if the program has other settings than the run had or
    has. Collective.
    """
    # a `DataLoader` may have given the batch size
    of_program = changeable(settings) | {"batch_size": data.batch_size}
    changes = _changes_of_run(settings, world)
    if not changes:
        return History(of_program, (), (Stretch(0, settings),))
    stretches = history_of(replace(settings, batch_size=data.batch_size), changes)
    past = tuple(stretch for stretch in stretches if stretch.begin <= step)
    following = [stretch.begin for stretch in stretches if stretch.begin > step]
    return History(of_program, changes, past, min(following, default=None))


def _changes_of_run(settings: RunSettings, world: World) -> tuple[Change, ...]:
    """Return the changes in the directory of the settings, as rank 0 reads them. Collective."""
    shown = rebuilt_run() or settings.run_dir
    if shown is None:
        return ()
    read = None
    if world.is_main:
        directory = absolute_path(run_path(shown, setting="run_dir"))
        read = [asdict(change) for change in read_changes(directory)]
    return tuple(Change(**values) for values in world.from_main(read))


def refuse_other_batches(pipeline: DataPipeline, stretches: Sequence[Stretch]) -> None:
    """Raise `ConfigError` if the size of a step has changed, and the data cannot be cut into other
    steps while the run goes on.
    """
    sizes = {stretch.settings.batch_size for stretch in stretches}
    if len(sizes) == 1 or (pipeline.tape is None and pipeline.plan.steps is None):
        return
    what = "the rows of a stream"
    if pipeline.tape is None:
        what = "lanes, batches by tokens and batches of a sampler"
    raise ConfigError(
        "batch-size-cannot-change",
        problem=f"batch_size cannot change while this run goes on: {what} are cut into steps from the"
        " beginning",
        remedy=("change it back:", Setting("batch_size", stretches[0].settings.batch_size)),
        setting="batch_size",
        value=stretches[-1].settings.batch_size,
    )
