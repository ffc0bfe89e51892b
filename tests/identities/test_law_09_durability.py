"""Law 9: a checkpoint exists completely or not at all, and any damage is found and named.

A save is cut off, or made to fail, at each of its operations on files in turn; in a power cut all
that was not flushed is lost, kept or torn, in many combinations, by a small model of a file system.
Then always: the newest intact checkpoint is the old or the new one; those that the save had no
business with are intact; the next save succeeds, and leaves no litter. Checkpoints whose frozen
tensors are in older ones are intact as long as they are there. 19 seconds.
"""

from __future__ import annotations

import errno
import itertools
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

from equal_checkpoints import equal_checkpoints, newest_intact
from in_one import in_one
from medium import NEEDS_ROOM, Faulty, Killed, Medium, failing, killed, killed_for_real
from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.reader import read_manifest, verify
from surefoot.checkpoint.store import NotPrunedError
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


@dataclass(kw_only=True)
class Scene:
    """Checkpoints, and a save about to happen: `before` and `after` are the newest intact ones."""

    disk: Any
    root: Path
    before: Checkpoint | None
    after: Checkpoint
    bystanders: list[Checkpoint]  # intact before and after
    pruned: list[Checkpoint] = field(default_factory=list)  # intact until the save has ended
    known: set[int] = field(default_factory=set)  # steps that the store has found intact
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
    checkpoint = contents(step)
    trunk = torch.randn(4, 2, generator=torch.Generator().manual_seed(version))
    model = {**checkpoint.files["model"], "trunk": trunk}
    return replace(checkpoint, files={**checkpoint.files, "model": model})


def referring(checkpoint: Checkpoint, base: int, disk: Any, root: Path) -> Checkpoint:
    """The same checkpoint as it is saved where another one has its trunk."""
    model = dict(checkpoint.tensors("model"))
    del model["trunk"]
    digest = read_manifest(Store(root).path(base), disk=disk).sha256
    return replace(
        checkpoint,
        files={**checkpoint.files, "model": model},
        bases=[Base(base, digest, {"model": ["trunk"]})],
    )


def flip_last_bit(disk: Any, path: Path) -> None:
    if isinstance(disk, Medium):
        file = disk.file(path)
        file.data[-1] ^= 1
        file.flushed = bytes(file.data)
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def save_steps_0_to_3(disk: Any, root: Path) -> Store:
    store = Store(root, keep_last=KEEP, disk=disk)
    for step in (0, 1, 2, 3):
        store.save(contents(step))
    return store


def first_save(disk: Any, root: Path) -> Scene:
    return Scene(disk=disk, root=root, before=None, after=contents(0), bystanders=[])


def save_past_litter(disk: Any, root: Path) -> Scene:
    save_steps_0_to_3(disk, root)
    dying = Faulty(disk, killed, at=7, for_good=True)
    with pytest.raises(Killed):
        Store(root, keep_last=KEEP, disk=dying).save(contents(4, version=9))
    return Scene(
        disk=disk,
        root=root,
        before=contents(3),
        after=contents(4),
        bystanders=[contents(0), contents(3)],
        pruned=[contents(2)],
        known={2, 3},
    )


def save_of_same_step(disk: Any, root: Path) -> Scene:
    save_steps_0_to_3(disk, root)
    return Scene(
        disk=disk,
        root=root,
        before=contents(3),
        after=contents(3, version=1),
        bystanders=[contents(0), contents(2)],
        known={2, 3},
    )


def save_over_damage(disk: Any, root: Path) -> Scene:
    damaged = save_steps_0_to_3(disk, root).path(3)
    flip_last_bit(disk, damaged / "model.safetensors")
    return Scene(
        disk=disk,
        root=root,
        before=contents(2),
        after=contents(3, version=1),
        bystanders=[contents(0), contents(2)],
        known={2},
        damaged=damaged.name,
    )


def save_that_refers(disk: Any, root: Path) -> Scene:
    """The trunk has changed at steps 2 and 5; 4 needs 2, and both are pruned now."""
    store = Store(root, keep_last=KEEP, disk=disk)
    for step, base in enumerate((0, 0, 2, 2, 2, 5)):
        checkpoint = with_trunk(step, base)
        if base != step:
            checkpoint = referring(checkpoint, base, disk, root)
        store.save(checkpoint)
    assert store.steps() == [0, 2, 4, 5]
    after = with_trunk(6, 5)
    return Scene(
        disk=disk,
        root=root,
        before=with_trunk(5, 5),
        after=after,
        saved=referring(after, 5, disk, root),
        bystanders=[with_trunk(0, 0), with_trunk(5, 5)],
        pruned=[with_trunk(4, 2), with_trunk(2, 2)],
        known={4, 5},
    )


FIRST = "the first"
PAST_LITTER = "the next, which prunes one, past the litter of a kill"
SAME_STEP = "another of the same step"
OVER_DAMAGE = "one in the place of a damaged one"
REFERRING = "one that refers to an older one, and prunes one that another had referred to"
SCENES: dict[str, Callable[[Any, Path], Scene]] = {
    FIRST: first_save,
    PAST_LITTER: save_past_litter,
    SAME_STEP: save_of_same_step,
    OVER_DAMAGE: save_over_damage,
    REFERRING: save_that_refers,
}


def assert_law(scene: Scene, disk: Any, *, saved: bool | None = None) -> None:
    """`saved`: whether the new one must be there; None where either will do."""
    store = Store(scene.root, keep_last=KEEP, disk=disk)
    newest, damaged = newest_intact(store)
    is_old = equal_checkpoints(newest, scene.before)
    is_new = equal_checkpoints(newest, scene.after)
    if saved is None:
        assert is_old or is_new
    else:
        assert is_new is saved
        assert is_old is not saved
    for damage in damaged:
        assert damage.path.name in str(damage)

    # those that the save had no business with are intact
    bystanders = scene.bystanders
    if is_old:
        bystanders = bystanders + scene.pruned
    for bystander in bystanders:
        assert equal_checkpoints(store.at(bystander.step), bystander)
    for _, path in store.all():
        if path.name.startswith("step-") and path.name != scene.damaged:
            assert verify(path, disk=disk) == []

    # the next save succeeds, and leaves no litter
    store.save(contents(9))
    newest, damaged = newest_intact(store)
    assert equal_checkpoints(newest, contents(9))
    assert damaged == []
    for name in disk.names(scene.root):
        assert name.startswith("step-")


def every_fault(
    name: str, fault: Callable[[str], None], **how: Any
) -> Iterator[tuple[Scene, Faulty]]:
    """The scene afresh, with a disk on which the n-th operation goes wrong, for every n."""
    medium = Medium()
    medium.make_directory(Path("/runs"))
    medium.flush_directory(Path("/"))
    scene = SCENES[name](medium, ROOT)
    for at in itertools.count(1):
        fresh_scene = replace(scene, disk=medium.copied())
        faulty = Faulty(fresh_scene.disk, fault, at=at, **how)
        yield fresh_scene, faulty
        if faulty.operations < at:
            assert at > 15
            return


def nothing_survives() -> float:
    """Of what was not flushed before a power cut."""
    return 0.0


def everything_survives() -> float:
    return 1.0


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
    "name",
    [
        FIRST,
        pytest.param(PAST_LITTER, marks=pytest.mark.slow),
        SAME_STEP,
        OVER_DAMAGE,
        REFERRING,
    ],
)
def test_after_a_power_cut_the_old_or_the_new_checkpoint_is_found_whatever_was_not_flushed(
    name: str,
) -> None:
    generator = random.Random(name)
    fates = [nothing_survives, everything_survives, *[generator.random] * 30]
    for scene, disk in every_fault(name, killed, for_good=True):
        saved = None
        with suppress(Killed):
            scene.save(disk)
            saved = True  # what `save` has returned from, no power cut takes back
        for fate in fates:
            assert_law(scene, scene.disk.after_power_cut(fate), saved=saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        FIRST,
        pytest.param(PAST_LITTER, marks=pytest.mark.slow),
        pytest.param(SAME_STEP, marks=pytest.mark.slow),
    ],
)
def test_a_kill_then_another_then_a_power_cut_leave_the_old_or_the_new_checkpoint(
    name: str,
) -> None:
    generator = random.Random(name)
    fates = [nothing_survives, generator.random, generator.random]
    for scene, disk in every_fault(name, killed, for_good=True):
        with suppress(Killed):
            scene.save(disk)
        for at in itertools.count(1):
            medium = scene.disk.copied_with_pending()
            disk_again = Faulty(medium, killed, at=at, for_good=True)
            with suppress(Killed):
                scene.save(disk_again)
            for fate in fates:
                assert_law(scene, medium.after_power_cut(fate))
            if not disk_again.happened:
                break


@in_one
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "failing disk"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", SCENES)
def test_a_save_failing_at_any_operation_says_so_and_leaves_the_old_checkpoint(
    name: str, for_good: bool, number: int
) -> None:
    is_full = number == errno.ENOSPC
    only = NEEDS_ROOM if is_full else None
    for scene, disk in every_fault(name, failing(number), for_good=for_good, only=only):
        error = error_of_save(scene, disk)
        assert not scene.disk.open, "a file is left open"
        if error is None:
            # what is in the way may resist removal at first, as long as it yields in the end
            assert not disk.happened or not for_good
            assert_law(scene, scene.disk, saved=True)
            continue

        assert disk.happened
        assert os.strerror(number) in str(error)
        assert len(str(error).splitlines()) <= 5
        if isinstance(error, NotPrunedError):
            assert_law(scene, scene.disk, saved=True)
        elif is_full:
            assert_law(scene, scene.disk, saved=False)
        else:  # a disk that fails may have failed to say that it had succeeded
            assert_law(scene, scene.disk)


def error_of_save(scene: Scene, disk: Any) -> CheckpointError | None:
    try:
        scene.save(disk)
    except CheckpointError as error:
        return error
    return None


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
        newest, (damage,) = newest_intact(store)
        assert newest is not None
        assert newest.step == 1
        assert damage.path == store.path(2)
        assert name in str(damage)
        assert any(name in problem for problem in verify(store.path(2), disk=medium))

    file.data = bytearray(whole)
    assert equal_checkpoints(store.at(2), contents(2))


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_a_missing_file_is_found_and_named(name: str) -> None:
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    for step in (0, 1, 2):
        store.save(contents(step))
    medium.remove(store.path(2) / name)

    newest, (damage,) = newest_intact(store)

    assert equal_checkpoints(newest, contents(1))
    assert damage.path == store.path(2)
    assert str(damage) == f"checkpoint step-00000002 is damaged ({name}: missing)"


def with_each_byte_flipped(store: Store, medium: Medium, path: Path) -> Iterator[Any]:
    """The newest intact checkpoint while one byte of a file is wrong; at the end the file is as it
    was.
    """
    file = medium.file(path)
    whole = bytes(file.data)
    for place in range(len(whole)):
        file.data = bytearray(whole)
        file.data[place] ^= 1 << place % 8
        yield newest_intact(store)
    file.data = bytearray(whole)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_any_flipped_byte_of_a_base_is_found_and_named_by_what_refers_to_it(name: str) -> None:
    store, medium = store_with_base()
    for newest, damaged in with_each_byte_flipped(store, medium, store.path(0) / name):
        assert equal_checkpoints(newest, with_trunk(1, 1)), "it does not need that base"
        assert [damage.path for damage in damaged] == [store.path(3), store.path(2)]
        for damage in damaged:
            assert "step-00000000" in str(damage)
            assert Path(name).stem in str(damage)
            assert "step-00000000" in " ".join(verify(damage.path, disk=medium))
        assert verify(store.path(1), disk=medium) == []

    assert equal_checkpoints(store.at(3), with_trunk(3, 0))


def store_with_base() -> tuple[Store, Medium]:
    """Steps 2 and 3 refer to step 0, and step 1 to none."""
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    store.save(with_trunk(0, 0))
    store.save(with_trunk(1, 1))
    for step in (2, 3):
        store.save(referring(with_trunk(step, 0), 0, medium, store.directory))
    return store, medium


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_missing_file_of_a_base_is_found_and_named_by_what_refers_to_it(name: str) -> None:
    store, medium = store_with_base()
    medium.remove(store.path(0) / name)

    newest, damaged = newest_intact(store)

    assert equal_checkpoints(newest, with_trunk(1, 1))
    assert [damage.path for damage in damaged] == [store.path(3), store.path(2)]
    for damage in damaged:
        assert "missing" in str(damage)


def test_damage_of_a_base_where_nothing_refers_to_it_does_no_harm() -> None:
    store, medium = store_with_base()
    flip_last_bit(medium, store.path(0) / "optimizer.safetensors")
    assert equal_checkpoints(store.at(3), with_trunk(3, 0))


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

    for newest, damaged in with_each_byte_flipped(store, medium, store.path(2) / name):
        assert equal_checkpoints(newest, with_trunk(1, 0))
        (damage,) = damaged
        assert damage.path == store.path(2)
        assert name in str(damage)


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

    newest, (damage,) = newest_intact(store)

    assert equal_checkpoints(newest, contents(1))
    assert "optimizer.safetensors: " in str(damage)
    assert ": Input/output error" in str(damage)


def test_where_everything_is_damaged_that_is_said_and_nothing_is_changed() -> None:
    medium = Medium()
    store = Store(Path("/checkpoints"), disk=medium)
    for step in (0, 1, 2):
        store.save(contents(step))
        flip_last_bit(medium, store.path(step) / "state.json")
    damaged = [store.path(step) for step in (2, 1, 0)]

    with refused("no-intact-checkpoint", CheckpointError, damaged=damaged):
        store.newest_intact()

    assert store.steps() == [0, 1, 2]


# ---- real processes, real files ----

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def fork_to(work: Callable[[], object]) -> int:
    """Do `work` in a copy of this process; returns its number."""
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
        PAST_LITTER,
        SAME_STEP,
        pytest.param(FIRST, marks=pytest.mark.slow),
        pytest.param(OVER_DAMAGE, marks=pytest.mark.slow),
        pytest.param(REFERRING, marks=pytest.mark.slow),
    ],
)
def test_a_process_killed_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(
    name: str, tmp_path: Path
) -> None:
    for at in itertools.count(1):
        scene = SCENES[name](Disk(), tmp_path / f"{at}" / "checkpoints")
        disk = Faulty(Disk(), killed_for_real, at=at, for_good=False)
        _, status = os.waitpid(fork_to(partial(scene.save, disk)), 0)
        if status == 0:
            assert_law(scene, Disk(), saved=True)
            break
        assert status == signal.SIGKILL
        assert_law(scene, Disk())
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
        checkpoint, _ = newest_intact(store)
        next_step = 1 if checkpoint is None else checkpoint.step + 1
        for step in itertools.count(next_step):
            store.save(contents(step))

    kills = 10
    for _ in range(kills):
        child = fork_to(save_on)
        assert wait_until(newer_is_saved)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

        checkpoint, damaged = newest_intact(Store(tmp_path))
        assert damaged == []
        assert checkpoint is not None
        assert checkpoint.step > newest
        assert equal_checkpoints(checkpoint, contents(checkpoint.step))
        newest = checkpoint.step
    assert newest >= kills

    Store(tmp_path).save(contents(newest + 1))
    for name in os.listdir(tmp_path):
        assert name.startswith("step-")
