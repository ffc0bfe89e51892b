"""Law 9 where several ranks write one checkpoint: it exists completely or not at all, whichever
rank stops where.

Two ranks write into one model of a file system; a kill, a failing disk or a power cut strikes
before each of their operations in turn, in both orders in which they can do their parts. 9 seconds.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from equal_checkpoints import equal_checkpoints, newest_intact
from medium import NEEDS_ROOM, Faulty, Killed, Medium, failing, killed
from refused import refused
from sharded_saves import Messages, of_rank, save_by_turns, whole
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.reader import open_checkpoint, read_manifest, verify
from surefoot.checkpoint.store import NotPrunedError
from surefoot.checkpoint.writer import SaveMessages, Writer, save_leading
from surefoot.errors import CheckpointError, Setting

ROOT = Path("/runs/a/checkpoints")
KEEP = 2
FIRST = "the first"
PAST_LITTER = "the next, past the litter of a kill"
SAME_STEP = "another of the same step"
SCENES = [FIRST, PAST_LITTER, SAME_STEP]


def store(disk: Any, known: tuple[int, ...] = ()) -> Store:
    store = Store(ROOT, keep_last=KEEP, disk=disk)
    store.intact |= set(known)
    return store


@dataclass(frozen=True)
class Scene:
    """A file system, the newest checkpoint on it, and one that is about to be saved."""

    medium: Medium
    before: Checkpoint | None
    after: Checkpoint

    def copy(self) -> Scene:
        return replace(self, medium=self.medium.copied())


def build_scene(name: str) -> Scene:
    medium = Medium()
    medium.make_directory(Path("/runs"))
    medium.flush_directory(Path("/"))
    if name == FIRST:
        return Scene(medium, before=None, after=whole(0))
    for step in (0, 1, 2):
        save_by_turns([store(medium, (1,)), store(medium)], whole(step))
    if name == SAME_STEP:
        return Scene(medium, before=whole(2), after=whole(2, version=1))
    dying = Faulty(medium, killed, at=6, for_good=True)
    with pytest.raises(Killed):
        save_by_turns([store(dying), store(dying)], whole(3, version=9))
    return Scene(medium, before=whole(2), after=whole(3))


def assert_law(scene: Scene, disk: Any, *, saved: bool | None = None) -> None:
    """`saved`: whether the new one must be there; None where either will do."""
    store_found = store(disk)
    newest, damaged = newest_intact(store_found)
    is_old = equal_checkpoints(newest, scene.before)
    is_new = equal_checkpoints(newest, scene.after)
    if saved is None:
        assert is_old or is_new
    else:
        assert is_new is saved
        assert is_old is not saved
    assert damaged == []
    if newest is not None:  # as it is read by rows too
        newest_path, *_ = [path for _, path in store_found.all() if not verify(path, disk=disk)]
        assert equal_checkpoints(open_checkpoint(newest_path, disk=disk), newest)
    if scene.after.step > 0:
        assert equal_checkpoints(store_found.at(0), whole(0))

    # the next save succeeds, and leaves no litter
    assert save_by_turns([store_found, store(disk)], whole(9)) == [None, None]
    newest, _ = newest_intact(store_found)
    assert equal_checkpoints(newest, whole(9))
    for name in disk.names(ROOT):
        assert name.startswith("step-")


def every_fault(
    name: str, fault: Callable[[str], None], **how: Any
) -> Iterator[tuple[Scene, Faulty]]:
    """The scene afresh, with a disk on which the n-th operation goes wrong, for every n."""
    scene = build_scene(name)
    for at in itertools.count(1):
        fresh_scene = scene.copy()
        faulty = Faulty(fresh_scene.medium, fault, at=at, **how)
        yield fresh_scene, faulty
        if faulty.operations < at:
            assert at > 20
            return


@pytest.mark.parametrize("late", [False, True], ids=["the other first", "rank 0 first"])
@pytest.mark.parametrize("name", SCENES)
def test_ranks_killed_before_any_operation_leave_the_old_or_the_new_checkpoint(
    name: str, late: bool
) -> None:
    for scene, disk in every_fault(name, killed, for_good=True):
        try:
            save_by_turns([store(disk), store(disk)], scene.after, late=late)
        except Killed:
            assert_law(scene, scene.medium)
        else:
            assert_law(scene, scene.medium, saved=True)


@pytest.mark.parametrize("name", SCENES)
def test_a_rank_killed_alone_leaves_the_old_checkpoint_where_its_piece_is_not_written(
    name: str,
) -> None:
    scene = build_scene(name)

    def heartbeat() -> None:  # ends rank 0, which waits for the dead one
        raise Killed

    for at in range(1, 12):
        medium = scene.medium.copied()
        disk_of_rank_1 = Faulty(medium, killed, at=at, for_good=True)
        was_killed = False
        try:
            errors = save_by_turns(
                [store(medium), store(disk_of_rank_1)],
                scene.after,
                died=heartbeat,
                survived=(Killed,),
            )
        except Killed:
            was_killed = True
        else:
            assert errors == [None, None]
        assert was_killed is disk_of_rank_1.happened
        assert_law(scene, medium, saved=not was_killed)
    assert not was_killed, "there are more operations"


@pytest.mark.fast("the first-the other first")
@pytest.mark.parametrize(
    "late",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["the other first", "rank 0 first"],
)
@pytest.mark.parametrize("name", SCENES)
def test_after_a_power_cut_the_old_or_the_new_checkpoint_is_found(name: str, late: bool) -> None:
    generator = random.Random(name)
    # of what was not flushed nothing survives, all of it, or some
    fates: list[Callable[[], float]] = [lambda: 0.0, lambda: 1.0, *[generator.random] * 3]
    for scene, disk in every_fault(name, killed, for_good=True):
        saved = None
        with suppress(Killed):
            save_by_turns([store(disk), store(disk)], scene.after, late=late)
            saved = True  # what `save` has returned from, no power cut takes back
        for fate in fates:
            assert_law(scene, scene.medium.after_power_cut(fate), saved=saved)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "failing disk"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["the other first", "rank 0 first"])
def test_a_disk_that_fails_one_rank_only_is_told_to_both_and_leaves_the_old_checkpoint(
    late: bool, rank: int, number: int
) -> None:
    is_full = number == errno.ENOSPC
    only = NEEDS_ROOM if is_full else None
    scene = build_scene(PAST_LITTER)
    for at in itertools.count(1):
        medium = scene.medium.copied()
        faulty = Faulty(medium, failing(number), at=at, for_good=False, only=only)
        stores = [store(medium), store(medium)]
        stores[rank] = store(faulty)
        error, error_of_rank_1 = save_by_turns(stores, scene.after, late=late)

        assert not medium.open, "a file is left open"
        assert str(error) == str(error_of_rank_1), "both ranks must know"
        if error is None:
            # what is in the way may resist at first
            assert not faulty.happened or not is_full or rank == 0
            assert_law(scene, medium, saved=True)
        else:
            assert os.strerror(number) in str(error)
            assert [place.partition(" on ")[0] for place in error.places] == ["rank 1"] * rank
            if isinstance(error, NotPrunedError):
                assert_law(scene, medium, saved=True)
            elif is_full:
                assert_law(scene, medium, saved=False)
            else:  # a disk that fails may have failed to say that it had succeeded
                assert_law(scene, medium)

        if faulty.operations < at:
            assert not faulty.happened
            return


@pytest.mark.parametrize(
    "file", ["model.00001-of-00002", "model.00002-of-00002", "optimizer.00002-of-00002"]
)
def test_a_flipped_byte_or_a_missing_piece_is_named_and_the_next_older_checkpoint_used(
    file: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        save_by_turns([Store(tmp_path), Store(tmp_path)], whole(step))
    path = tmp_path / "step-00000002" / f"{file}.safetensors"
    data = path.read_bytes()

    for place in (0, 9, len(data) // 2, len(data) - 1):
        path.write_bytes(flipped(data, place))
        newest, (damage,) = newest_intact(Store(tmp_path))
        assert equal_checkpoints(newest, whole(1))
        assert damage.path == path.parent
        problem = f"{file}.safetensors: hash differs"
        assert str(damage) == f"checkpoint step-00000002 is damaged ({problem})"
        assert verify(path.parent) == [problem]

    path.unlink()
    newest, (damage,) = newest_intact(Store(tmp_path))
    assert equal_checkpoints(newest, whole(1))
    assert damage.path == path.parent
    assert str(damage) == f"checkpoint step-00000002 is damaged ({file}.safetensors: missing)"


def flipped(data: bytes, place: int) -> bytes:
    """The data with one bit of the byte at `place` flipped."""
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def test_a_checkpoint_that_refers_to_pieces_is_read_with_them_and_damage_of_any_is_named(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    save_by_turns([store, Store(tmp_path)], whole(1))
    weight = whole(1).tensors("model")["weight"]
    base = Base(1, read_manifest(store.path(1)).sha256, {"model": ["weight"]})
    mean = whole(2).tensors("model")["mean"]
    without_weight = {**whole(2).files, "model": {"mean": mean}}
    with_weight = {**whole(2).files, "model": {"mean": mean, "weight": weight}}
    store.save(replace(whole(2), files=without_weight, bases=[base]))

    expected = replace(whole(2), files=with_weight)
    assert equal_checkpoints(store.at(2), expected)
    assert equal_checkpoints(open_checkpoint(store.path(2)), expected)
    for piece in ("00001-of-00002", "00002-of-00002"):
        path = store.path(1) / f"model.{piece}.safetensors"
        damage = f"step-00000001/{path.name}: hash differs"
        data = path.read_bytes()
        for place in range(0, len(data), 5):
            path.write_bytes(flipped(data, place))
            with refused("checkpoint-damaged", CheckpointError, damage=damage):
                store.at(2)
        path.write_bytes(data)
    (store.path(1) / "optimizer.00001-of-00002.safetensors").unlink()  # nothing refers to this
    assert equal_checkpoints(store.at(2), expected)


def test_ranks_that_do_not_see_the_same_directory_are_told_what_is_wrong(tmp_path: Path) -> None:
    here = tmp_path / "here"
    there = tmp_path / "there"
    there.mkdir()

    errors = save_by_turns([Store(here), Store(there)], whole(1))

    for error in errors:
        assert isinstance(error, CheckpointError)
        assert error.code == "checkpoint-not-saved"
        assert error.remedies == (Setting("run_dir"),)
    assert Store(here).newest_intact() is None
    assert Disk().names(here) == []


def test_ranks_at_different_steps_save_nothing(tmp_path: Path) -> None:
    messages = Messages()
    leading = Writer(Store(tmp_path), rank=0, mail=messages)
    following = Writer(Store(tmp_path), rank=1, mail=messages)

    leading.submit(of_rank(whole(3), 0, 2))
    following.submit(of_rank(whole(4), 1, 2))

    for writer in (leading, following):
        writer.wait()
        assert writer.failure is not None
        assert writer.failure.code == "checkpoint-not-saved"
        assert writer.failure.fields == {"step": 3}
        assert writer.failure.places[0].startswith("rank 1 on ")
    assert list(tmp_path.iterdir()) == []


def test_a_save_goes_on_beside_the_next_one_of_another_rank_and_both_learn_the_same(
    tmp_path: Path,
) -> None:
    messages = Messages()
    writers = [Writer(Store(tmp_path), rank=rank, mail=messages) for rank in range(3)]

    for step in (1, 2, 3):
        for rank in (2, 0, 1):
            writers[rank].submit(of_rank(whole(step), rank, 3))

    for writer in writers:
        writer.wait()
        assert writer.failure is None
        assert writer.saved == 3
    newest, _ = newest_intact(Store(tmp_path))
    assert equal_checkpoints(newest, whole(3))
    unread = [key for key in messages.held if "piece" in key]
    assert unread == []


def test_nothing_is_cleared_away_while_another_rank_still_writes(tmp_path: Path) -> None:
    operations: list[str] = []

    class Noting:
        """The disk of one rank: full of rank 0, slow of the other."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Any:
            return getattr(Disk(), name)

        def append(self, handle: int, data: memoryview) -> None:
            if self.rank == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(0.1)
            operations.append("written")
            Disk().append(handle, data)

        def remove(self, path: Path) -> None:
            operations.append("removed")
            Disk().remove(path)

    messages = Messages()
    stores = [Store(tmp_path, disk=Noting(rank)) for rank in (0, 1)]
    writers = [Writer(store, rank=rank, mail=messages) for rank, store in enumerate(stores)]

    for rank, writer in enumerate(writers):
        writer.submit(of_rank(whole(1), rank, 2))

    for writer in writers:
        writer.wait()
        assert "No space left on device" in str(writer.failure)
    assert operations[:2] == ["written", "written"]
    assert set(operations[2:]) == {"removed"}
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    board = SaveMessages(Messages(), save=1, patience_s=0.05)
    with refused("ranks-out-of-contact", CheckpointError):
        save_leading(Store(tmp_path), of_rank(whole(1), 0, 2), board, protected=())
    assert list(tmp_path.iterdir()) == []


def test_where_the_process_wants_to_end_a_rank_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr("surefoot.checkpoint.writer._LAST_PATIENCE_S", 0.05)
    monkeypatch.setattr("threading.main_thread", Ended)
    board = SaveMessages(Messages(), save=1)
    with refused("ranks-out-of-contact", CheckpointError):
        save_leading(Store(tmp_path), of_rank(whole(1), 0, 2), board, protected=())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_by_itself_does_not_wait_for_those_that_this_ends(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.checkpoint.writer._LAST_PATIENCE_S", 0.05)
    writer = Writer(Store(tmp_path), rank=rank, mail=Messages())
    writer.submit(of_rank(whole(1), rank, 2))
    writer.hurry()
    writer.wait()
    assert writer.failure is not None
    assert writer.failure.code == "ranks-out-of-contact"
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_is_lost_is_said_and_nothing_is_saved(tmp_path: Path) -> None:
    class Lost(Messages):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nException raised from ...")

    board = SaveMessages(Lost(), save=1)
    with refused("ranks-out-of-contact", CheckpointError):
        save_leading(Store(tmp_path), of_rank(whole(1), 0, 2), board, protected=())
    assert list(tmp_path.iterdir()) == []
