"""The components of a run with what stands around its steps, and what the stages of `run/build.py` hand on until then."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from surefoot.config.parallel import Strategy
from surefoot.config.train_settings import Timetable
from surefoot.data.pipeline import DataPipeline
from surefoot.optim.build import TrainingPlan
from surefoot.run.checkpointing import Checkpointing
from surefoot.schedules.joined import AnySchedule
from surefoot.tracking.console import RankLog
from surefoot.train.compile import Compiling
from surefoot.train.components import Components
from surefoot.train.patience import Feedback, Watch
from surefoot.train.precision import Precision

if TYPE_CHECKING:
    from surefoot.distributed.fsdp import Fsdp


@dataclass(kw_only=True)
class RunComponents(Components):
    """What a run is made of; the session owns it, and changes it in place."""

    checkpointing: Checkpointing | None
    rank_log: RankLog | None  # where the console of a rank above 0 writes
    files: dict[str, str | bytes]  # of the run's directory, by name
    example: str | None  # an input to try `surefoot predict` with
    trackers: tuple[str, ...]  # names

    @property
    def saved_step(self) -> int | None:
        """The last step that is safe on disk; None if none is."""
        return None if self.checkpointing is None else self.checkpointing.writer.saved


@dataclass(frozen=True)
class Plan:
    """What a run is to do with its data: which samples a step sees, what is due when, at which rates, and what steers it."""

    pipeline: DataPipeline
    times: Timetable
    schedule: AnySchedule  # in steps
    watch: Watch | None
    lowering: Feedback | None


@dataclass(frozen=True)
class Models:
    """The models, how they compute, and how each is trained."""

    by_name: dict[str, nn.Module]
    precision: Precision
    compiling: Compiling
    parallel: Strategy
    decisions: dict[str, TrainingPlan]  # parameter groups
    architecture: dict[str, str]
    recomputed: str | None  # which blocks, in words
    notes: list[str]
    fsdp: "Fsdp | None" = None  # what has sharded them
