"""The saves of a session: what a checkpoint holds between two steps, and a directory that was deleted
while the run trains.
"""

import errno
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from surefoot.run.checkpointing import Checkpointing, Packing
from surefoot.tracking.branches import LeftBranches
from surefoot.tracking.logger import Journal
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.patience import Best


@dataclass(frozen=True)
class Saves:
    """The saves of one session of a run with a directory. All methods are collective.

    packed: returns the contents of a checkpoint between two steps. is_main: this is rank 0, which
    keeps the directory. left: branches that are kept until the run has passed them, on rank 0.
    """

    checkpointing: Checkpointing
    journal: Journal
    directory: RunDirectory
    _: KW_ONLY
    packed: Packing
    best: Best | None
    is_main: bool
    say: Callable[[str], None]
    left: LeftBranches = field(default_factory=LeftBranches)

    def save(self) -> None:
        """Save a checkpoint in the background. Call `keep_directory` before."""
        self.checkpointing.save(self.packed, protected=self._protected)
        self.left.passed(self.checkpointing.writer.saved)

    def save_last(self, step: int) -> None:
        """Save the state after `step` steps, if it is not saved, and wait until it is on disk."""
        self.keep_directory()
        self.finish(step)

    def finish(self, step: int) -> None:
        """Like `save_last`, in a directory that was not deleted."""
        self.checkpointing.finish(step, self.packed, protected=self._protected)
        self.left.passed(self.checkpointing.writer.saved)

    def save_again(self, step: int) -> None:
        """Save the state after `step` steps, also if it is saved, and wait until it is on disk."""
        self.checkpointing.started_step = None
        self.save_last(step)

    def keep_directory(self) -> None:
        """Create a deleted directory and its files again, and request a save of the whole run."""
        if not self.is_main:
            return
        try:
            self.directory.refuse_links()
            has_new_directory = self.directory.make_again()
            has_new_records = self.journal.make_again(self.directory)
            has_lost_checkpoint = self.checkpointing.lost()
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            return  # the next save fails for the same reason and prints it
        if has_new_directory or has_new_records or has_lost_checkpoint:
            self.checkpointing.save_requested = True
            self.say(
                f"WARNING: {self.directory.shown}, or a part of it, was deleted during training\n"
                "  the directory is created again and the complete run is saved; other deleted"
                " files are lost"
            )

    @property
    def _protected(self) -> tuple[int, ...]:
        """The steps of checkpoints that are not removed."""
        return () if self.best is None else self.best.steps
