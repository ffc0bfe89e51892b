"""The checkpoints of a run: background saves, retries after failures, and warnings. Each rank has a
`Checkpointing`.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.tensor_file import HostMemory
from surefoot.checkpoint.writer import Writer
from surefoot.config.train_settings import Timetable
from surefoot.distributed.world import World
from surefoot.errors import SurefootError, error_of_dict
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.state_dict import Bases

if TYPE_CHECKING:
    from surefoot.checkpoint.frozen import Frozen, FrozenTensors
    from surefoot.data.streams.recorder import Recorder

Packing = Callable[[Bases], Checkpoint]
_RETRY_S = 30.0  # wait after a failed save


@dataclass
class BeforeWrite:
    """What comes before a checkpoint is written: its directory is no link, and the rows of a stream
    are on the disk.
    """

    directory: RunDirectory
    tape: "Recorder | None" = None  # of a stream, on rank 0

    def __call__(self) -> None:
        self.directory.refuse_links()
        if self.tape is not None:
            # a checkpoint never knows rows that a power failure could take away
            self.tape.flush()


def _is_kept(times: Timetable, begins: Collection[int], step: int) -> bool:
    """Return True for a checkpoint that stays: of `keep_every`, or with which other settings begin,
    so that steps of each setting can be repeated.
    """
    return step in begins or times.every["keep_every"].due(step)


class Checkpointing:
    """The checkpoints of one run: the due saves, the save in progress, and the last step on disk.
    `begins` has the steps from which on other settings hold.
    """

    def __init__(
        self,
        directory: RunDirectory,
        times: Timetable,
        *,
        begins: Collection[int] = (),
        disk: Disk,
        say: Callable[[str], None],
        world: World,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world = world
        self.times = times
        self.say = say
        self.now = now
        self.before_write = BeforeWrite(directory)
        self.store = Store(
            directory.checkpoints,
            keep_last=times.settings.keep_last,
            keep_every=partial(_is_kept, times, frozenset(begins)),
            guard=self.before_write,
            disk=disk,
        )
        self.writer = Writer(
            self.store,
            rank=world.rank,
            mail=world.mailbox("checkpoint") if world.size > 1 else None,
            now=now,
        )
        self.memory = HostMemory()
        self.frozen: FrozenTensors | None = None  # of a run with frozen parameters
        self.save_requested = False  # because of a new best score or a signal
        self.started_step: int | None = None  # step of the newest save, finished or not
        self.started_at = now()  # of the newest save
        self.copying_s = 0.0  # duration for which training waited for the newest save
        self.longest_s = 0.0  # duration of the longest save

    def due(self, done: int) -> bool:
        """Return True if a save is due after `done` steps or was requested. The result is equal on
        all ranks.
        """
        every = self.times.every
        return self.save_requested or every["save_every"].due(done) or every["keep_every"].due(done)

    def wanted(self) -> bool:
        """Return True on rank 0 if a save is due by time, or if a failed save must be retried.
        Called before every step.
        """
        if not self.world.is_main:
            return False
        tape = self.before_write.tape
        if tape is not None and tape.wants_save and self.started_step == self.writer.saved:
            return True
        every = self.times.every["save_every"]
        since_s = self.now() - self.started_at
        has_failed = self.writer.failure is not None
        soonest_s = every.seconds_if_cheap or every.seconds
        if not has_failed and (soonest_s is None or since_s < soonest_s):
            return False
        if has_failed and since_s >= _RETRY_S:
            return True
        every_s = every.interval_s(cost_s=self.copying_s + self.writer.took_s)
        return every_s is not None and since_s >= every_s

    def save(self, packed: Packing, *, protected: tuple[int, ...] = (), wait: bool = False) -> None:
        """Copy the state and write it in the background. Warns if the previous save failed. All
        ranks call `save` after the same step.
        """
        self.save_requested = False
        self.started_at = self.now()
        self.wait()
        copying_from = self.now()
        with self.memory.reused():  # no save is running
            checkpoint = packed(self._bases)
        self.writer.submit(checkpoint, protected=protected)
        self.started_step = checkpoint.step
        self.copying_s = self.now() - copying_from
        if wait:
            self.writer.wait()
        self.longest_s = max(self.longest_s, self.now() - self.started_at)

    def wait(self) -> None:
        """Wait for the last save. Prints a warning if the save failed or old checkpoints cannot be
        removed.
        """
        self.writer.wait()
        if self.writer.not_pruned is not None:
            self.say(f"warning: {self.writer.not_pruned}")
        if self.writer.failure is not None:
            self.say(
                f"WARNING: NOT SAVED: {self.writer.failure}\n  training continues, and the next attempt"
                f" to save is in {_RETRY_S:.0f} s"
            )

    def finish(self, step: int, packed: Packing, *, protected: tuple[int, ...] = ()) -> None:
        """Save the state after `step` steps and wait until it is on disk. Raises `CheckpointError`
        if the save fails. Collective.
        """
        self.writer.wait()
        has_failed = self.writer.failure is not None
        is_unsaved = self.started_step != step or has_failed or self.save_requested
        if any(self.world.gathered(is_unsaved)):
            self.save(packed, protected=protected, wait=True)
        failure = self.writer.failure
        failures = self.world.gathered(None if failure is None else failure.to_dict())
        for failure_of_rank in failures:
            if failure_of_rank is not None:
                raise failure or error_of_dict(failure_of_rank)
        self.wait()
        self.memory = HostMemory()

    def resumed(self, checkpoint: Checkpoint, frozen: "Frozen") -> None:
        """Continue after a checkpoint that was restored; `frozen` are its frozen tensors."""
        self.started_step = checkpoint.step
        self.writer.saved = checkpoint.step
        if frozen:
            self._frozen_tensors().resumed(checkpoint, frozen)

    def lost(self) -> bool:
        """Return True if the newest checkpoint was deleted."""
        self.writer.wait()
        return self.writer.saved is not None and not self.store.path(self.writer.saved).is_dir()

    def remove_leftovers(self) -> None:
        """Remove what a kill after the last save has left. A directory that cannot be written stays
        as it is.
        """
        with suppress(OSError, SurefootError):
            self.store.clear()

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint or None. Warns of damaged newer checkpoints.
        Collective.
        """
        intact = self.store.newest_intact(world=self.world if self.world.size > 1 else None)
        if intact is None:
            return None
        checkpoint, damaged = intact
        for damage in damaged:
            self.say(f"warning: {damage}: resuming from step-{checkpoint.step:08d}")
        return checkpoint

    def at(self, step: int, *, only: Collection[str] | None = None) -> Checkpoint:
        """Wait for pending saves and return a step's checkpoint. Raises `CheckpointError` if it is
        damaged or absent. Collective.
        """
        self.writer.wait()
        return self.store.at(step, only=only, world=self.world if self.world.size > 1 else None)

    def _bases(self, step: int, frozen: "Frozen") -> list[Base]:
        stored = self._frozen_tensors()
        stored.saved(self.writer.saved if self.writer.failure is None else None)
        return stored.bases(step, frozen)

    def _frozen_tensors(self) -> "FrozenTensors":
        from surefoot.checkpoint.frozen import FrozenTensors

        if self.frozen is None:
            self.frozen = FrozenTensors(self.store, self.world)
        return self.frozen
