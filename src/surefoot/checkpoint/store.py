"""A directory of checkpoints, with atomic saves and deletion of old checkpoints.

`step-00000600`: a complete checkpoint, with all bytes flushed before the rename to this name.
`.partial-step-00000600`: a checkpoint that is being written. `.replaced-step-00000600`: an older
checkpoint of the step, until its replacement is complete. `.deleted-step-00000300`: a checkpoint
that is being deleted; after a kill, the next save or start removes dotted directories.
"""

import errno
import math
import re
import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.checkpoint.format import (
    Checkpoint,
    Damage,
    DamageError,
    Others,
    damage_error,
    not_saved,
    size_bytes,
    write,
)
from surefoot.checkpoint.manifest import MANIFEST
from surefoot.checkpoint.reader import read, read_bases, read_manifest, read_together
from surefoot.config.paths import local_path
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, Command, ConfigError, Remedy, Setting, error_of_dict

_NAME = re.compile(r"(\.replaced-)?step-([0-9]{8,18})")
Only = Collection[str] | None
_Remains = list[tuple[Path, OSError]]
Read = TypeVar("Read")


def without_checkpoint(path: Path) -> CheckpointError:
    """Return the error of a directory that has no checkpoint, where one is needed."""
    return CheckpointError("run-without-checkpoint", problem=f"{path} has no checkpoint", path=path)


class NotPrunedError(CheckpointError):
    """An error for an old checkpoint that could not be removed after a successful save."""


class Store:
    """The checkpoints in one directory, for one writing process and any number of reading
    processes.

    A save keeps the newest `keep_last` checkpoints that this process has written or read completely
    (not damaged ones). Step 0, `protected` steps, steps for which `keep_every` returns True, and
    checkpoints with tensors of kept ones are kept too. `guard` runs before each rename or removal,
    and may raise `OSError`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int = 3,
        keep_every: Callable[[int], bool] = lambda _: False,
        guard: Callable[[], None] = lambda: None,
        disk: Disk = DISK,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(
                "keep-last-too-small",
                problem=f"keep_last = {keep_last}: the newest checkpoint must be kept",
                remedy=Setting("keep_last", 1),
                setting="keep_last",
                value=keep_last,
            )
        self.directory = local_path(directory, setting="directory")
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.guard = guard
        self.disk = disk
        self.intact: set[int] = set()
        self.digests: dict[int, str] = {}  # SHA-256 of the manifests that this process has written
        self._bases: dict[int, set[int]] = {}

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint directory, which may not exist."""
        return self.directory / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the directory for writing a step's checkpoint."""
        return self.directory / f".partial-{self.path(step).name}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoint directories in ascending order."""
        return sorted({step for step, _ in self.all()})

    def newest_step(self) -> int | None:
        """Return the newest step with a valid manifest and correct file sizes, or None. No tensor
        is read.
        """
        for step, path in self.all():
            with suppress(DamageError):
                if read_manifest(path, disk=self.disk).step == step:
                    return step
        return None

    def newest_intact(
        self, *, only: Only = None, up_to: float = math.inf, world: World | None = None
    ) -> tuple[Checkpoint, list[Damage]] | None:
        """Return the newest intact checkpoint up to step `up_to`, and the damage of newer
        checkpoints.

        `only` selects entries as in `read`. With a `world` (collective), each rank checks a share
        of the bytes, and tensors stay on disk until use. Returns None without checkpoints; raises
        `CheckpointError` if all are damaged.
        """
        damaged: list[Damage] = []
        # another process may train and remove a checkpoint that was listed: those now there count
        is_alone = world is None or world.size == 1
        for step, path in self._list_on_all_ranks(world):
            if step > up_to:
                continue
            try:
                return self._read(step, path, only, world), damaged
            except DamageError as error:
                is_removed = (step, path) not in self.all()
                if is_alone and is_removed:
                    return self.newest_intact(only=only, up_to=up_to, world=world)
                damaged.append(error.damage)
        if not damaged:
            return None
        shown = [str(damage) for damage in damaged]
        if len(shown) > 2:
            shown = [shown[0], f"and {len(shown) - 1} more"]
        raise CheckpointError(
            "no-intact-checkpoint",
            problem=f"no checkpoint in {self.directory} is intact; nothing was changed",
            reason="\n".join(shown),
            remedy=["restore an intact copy", ("a new run:", Setting("run_dir"))],
            path=self.directory,
            damaged=[damage.path for damage in damaged],
        )

    def at(self, step: int, *, only: Only = None, world: World | None = None) -> Checkpoint:
        """Return the checkpoint of a step with the options of `newest_intact`; raise
        `CheckpointError` if it is damaged or absent.
        """
        first_error: CheckpointError | None = None
        for saved_step, path in self._list_on_all_ranks(world):
            if saved_step != step:
                continue
            try:
                return self._read(step, path, only, world)
            except DamageError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        steps = self.steps()
        raise CheckpointError(
            "step-without-checkpoint",
            problem=f"no checkpoint of step {step} in {self.directory}",
            reason=f"available: {', '.join(map(str, steps)) or 'none'}",
            step=step,
            path=self.directory,
            available=steps,
        )

    def choose(self, read: Callable[[], Read]) -> Read:
        """Return the result of `read`, which chooses and reads checkpoints. It chooses again if one
        of them was removed meanwhile, as a run does that trains.
        """
        while True:
            steps = set(self.steps())
            try:
                return read()
            except CheckpointError:
                if steps <= set(self.steps()):
                    raise

    def best_step(self, newest: Checkpoint) -> int:
        """Return the best step according to the checkpoint `newest`; raise `CheckpointError` if no
        best step is recorded.
        """
        best_step = newest.saved.best_step
        if best_step is None:
            raise CheckpointError(
                "run-without-best-checkpoint",
                problem=f"{self.directory.parent} has no best checkpoint",
                reason="no metric selected one: the run was trained without `best`, or was never"
                " evaluated",
                remedy=[
                    'or train a run with `best`, such as "min val/loss"',
                    Setting("checkpoint", "newest"),
                ],
                path=self.directory.parent,
            )
        return best_step

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        protected: Collection[int] = (),
        others: Others | None = None,
    ) -> Path:
        """Write a checkpoint atomically, then delete old checkpoints; return the new directory.

        A checkpoint of the same step is replaced. `others` are the other ranks that write pieces.
        After a `CheckpointError`, nothing is saved or removed. After a `NotPrunedError`, the
        checkpoint is saved, but an old checkpoint remains on disk.
        """
        step = checkpoint.step
        target = self.path(step)
        partial = self.partial(step)
        try:
            self._prepare(checkpoint)
            digest = write(checkpoint, directory=partial, disk=self.disk, others=others)
            self.intact.discard(step)
            self.guard()  # check again, since the write took a while
            if target.name in self.disk.names(self.directory):
                self.disk.rename(target, target.with_name(f".replaced-{target.name}"))
            self.disk.rename(partial, target)
            self.disk.flush_directory(self.directory)
        except Exception as problem:
            if others is not None:
                others.abandon()  # other ranks must stop before their files are removed
            with suppress(OSError):
                self.clear()
            if isinstance(problem, OSError):
                raise self.not_saved(step, problem) from problem
            raise
        self.intact.add(step)
        self.digests[step] = digest
        self._bases.pop(step, None)
        remains = self._prune(step, protected)
        if remains:
            lines = [f"{path}: {problem.strerror or problem}" for path, problem in remains[:3]]
            raise NotPrunedError(
                "old-checkpoints-not-removed",
                problem=f"{target} is saved, but files that are no longer needed cannot be removed",
                reason="\n".join(lines),
                step=step,
                paths=[path for path, _ in remains],
            )
        return target

    def _prepare(self, checkpoint: Checkpoint) -> None:
        self.guard()
        above = (self.directory, *self.directory.parents)
        absent = [path for path in above if not self.disk.is_directory(path)]
        for path in reversed(absent):
            self.disk.make_directory(path)
            self.disk.flush_directory(path.parent)
        for path, problem in self.clear():
            if path.name.endswith(self.path(checkpoint.step).name):
                raise problem  # the directory that cannot be removed blocks this save
        needed_bytes = size_bytes(checkpoint)
        free_bytes = self.disk.free_bytes(self.directory)
        if free_bytes < needed_bytes:
            needed = f"{needed_bytes / 1e6:,.0f} MB are needed"
            raise OSError(errno.ENOSPC, f"{needed}, {free_bytes / 1e6:,.0f} MB are free")

    def clear(self) -> _Remains:
        """Remove leftover directories, but restore a replaced checkpoint if its replacement is
        missing; return failures.
        """
        self.guard()
        names = self.disk.names(self.directory)
        leftover = (".partial-step-", ".replaced-step-", ".deleted-step-")
        litter = [name for name in names if name.startswith(leftover)]
        if litter:
            # a kill may have cut off the flush of renames, which is due before a removal
            self.disk.flush_directory(self.directory)
        remains = _Remains()
        for name in sorted(litter):
            original = name.removeprefix(".replaced-")
            try:
                if original == name or original in names:
                    self._remove(self.directory / name)
                else:
                    self.disk.rename(self.directory / name, self.directory / original)
                    self.disk.flush_directory(self.directory)
            except OSError as problem:
                remains.append((self.directory / name, problem))
        return remains

    def _prune(self, saved: int, protected: Collection[int]) -> _Remains:
        """Rename old checkpoints before removing them, so that no checkpoint is ever incomplete."""
        steps = self.steps()
        counted = sorted(self.intact.intersection(steps) - {0})
        remains = _Remains()
        since = counted[-self.keep_last] if len(counted) >= self.keep_last else 0
        kept = {0, saved, *protected}
        old = []
        for step in steps:
            if step < since and step not in kept and not self.keep_every(step):
                old.append(step)
        bases: set[int] = set()
        if old:
            for step in steps:
                if step not in old:
                    bases |= self._bases_of(step)
        for step in reversed(old):  # a base goes after the checkpoints that refer to it
            if step in bases:
                bases |= self._bases_of(step)
                continue
            try:
                self.guard()
                if any(step in self._bases_of(later) for later in old):
                    self.disk.flush_directory(self.directory)
                path = self.path(step)
                self.disk.rename(path, path.with_name(f".deleted-{path.name}"))
                self.intact.discard(step)
            except OSError as problem:
                remains.append((self.path(step), problem))
                bases |= self._bases_of(step)
        try:
            return remains + self.clear()
        except OSError as problem:
            return [*remains, (self.directory, problem)]

    def _bases_of(self, step: int) -> set[int]:
        if step not in self._bases:
            try:
                self._bases[step] = read_bases(self.path(step), disk=self.disk)
            except DamageError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                    # its manifest may be readable again later
                    return {older for older in self.steps() if older < step}
                return set()
        return self._bases[step]

    def _remove(self, directory: Path) -> None:
        self.guard()
        if self.disk.is_link(directory):  # remove only the link, never its target
            self.disk.remove(directory)
        else:
            for name in self.disk.names(directory):
                self.disk.remove(directory / name)
            self.disk.remove_directory(directory)

    def _read(self, step: int, path: Path, only: Only, world: World | None) -> Checkpoint:
        if world is not None:
            checkpoint = read_together(path, world, only=only, step=step, disk=self.disk)
        else:
            checkpoint = read(path, only=only, disk=self.disk)
            if checkpoint.step != step:
                raise damage_error(path, f"{MANIFEST}: is for step {checkpoint.step}")
        if only is None and path == self.path(step):
            self.intact.add(step)
        return checkpoint

    def _list_on_all_ranks(self, world: World | None) -> list[tuple[int, Path]]:
        if world is None:
            return self.all()
        listing: Any = None
        if world.is_main:
            try:
                listing = [(step, path.name) for step, path in self.all()]
            except CheckpointError as problem:
                listing = problem.to_dict()
        listing = world.from_main(listing)
        if isinstance(listing, dict):
            raise error_of_dict(listing)
        return [(step, self.directory / name) for step, name in listing]

    def all(self) -> list[tuple[int, Path]]:
        """Return the steps and directories of all checkpoints, newest first. A replaced checkpoint
        follows its replacement.
        """
        if not self.disk.is_directory(self.directory):
            return []
        try:
            names = self.disk.names(self.directory)
        except OSError as problem:
            raise CheckpointError(
                "checkpoints-not-listed",
                problem=f"cannot list {self.directory}: {problem.strerror or problem}",
                path=self.directory,
            ) from problem
        checkpoints = []
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            step = int(match[2])
            # surefoot never writes a name like "step-000000600"
            if name.endswith(self.path(step).name):
                checkpoints.append((step, self.directory / name))
        # of one step, "step-" sorts above ".replaced-"
        return sorted(checkpoints, reverse=True)

    def not_saved(self, step: int, problem: OSError) -> CheckpointError:
        """Return the error for a save that failed with an `OSError`."""
        is_link = problem.errno == errno.ELOOP
        newest = None
        with suppress(CheckpointError):
            newest = self.newest_step()
        why = str(problem.strerror or problem)
        if newest is not None and not is_link:
            why += f"; the newest checkpoint is {self.path(newest).name}"
        where = problem.filename or self.directory
        remedy: Remedy = "check the disk and its write permissions"
        if problem.errno in {errno.ENOSPC, errno.EDQUOT}:
            fewer = f"(now {self.keep_last})"
            remedy = ("free some space, or keep fewer checkpoints:", Setting("keep_last"), fewer)
        elif is_link:
            remedy = Command(f"rm {shlex.quote(str(where))}")
        return not_saved(step, why, where=str(where), remedy=remedy)
