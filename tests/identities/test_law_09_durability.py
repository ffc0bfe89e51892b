"""Law 9: a checkpoint exists completely or not at all, and any damage is found and named.

A save is cut off, or made to fail, at each of its operations on files in turn; in a power cut all that was
not flushed is lost, kept or torn, in many combinations, by a small model of a file system. Then always: the
newest intact checkpoint is the old or the new one; those that the save had no business with are intact; the
next save succeeds, and leaves no litter. 19 seconds.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from surefoot.checkpoint import Contents, Damage, Disk, Store, verify
from surefoot.errors import CheckpointError

ROOT = Path("/runs/a/checkpoints")
KEEP = 2


# ---- a file system that remembers what a power cut would leave ----


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class Directory:
    entries: dict[str, File | Directory] = field(default_factory=dict)
    flushed: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[dict[str, File | Directory | None]] = field(default_factory=list)  # each change is atomic

    def change(self, change: dict[str, File | Directory | None]) -> None:
        self.pending.append(change)
        apply(change, self.entries)


def apply(change: dict[str, File | Directory | None], entries: dict[str, File | Directory]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Medium:
    """Files and directories in memory; `after_power_cut` is what could be found of them."""

    def __init__(self, root: Directory | None = None) -> None:
        self.root = root or Directory()
        self.open: dict[int, File] = {}

    def node(self, path: PurePath) -> File | Directory:
        found: File | Directory = self.root
        for part in path.parts[1:]:
            if not isinstance(found, Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            if part not in found.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            found = found.entries[part]
        return found

    def directory(self, path: PurePath) -> Directory:
        found = self.node(path)
        if not isinstance(found, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return found

    def file(self, path: PurePath) -> File:
        found = self.node(path)
        if not isinstance(found, File):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return found

    def _new(self, path: PurePath, node: File | Directory) -> None:
        if path.name in self.directory(path.parent).entries:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self.directory(path.parent).change({path.name: node})

    def make_directory(self, path: Path) -> None:
        self._new(path, Directory())

    def create(self, path: Path) -> int:
        file = File()
        self._new(path, file)
        handle = max(self.open, default=0) + 1
        self.open[handle] = file
        return handle

    def append(self, handle: int, data: memoryview) -> None:
        self.open[handle].data += data

    def flush(self, handle: int) -> None:
        self.open[handle].flushed = bytes(self.open[handle].data)

    def close(self, handle: int) -> None:
        del self.open[handle]

    def flush_directory(self, path: Path) -> None:
        held = self.directory(path)
        held.flushed, held.pending = dict(held.entries), []

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        node, there = self.node(source), self.directory(target.parent).entries.get(target.name)
        if isinstance(there, Directory) and there.entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        self.directory(source.parent).change({source.name: None, target.name: node})

    def remove(self, path: Path) -> None:
        self.file(path)
        self.directory(path.parent).change({path.name: None})

    def remove_directory(self, path: Path) -> None:
        if self.directory(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        self.directory(path.parent).change({path.name: None})

    def is_directory(self, path: Path) -> bool:
        try:
            return isinstance(self.node(path), Directory)
        except OSError:
            return False

    def names(self, path: Path) -> list[str]:
        return list(self.directory(path).entries)

    def size(self, path: Path) -> int:
        return len(self.file(path).data)

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        return bytes(self.file(path).data[start : start + length])

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def after_power_cut(self, fate: Callable[[], float]) -> Medium:
        """What is found afterwards; `fate` decides on everything not flushed: 0 it is lost, 1 it is there."""
        return Medium(_survivors(self.root, fate))

    def copied(self) -> Medium:
        return self.after_power_cut(lambda: 1.0)

    def copied_with_pending(self) -> Medium:
        return Medium(copy.deepcopy(self.root))


def _survivors(directory: Directory, fate: Callable[[], float]) -> Directory:
    entries = dict(directory.flushed)
    for change in directory.pending:
        if fate() > 0.5:
            apply(change, entries)
    found: dict[str, File | Directory] = {}
    for name, node in entries.items():
        if isinstance(node, Directory):
            found[name] = _survivors(node, fate)
        else:
            data = bytes(node.data) if bytes(node.data) == node.flushed else _torn(node, fate())
            found[name] = File(bytearray(data), data)
    return Directory(dict(found), dict(found))


def _torn(file: File, fate: float) -> bytes:
    """Nothing, all, the length without the bytes, or a beginning."""
    if fate in {0.0, 1.0}:
        return file.flushed if fate == 0.0 else bytes(file.data)
    if fate < 0.3:
        return bytes(len(file.data))
    kept = int(len(file.data) * fate)
    return bytes(file.data[:kept]) + (bytes(len(file.data) - kept) if fate < 0.6 else b"")


# ---- a disk on which one operation goes wrong ----

CHANGES = {"make_directory", "create", "append", "flush", "close", "flush_directory", "rename"}
CHANGES |= {"remove", "remove_directory"}
NEEDS_ROOM = {"make_directory", "create", "append"}


class Killed(BaseException):
    """As a SIGKILL: nothing runs any more, no `except` and no `finally` that touches a file."""


class Faulty:
    """Passes on to `disk`; the operation number `at` (from 1) goes wrong, and `happened` tells."""

    def __init__(
        self,
        disk: Any,
        fault: Callable[[str], None],
        *,
        at: int,
        only: set[str] | None = None,
        for_good: bool,
    ) -> None:
        self.disk, self.fault, self.at, self.only, self.for_good = disk, fault, at, only, for_good
        self.operations, self.happened = 0, False

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.disk, name)
        if name not in CHANGES:
            return operation

        def attempted(*arguments: Any) -> Any:
            self.operations += 1
            counts = self.only is None or name in self.only
            if counts and (self.operations == self.at or (self.for_good and self.operations > self.at)):
                if name == "append":  # half of it still arrives
                    operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "close":  # closed even where that fails, as Linux does
                    operation(*arguments)
                self.happened = True
                self.fault(name)
            return operation(*arguments)

        return attempted


def killed(name: str) -> None:
    raise Killed


def killed_for_real(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Callable[[str], None]:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault


# ---- what is saved, and what must be found ----


def contents(step: int, *, version: int = 0) -> Contents:
    generator = torch.Generator().manual_seed(1000 * version + step)
    model = {"weight": torch.randn(3, 2, generator=generator), "steps": torch.tensor(step)}
    optimizer = {"weight/momentum": torch.randn(3, 2, generator=generator)}
    return Contents(step, {"model": model, "optimizer": optimizer}, {"loss": 0.1 * step, "v": version}, (10, "ab"))


def newest_intact(store: Store) -> tuple[Contents | None, list[Damage]]:
    return store.newest_intact() or (None, [])


def same(found: Contents | None, expected: Contents | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        (found.step, found.state, found.log) == (expected.step, expected.state, expected.log)
        and found.files.keys() == expected.files.keys()
        and all(
            held.keys() == expected.files[file].keys()
            and all(torch.equal(tensor, expected.files[file][name]) for name, tensor in held.items())
            for file, held in found.files.items()
        )
    )


@dataclass
class Scene:
    """Checkpoints, and a save about to happen: `before` and `after` are the newest intact ones."""

    disk: Any
    root: Path
    before: Contents | None
    after: Contents
    bystanders: list[Contents]
    known: set[int] = field(default_factory=set)
    pruned: list[Contents] = field(default_factory=list)

    def store(self, disk: Any) -> Store:
        store = Store(self.root, keep=KEEP, disk=disk)
        store.intact |= self.known
        return store


def flip(disk: Any, path: Path) -> None:
    if isinstance(disk, Medium):
        file = disk.file(path)
        file.data[-1] ^= 1
        file.flushed = bytes(file.data)
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def scene(name: str, disk: Any, root: Path) -> Scene:
    if name == "the first":
        return Scene(disk, root, None, contents(0), [])
    store = Store(root, keep=KEEP, disk=disk)
    for step in (0, 1, 2, 3):
        store.save(contents(step))
    match name:
        case "the next, which prunes one, past the litter of a kill":
            with pytest.raises(Killed):
                Store(root, keep=KEEP, disk=Faulty(disk, killed, at=7, for_good=True)).save(contents(4, version=9))
            return Scene(disk, root, contents(3), contents(4), [contents(0), contents(3)], {2, 3}, [contents(2)])
        case "another of the same step":
            return Scene(disk, root, contents(3), contents(3, version=1), [contents(0), contents(2)], {2, 3})
        case "one in the place of a damaged one":
            flip(disk, store.path(3) / "model.safetensors")
            return Scene(disk, root, contents(2), contents(3, version=1), [contents(0), contents(2)], {2})
    raise AssertionError(name)


SCENES = [
    "the first",
    "the next, which prunes one, past the litter of a kill",
    "another of the same step",
    "one in the place of a damaged one",
]


def assert_law(scene: Scene, disk: Any, *, saved: bool | None = None) -> None:
    """`saved`: whether the new one must be there; None where either will do."""
    store = Store(scene.root, keep=KEEP, disk=disk)
    found, damaged = newest_intact(store)
    is_old, is_new = same(found, scene.before), same(found, scene.after)
    assert (is_old or is_new) if saved is None else is_new if saved else is_old
    assert all(damage.path.name in str(damage) for damage in damaged)
    for bystander in scene.bystanders + (scene.pruned if is_old else []):
        assert same(store.at(bystander.step), bystander)
    store.save(contents(9))
    newest, damaged = newest_intact(store)
    assert same(newest, contents(9))
    assert not damaged
    assert not [name for name in disk.names(scene.root) if not name.startswith("step-")]


def every_fault(name: str, fault: Callable[[str], None], **how: Any) -> Iterator[tuple[Scene, Faulty]]:
    """The scene afresh, with a disk on which the n-th operation goes wrong, for every n."""
    medium = Medium()
    medium.make_directory(Path("/runs"))
    medium.flush_directory(Path("/"))
    start = scene(name, medium, ROOT)
    at = 0
    while True:
        at += 1
        fresh = Scene(medium.copied(), ROOT, start.before, start.after, start.bystanders, start.known, start.pruned)
        faulty = Faulty(fresh.disk, fault, at=at, **how)
        yield fresh, faulty
        if faulty.operations < at:
            assert at > 15
            return


# ---- the law ----


@pytest.mark.parametrize("name", SCENES)
def test_a_save_killed_before_any_operation_leaves_the_old_or_the_new_checkpoint(name: str) -> None:
    for scene, disk in every_fault(name, killed, for_good=True):
        try:
            scene.store(disk).save(scene.after)
        except Killed:
            assert_law(scene, scene.disk)
        else:
            assert_law(scene, scene.disk, saved=True)


@pytest.mark.parametrize("name", SCENES)
def test_after_a_power_cut_the_old_or_the_new_checkpoint_is_found_whatever_was_not_flushed(name: str) -> None:
    generator = random.Random(name)
    fates: list[Callable[[], float]] = [lambda: 0.0, lambda: 1.0, *[generator.random] * 30]
    for scene, disk in every_fault(name, killed, for_good=True):
        try:
            scene.store(disk).save(scene.after)
        except Killed:
            saved = None
        else:
            saved = True  # what `save` has returned from, no power cut takes back
        for fate in fates:
            assert_law(scene, scene.disk.after_power_cut(fate), saved=saved)


@pytest.mark.parametrize("name", SCENES[1:3])
def test_a_kill_then_another_then_a_power_cut_leave_the_old_or_the_new_checkpoint(name: str) -> None:
    generator = random.Random(name)
    for scene, disk in every_fault(name, killed, for_good=True):
        with suppress(Killed):
            scene.store(disk).save(scene.after)
        at, once_more = 0, True
        while once_more:
            at += 1
            found = scene.disk.copied_with_pending()
            again = Faulty(found, killed, at=at, for_good=True)
            with suppress(Killed):
                scene.store(again).save(scene.after)
            for fate in (lambda: 0.0, generator.random, generator.random):
                assert_law(scene, found.after_power_cut(fate))
            once_more = again.happened


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "failing disk"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", SCENES)
def test_a_save_failing_at_any_operation_says_so_and_leaves_the_old_checkpoint(
    name: str, for_good: bool, number: int
) -> None:
    only = NEEDS_ROOM if number == errno.ENOSPC else None
    for scene, disk in every_fault(name, failing(number), for_good=for_good, only=only):
        said = ""
        try:
            scene.store(disk).save(scene.after)
        except CheckpointError as error:
            said = str(error)
        assert not scene.disk.open, "a file is left open"
        if not said:  # what is in the way may resist removal at first, as long as it yields in the end
            assert not disk.happened or not for_good
            assert_law(scene, scene.disk, saved=True)
            continue
        assert disk.happened
        assert os.strerror(number) in said
        assert len(said.splitlines()) <= 5
        only_remains = "is saved, but" in said
        full = number == errno.ENOSPC  # a disk that fails may have failed to say that it had succeeded
        assert_law(scene, scene.disk, saved=True if only_remains else False if full else None)


def damaged_copies(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]
    for length in range(len(data)):
        yield data[:length]
    yield data + b"\0"
    yield data + data
    yield bytes(len(data))


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_any_flipped_bit_and_any_lost_or_added_byte_is_found_and_named(name: str) -> None:
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    for step in (0, 1, 2):
        store.save(contents(step))
    file = medium.file(store.path(2) / name)
    whole = bytes(file.data)
    for data in damaged_copies(whole):
        file.data = bytearray(data)
        found, damaged = newest_intact(store)
        assert found is not None
        assert found.step == 1
        assert [damage.path for damage in damaged] == [store.path(2)]
        assert name in str(damaged[0])
        assert any(name in problem for problem in verify(store.path(2), disk=medium))
    file.data = bytearray(whole)
    assert same(store.at(2), contents(2))
    medium.remove(store.path(2) / name)
    found, damaged = newest_intact(store)
    assert same(found, contents(1))
    assert str(damaged[0]) == f"checkpoint step-00000002 is damaged ({name}: missing)"


def test_a_file_that_cannot_be_read_is_damage_and_the_next_older_checkpoint_is_used(tmp_path: Path) -> None:
    class Unreadable(Medium):
        def read(self, path: Path, *, start: int, length: int) -> bytes:
            if path.name == "optimizer.safetensors" and path.parent.name == "step-00000002":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, start=start, length=length)

    store = Store(Path("/checkpoints"), disk=Unreadable())
    for step in (1, 2):
        store.save(contents(step))
    found, damaged = newest_intact(store)
    assert same(found, contents(1))
    assert "optimizer.safetensors: cannot be read: Input/output error" in str(damaged[0])


def test_where_everything_is_damaged_that_is_said_and_nothing_is_changed() -> None:
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    for step in (0, 1, 2):
        store.save(contents(step))
        flip(medium, store.path(step) / "state.json")
    with pytest.raises(CheckpointError) as error:
        store.newest_intact()
    said = str(error.value)
    assert "checkpoint step-00000002 is damaged (state.json: hash differs)\n  and 2 more" in said
    assert len(said.splitlines()) <= 5
    assert store.steps() == [0, 1, 2]


# ---- real processes, real files ----

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a copy of this process; its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@posix
@forks
@pytest.mark.parametrize("name", SCENES)
def test_a_process_killed_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(
    name: str, tmp_path: Path
) -> None:
    at, status = 0, -1
    while status != 0:
        at += 1
        root = tmp_path / f"{at}" / "checkpoints"
        start = scene(name, Disk(), root)
        store = start.store(Faulty(Disk(), killed_for_real, at=at, for_good=False))
        status = os.waitpid(forked(partial(store.save, start.after)), 0)[1]
        assert status in {0, signal.SIGKILL}
        assert_law(start, Disk(), saved=True if status == 0 else None)
    assert at > 15


@posix
@forks
def test_a_process_killed_at_random_moments_goes_on_from_where_it_was(tmp_path: Path) -> None:
    generator = random.Random(0)
    newest = 0

    def save_on() -> None:
        store = Store(tmp_path, keep=KEEP)
        found, _ = newest_intact(store)
        step = 0 if found is None else found.step
        while True:
            step += 1
            store.save(contents(step))

    for _ in range(20):
        child = forked(save_on)
        time.sleep(generator.uniform(0.01, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found, damaged = newest_intact(Store(tmp_path))
        assert not damaged
        step = 0 if found is None else found.step
        assert step >= newest
        assert found is None or same(found, contents(step))
        newest = step
    assert newest > 20
    Store(tmp_path).save(contents(newest + 1))
    assert all(name.startswith("step-") for name in os.listdir(tmp_path))
