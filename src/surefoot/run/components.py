"""The components of a run with what stands around its steps: checkpoints, files of its directory."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.run.checkpointing import Saving
from surefoot.tracking.rank_log import RankLog
from surefoot.train.components import Components


@dataclass(kw_only=True)
class RunComponents(Components):
    """What a run is made of; the session owns it, and changes it in place."""

    saving: Saving | None
    rank_log: RankLog | None  # where the console of a rank above 0 writes
    files: dict[str, str | bytes]  # of the run's directory, by name
    example: str | None  # an input to try `surefoot predict` with
    trackers: tuple[str, ...]  # names

    @property
    def saved_step(self) -> int | None:
        """The last step that is safe on disk; None if none is."""
        return None if self.saving is None else self.saving.saved_step
