"""Law 9: a checkpoint exists completely or not at all, and any damage is found and named.

A save is cut off, or made to fail, at each of its operations on files in turn; in a power cut all
that was not flushed is lost, kept or torn, in many combinations, by a small model of a file system.
Then always: the newest intact checkpoint is the old or the new one; those that the save had no
business with are intact; the next save succeeds, and leaves no litter. Checkpoints whose frozen
tensors are in older ones are intact as long as they are there. 19 seconds.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from in_one import in_one
from medium import NEEDS_ROOM, Faulty, Killed, Medium, failing, killed, killed_for_real
from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import Damage
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.reader import read_manifest, verify
from surefoot.errors import CheckpointError
from waiting import wait_until

ROOT = Path("/runs/a/checkpoints")
KEEP = 2


# ---- what is saved, and what must be found ----


def contents(step: int, *, version: int = 0) -> Checkpoint:
    generator = torch.Generator().manual_seed(1000 * version + step)
    model = {"weight": torch.randn(3, 2, generator=generator), "steps": torch.tensor(step)}
    optimizer = {"weight/momentum": torch.randn(3, 2, generator=generator)}
    return Checkpoint(
        step,
        {"model": model, "optimizer": optimizer},
        {"loss": 0.1 * step, "v": version},
        (10, "ab"),
    )


def newest_intact(store: Store) -> tuple[Checkpoint | None, list[Damage]]:
    return store.newest_intact() or (None, [])


def same(found: Checkpoint | None, expected: Checkpoint | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        (found.step, found.state, found.log) == (expected.step, expected.state, expected.log)
        and found.files.keys() == expected.files.keys()
        and all(
            held.keys() == expected.files[file].keys()
            and all(
                torch.equal(tensor, expected.files[file][name]) for name, tensor in held.items()
            )
            for file, held in found.files.items()
        )
    )


@dataclass
class Scene:
    """Checkpoints, and a save about to happen: `before` and `after` are the newest intact ones."""

    disk: Any
    root: Path
    before: Checkpoint | None
    after: Checkpoint
    bystanders: list[Checkpoint]
    known: set[int] = field(default_factory=set)
    pruned: list[Checkpoint] = field(default_factory=list)
    saved: Checkpoint | None = None  # what is saved as `after`, where that is less
    damaged: str = ""

    def save(self, disk: Any) -> None:
        self.store(disk).save(self.saved or self.after)

    def store(self, disk: Any) -> Store:
        store = Store(self.root, keep_last=KEEP, disk=disk)
        store.intact |= self.known
        return store


def with_trunk(step: int, version: int) -> Checkpoint:
    """A checkpoint with a frozen trunk, of which there are several versions."""
    plain = contents(step)
    trunk = torch.randn(4, 2, generator=torch.Generator().manual_seed(version))
    return replace(plain, files={**plain.files, "model": {**plain.files["model"], "trunk": trunk}})


def referring(checkpoint: Checkpoint, base: int, disk: Any, root: Path) -> Checkpoint:
    """The same checkpoint as it is saved where another one has its trunk."""
    model = {
        name: tensor for name, tensor in checkpoint.tensors("model").items() if name != "trunk"
    }
    digest = read_manifest(Store(root).path(base), disk=disk).sha256
    return replace(
        checkpoint,
        files={**checkpoint.files, "model": model},
        bases=[Base(base, digest, {"model": ["trunk"]})],
    )


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
    store = Store(root, keep_last=KEEP, disk=disk)
    if (
        name == REFERRING
    ):  # the trunk has changed at steps 2 and 5; 4 needs 2, and both are pruned now
        for step, base in enumerate((0, 0, 2, 2, 2, 5)):
            plain = with_trunk(step, base)
            store.save(plain if base == step else referring(plain, base, disk, root))
        assert store.steps() == [0, 2, 4, 5]
        before, after = with_trunk(5, 5), with_trunk(6, 5)
        gone = [with_trunk(4, 2), with_trunk(2, 2)]
        saved = referring(after, 5, disk, root)
        return Scene(disk, root, before, after, [with_trunk(0, 0), before], {4, 5}, gone, saved)
    for step in (0, 1, 2, 3):
        store.save(contents(step))
    match name:
        case "the next, which prunes one, past the litter of a kill":
            with pytest.raises(Killed):
                Store(root, keep_last=KEEP, disk=Faulty(disk, killed, at=7, for_good=True)).save(
                    contents(4, version=9)
                )
            return Scene(
                disk,
                root,
                contents(3),
                contents(4),
                [contents(0), contents(3)],
                {2, 3},
                [contents(2)],
            )
        case "another of the same step":
            return Scene(
                disk, root, contents(3), contents(3, version=1), [contents(0), contents(2)], {2, 3}
            )
        case "one in the place of a damaged one":
            flip(disk, store.path(3) / "model.safetensors")
            start = Scene(
                disk, root, contents(2), contents(3, version=1), [contents(0), contents(2)], {2}
            )
            return replace(start, damaged=store.path(3).name)
    raise AssertionError(name)


REFERRING = "one that refers to an older one, and prunes one that another had referred to"
SCENES = [
    "the first",
    "the next, which prunes one, past the litter of a kill",
    "another of the same step",
    "one in the place of a damaged one",
    REFERRING,
]


def assert_law(scene: Scene, disk: Any, *, saved: bool | None = None) -> None:
    """`saved`: whether the new one must be there; None where either will do."""
    store = Store(scene.root, keep_last=KEEP, disk=disk)
    found, damaged = newest_intact(store)
    is_old, is_new = same(found, scene.before), same(found, scene.after)
    assert (is_old or is_new) if saved is None else is_new if saved else is_old
    assert all(damage.path.name in str(damage) for damage in damaged)
    for bystander in scene.bystanders + (scene.pruned if is_old else []):
        assert same(store.at(bystander.step), bystander)
    intact = [
        path
        for _, path in store.all()
        if path.name.startswith("step-") and path.name != scene.damaged
    ]
    assert not [problem for path in intact for problem in verify(path, disk=disk)]
    store.save(contents(9))
    newest, damaged = newest_intact(store)
    assert same(newest, contents(9))
    assert not damaged
    assert not [name for name in disk.names(scene.root) if not name.startswith("step-")]


def every_fault(
    name: str, fault: Callable[[str], None], **how: Any
) -> Iterator[tuple[Scene, Faulty]]:
    """The scene afresh, with a disk on which the n-th operation goes wrong, for every n."""
    medium = Medium()
    medium.make_directory(Path("/runs"))
    medium.flush_directory(Path("/"))
    start = scene(name, medium, ROOT)
    at = 0
    while True:
        at += 1
        fresh = replace(start, disk=medium.copied())
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
            scene.save(disk)
        except Killed:
            assert_law(scene, scene.disk)
        else:
            assert_law(scene, scene.disk, saved=True)


@pytest.mark.fast("the first")
@pytest.mark.parametrize(
    "name", [SCENES[0], pytest.param(SCENES[1], marks=pytest.mark.slow), *SCENES[2:]]
)
def test_after_a_power_cut_the_old_or_the_new_checkpoint_is_found_whatever_was_not_flushed(
    name: str,
) -> None:
    generator = random.Random(name)
    fates: list[Callable[[], float]] = [lambda: 0.0, lambda: 1.0, *[generator.random] * 30]
    for scene, disk in every_fault(name, killed, for_good=True):
        try:
            scene.save(disk)
        except Killed:
            saved = None
        else:
            saved = True  # what `save` has returned from, no power cut takes back
        for fate in fates:
            assert_law(scene, scene.disk.after_power_cut(fate), saved=saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [SCENES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SCENES[1:3])]
)
def test_a_kill_then_another_then_a_power_cut_leave_the_old_or_the_new_checkpoint(
    name: str,
) -> None:
    generator = random.Random(name)
    for scene, disk in every_fault(name, killed, for_good=True):
        with suppress(Killed):
            scene.save(disk)
        at = 0
        once_more = True
        while once_more:
            at += 1
            found = scene.disk.copied_with_pending()
            again = Faulty(found, killed, at=at, for_good=True)
            with suppress(Killed):
                scene.save(again)
            for fate in (lambda: 0.0, generator.random, generator.random):
                assert_law(scene, found.after_power_cut(fate))
            once_more = again.happened


@in_one
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
            scene.save(disk)
        except CheckpointError as error:
            said = str(error)
        assert not scene.disk.open, "a file is left open"
        if (
            not said
        ):  # what is in the way may resist removal at first, as long as it yields in the end
            assert not disk.happened or not for_good
            assert_law(scene, scene.disk, saved=True)
            continue
        assert disk.happened
        assert os.strerror(number) in said
        assert len(said.splitlines()) <= 5
        only_remains = "is saved, but" in said
        # a disk that fails may have failed to say that it had succeeded
        full = number == errno.ENOSPC
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


@pytest.mark.fast("model.safetensors")
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
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


def with_each_byte_flipped(store: Store, medium: Medium, path: Path) -> Iterator[Any]:
    """What is found while one byte of a file is wrong; at the end the file is as it was."""
    file = medium.file(path)
    whole = bytes(file.data)
    for place in range(len(whole)):
        file.data = bytearray(whole)
        file.data[place] ^= 1 << place % 8
        yield newest_intact(store)
    file.data = bytearray(whole)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_any_flipped_byte_of_a_base_is_found_and_named_by_what_refers_to_it(name: str) -> None:
    medium = Medium()
    root = Path("/checkpoints")
    store = Store(root, disk=medium)
    store.save(with_trunk(0, 0))
    store.save(with_trunk(1, 1))
    for step in (2, 3):
        store.save(referring(with_trunk(step, 0), 0, medium, root))
    for found, damaged in with_each_byte_flipped(store, medium, store.path(0) / name):
        assert same(found, with_trunk(1, 1)), "it does not need that base"
        assert [damage.path for damage in damaged] == [store.path(3), store.path(2)]
        assert all(
            "step-00000000" in str(damage) and name.partition(".")[0] in str(damage)
            for damage in damaged
        )
        assert all(
            "step-00000000" in " ".join(verify(store.path(step), disk=medium)) for step in (2, 3)
        )
        assert verify(store.path(1), disk=medium) == []
    assert same(store.at(3), with_trunk(3, 0))
    flip(medium, store.path(0) / "optimizer.safetensors")  # nothing refers to this
    assert same(store.at(3), with_trunk(3, 0))
    medium.remove(store.path(0) / name)
    damaged = newest_intact(store)[1]
    assert [str(damage).partition(" is damaged")[0] for damage in damaged] == [
        f"checkpoint step-0000000{n}" for n in (3, 2)
    ]
    assert "missing" in str(damaged[0])


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_any_flipped_byte_of_a_checkpoint_that_refers_to_another_is_found_and_named(
    name: str,
) -> None:
    medium = Medium()
    root = Path("/checkpoints")
    store = Store(root, disk=medium)
    store.save(with_trunk(0, 0))
    for step in (1, 2):
        store.save(referring(with_trunk(step, 0), 0, medium, root))
    for found, damaged in with_each_byte_flipped(store, medium, store.path(2) / name):
        assert same(found, with_trunk(1, 0))
        assert [damage.path for damage in damaged] == [store.path(2)]
        assert name in str(damaged[0])


def test_a_file_that_cannot_be_read_is_damage_and_the_next_older_checkpoint_is_used(
    tmp_path: Path,
) -> None:
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
    assert "optimizer.safetensors: " in str(damaged[0])
    assert ": Input/output error" in str(damaged[0])


def test_where_everything_is_damaged_that_is_said_and_nothing_is_changed() -> None:
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    for step in (0, 1, 2):
        store.save(contents(step))
        flip(medium, store.path(step) / "state.json")
    damaged = [store.path(step) for step in (2, 1, 0)]
    with refused("no-intact-checkpoint", CheckpointError, damaged=damaged):
        store.newest_intact()
    assert store.steps() == [0, 1, 2]


# ---- real processes, real files ----

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a copy of this process; its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.fast("another of the same step")
@posix
@forks
@pytest.mark.parametrize(
    "name",
    [
        *SCENES[1:3],
        *(pytest.param(name, marks=pytest.mark.slow) for name in (SCENES[0], *SCENES[3:])),
    ],
)
def test_a_process_killed_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(
    name: str, tmp_path: Path
) -> None:
    at, status = 0, -1
    while status != 0:
        at += 1
        root = tmp_path / f"{at}" / "checkpoints"
        start = scene(name, Disk(), root)
        disk = Faulty(Disk(), killed_for_real, at=at, for_good=False)
        status = os.waitpid(forked(partial(start.save, disk)), 0)[1]
        assert status in {0, signal.SIGKILL}
        assert_law(start, Disk(), saved=True if status == 0 else None)
    assert at > 15


@posix
@forks
def test_a_process_killed_at_random_moments_goes_on_from_where_it_was(tmp_path: Path) -> None:
    generator = random.Random(0)
    newest = 0

    def newer_is_saved() -> bool:
        return max(Store(tmp_path).steps(), default=0) > newest

    def save_on() -> None:
        store = Store(tmp_path, keep_last=KEEP)
        found, _ = newest_intact(store)
        step = 0 if found is None else found.step
        while True:
            step += 1
            store.save(contents(step))

    kills = 10
    for _ in range(kills):
        child = forked(save_on)
        assert wait_until(newer_is_saved)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found, damaged = newest_intact(Store(tmp_path))
        assert not damaged
        step = 0 if found is None else found.step
        assert step >= newest
        assert found is None or same(found, contents(step))
        newest = step
    assert newest >= kills
    Store(tmp_path).save(contents(newest + 1))
    assert all(name.startswith("step-") for name in os.listdir(tmp_path))
