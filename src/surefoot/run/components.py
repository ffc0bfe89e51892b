"""The components of a run, and the results of the stages in `run/build.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from surefoot.checkpoint.format import Checkpoint
from surefoot.config.extras import is_installed, needed_for
from surefoot.config.parallel import Strategy
from surefoot.config.setting_change import SettingChange
from surefoot.data.data_values import DataValues
from surefoot.data.pipeline import DataPipeline, OpenedBySession
from surefoot.errors import ConfigError, Setting, first_line
from surefoot.optim.build import TrainingPlan
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.history import StepSize
from surefoot.tracking.console import RankLog
from surefoot.train.components import Components
from surefoot.train.evaluate import Split
from surefoot.train.patience import Best, Feedback, ScoreWatch

if TYPE_CHECKING:
    from surefoot.distributed.fsdp import Fsdp


@dataclass(kw_only=True)
class RunComponents(Components):
    """The components of a run. The session changes its components in place."""

    checkpointing: Checkpointing | None
    rank_log: RankLog | None  # the console of ranks above 0
    files: dict[str, str | bytes]  # additional files of the run's directory, by name
    example: str | None  # an example input for `surefoot predict`
    trackers: tuple[str, ...]  # names
    alert: str | None = None  # where this session sends findings of severity error
    follows: bool = False  # another session of this process, which had other settings
    # of ramps, with which the journal of a new run begins once step 0 is saved
    first_changes: tuple[SettingChange, ...] = ()

    @cached_property
    def writes_tensorboard(self) -> bool:
        """True if the run writes TensorBoard files; "auto" does so if the package can be imported,
        and True raises `ConfigError` if not.
        """
        setting = self.settings.tensorboard
        is_wanted = is_installed("tensorboard") if setting == "auto" else setting
        if self.directory is None or not is_wanted:
            return False
        if not self.world.is_main:  # other ranks write none, and need no package
            return True
        instead = Setting("tensorboard", "auto")
        try:
            with needed_for("tensorboard = True", "tensorboard", instead=instead):
                from surefoot.tracking.tensorboard import event_format

                event_format()
        except ConfigError as problem:
            if setting != "auto":
                raise
            cause = problem.__cause__ or problem
            self.say(
                "note: no TensorBoard files, because the import of tensorboard fails:"
                f" {type(cause).__name__}: {first_line(cause)}"
            )
            return False
        return True

    def open_tape(self, checkpoint: Checkpoint | None) -> None:
        """Let rank 0 record the rows of a stream behind those that the checkpoint has read, and put
        the tapes of splits into the run's directory. Collective.
        """
        for split in self.evaluator.splits.values():
            if isinstance(split.data, OpenedBySession):
                split.data.open_in_run(self.world)
        tape = self.pipeline.tape
        if tape is None:
            return
        from surefoot.data.streams.opening import open_tape

        checkpointing = self.checkpointing
        open_tape(
            tape,
            self.world,
            run_dir=None if self.directory is None else self.directory.path,
            steps=self.length.steps,
            facts=None if checkpoint is None else checkpoint.saved.tape,
            saved_step=None if checkpointing is None else lambda: checkpointing.writer.saved,
            disk=self.settings.disk,
            say=self.say,
        )
        if checkpointing is not None:
            checkpointing.before_write.tape = tape.recorder

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint on disk, or None."""
        return None if self.checkpointing is None else self.checkpointing.writer.saved


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    pipeline: DataPipeline
    splits: Mapping[str, Split]  # those of the settings, with rows in the place of streams
    values: DataValues
    earlier: tuple[StepSize, ...]  # the sizes of steps before each change of settings


@dataclass(frozen=True)
class Steering:
    """The scores that steer training."""

    best: Best | None
    stopping: list[ScoreWatch]
    lowering: Feedback | None


@dataclass(frozen=True)
class Models:
    """The models, their parallel strategy, and the training plan of each model."""

    by_name: dict[str, nn.Module]
    parallel: Strategy
    decisions: dict[str, TrainingPlan]  # parameter groups
    architecture: dict[str, str]
    recomputed: str | None  # description of activation checkpointing
    was_compiled: bool  # by the user
    notes: list[str]
    fsdp: "Fsdp | None" = None
