"""Law 9 where several ranks write one checkpoint: it exists completely or not at all, whichever
rank stops where.

Two ranks write into one model of a file system; a kill, a failing disk or a power cut strikes
before each of their operations in turn, in both orders in which they can do their parts. 9 seconds.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
SAME_STEP = "another of the same step"
PAST_LITTER = "the next, past the litter of a kill"
SCENES = ["the first", PAST_LITTER, SAME_STEP]


def store(disk: Any, known: tuple[int, ...] = ()) -> Store:
    made = Store(ROOT, keep_last=KEEP, disk=disk)
    made.intact |= set(known)
    return made


def scene(name: str) -> tuple[Medium, Checkpoint | None, Checkpoint]:
    """A file system, the newest checkpoint on it, and one that is about to be saved."""
    medium = Medium()
    medium.make_directory(Path("/runs"))
    medium.flush_directory(Path("/"))
    if name == "the first":
        return medium, None, whole(0)
    for step in (0, 1, 2):
        save_by_turns([store(medium, (1,)), store(medium)], whole(step))
    if name == SAME_STEP:
        return medium, whole(2), whole(2, version=1)
    dying = Faulty(medium, killed, at=6, for_good=True)
    with pytest.raises(Killed):
        save_by_turns([store(dying), store(dying)], whole(3, version=9))
    return medium, whole(2), whole(3)


def same(found: Checkpoint | None, expected: Checkpoint | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        (found.step, found.state, found.log) == (expected.step, expected.state, expected.log)
        and found.files.keys() == expected.files.keys()
        and all(
            found.files[file].keys() == held.keys()
            and all(
                torch.equal(found.tensors(file)[name], tensor)
                for name, tensor in expected.tensors(file).items()
            )
            for file, held in expected.files.items()
        )
    )


def assert_law(
    disk: Any, before: Checkpoint | None, after: Checkpoint, *, saved: bool | None = None
) -> None:
    """`saved`: whether the new one must be there; None where either will do."""
    there = store(disk)
    found, damaged = there.newest_intact() or (None, [])
    is_old, is_new = same(found, before), same(found, after)
    assert (is_old or is_new) if saved is None else is_new if saved else is_old
    assert not damaged
    if found is not None:
        paths = [path for _, path in there.all() if not verify(path, disk=disk)]
        assert same(open_checkpoint(paths[0], disk=disk), found)  # as it is read by rows too
    if after.step > 0:
        assert same(there.at(0), whole(0))
    assert save_by_turns([there, store(disk)], whole(9)) == [None, None]
    assert same((there.newest_intact() or (None,))[0], whole(9))
    assert not [name for name in disk.names(ROOT) if not name.startswith("step-")]


def every_fault(
    name: str, fault: Callable[[str], None], **how: Any
) -> Iterator[tuple[Medium, Faulty, Checkpoint | None, Checkpoint]]:
    """The scene afresh, with a disk on which the n-th operation goes wrong, for every n."""
    medium, before, after = scene(name)
    at = 0
    while True:
        at += 1
        fresh = medium.copied()
        faulty = Faulty(fresh, fault, at=at, **how)
        yield fresh, faulty, before, after
        if faulty.operations < at:
            assert at > 20
            return


@pytest.mark.parametrize("late", [False, True], ids=["the other first", "rank 0 first"])
@pytest.mark.parametrize("name", SCENES)
def test_ranks_killed_before_any_operation_leave_the_old_or_the_new_checkpoint(
    name: str, late: bool
) -> None:
    for medium, disk, before, after in every_fault(name, killed, for_good=True):
        try:
            save_by_turns([store(disk), store(disk)], after, late=late)
        except Killed:
            assert_law(medium, before, after)
        else:
            assert_law(medium, before, after, saved=True)


@pytest.mark.parametrize("name", SCENES)
def test_a_rank_killed_alone_leaves_the_old_checkpoint_where_its_piece_is_not_written(
    name: str,
) -> None:
    medium, before, after = scene(name)
    for at in range(1, 12):
        fresh = medium.copied()
        its_disk = Faulty(fresh, killed, at=at, for_good=True)
        ended = False

        def heartbeat() -> None:  # ends rank 0, which waits for the dead one
            raise Killed

        try:
            said = save_by_turns(
                [store(fresh), store(its_disk)], after, died=heartbeat, survived=(Killed,)
            )
        except Killed:
            ended = True
        assert ended is its_disk.happened
        if not ended:
            assert said == [None, None]
        assert_law(fresh, before, after, saved=not ended)
    assert not ended


@pytest.mark.fast("the first-the other first")
@pytest.mark.parametrize(
    "late",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["the other first", "rank 0 first"],
)
@pytest.mark.parametrize("name", SCENES)
def test_after_a_power_cut_the_old_or_the_new_checkpoint_is_found(name: str, late: bool) -> None:
    generator = random.Random(name)
    fates: list[Callable[[], float]] = [lambda: 0.0, lambda: 1.0, *[generator.random] * 3]
    for medium, disk, before, after in every_fault(name, killed, for_good=True):
        try:
            save_by_turns([store(disk), store(disk)], after, late=late)
        except Killed:
            saved = None
        else:
            saved = True
        for fate in fates:
            assert_law(medium.after_power_cut(fate), before, after, saved=saved)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "failing disk"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["the other first", "rank 0 first"])
def test_a_disk_that_fails_one_rank_only_is_told_to_both_and_leaves_the_old_checkpoint(
    late: bool, rank: int, number: int
) -> None:
    only = NEEDS_ROOM if number == errno.ENOSPC else None
    medium, before, after = scene(PAST_LITTER)
    at = 0
    while True:
        at += 1
        fresh = medium.copied()
        faulty = Faulty(fresh, failing(number), at=at, for_good=False, only=only)
        said = save_by_turns(
            [store(faulty if rank == place else fresh) for place in (0, 1)], after, late=late
        )
        assert not fresh.open, "a file is left open"
        problems = [problem for problem in said if problem is not None]
        lost = False
        if problems:
            assert all(said), "both ranks must know"
            assert len({str(problem) for problem in problems}) == 1
            assert os.strerror(number) in str(problems[0])
            assert [place.partition(" on ")[0] for place in problems[0].places] == ["rank 1"] * rank
            lost = not isinstance(problems[0], NotPrunedError)
        else:
            assert (
                not faulty.happened or number == errno.EIO or rank == 0
            )  # what is in the way may resist at first
        assert_law(fresh, before, after, saved=None if lost and number == errno.EIO else not lost)
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
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        found, damaged = Store(tmp_path).newest_intact() or (None, [])
        assert same(found, whole(1))
        assert [str(damage) for damage in damaged] == [
            f"checkpoint step-00000002 is damaged ({file}.safetensors: hash differs)"
        ]
        assert verify(path.parent) == [f"{file}.safetensors: hash differs"]
    path.unlink()
    found, damaged = Store(tmp_path).newest_intact() or (None, [])
    assert same(found, whole(1))
    assert [str(damage) for damage in damaged] == [
        f"checkpoint step-00000002 is damaged ({file}.safetensors: missing)"
    ]


def test_a_checkpoint_that_refers_to_pieces_is_read_with_them_and_damage_of_any_is_named(
    tmp_path: Path,
) -> None:
    first = Store(tmp_path)
    then = whole(2)
    save_by_turns([first, Store(tmp_path)], whole(1))
    weight = whole(1).tensors("model")["weight"]
    base = Base(1, read_manifest(first.path(1)).sha256, {"model": ["weight"]})
    files = {**then.files, "model": {"mean": then.tensors("model")["mean"]}}
    first.save(replace(then, files=files, bases=[base]))
    expected = replace(then, files={**files, "model": {**files["model"], "weight": weight}})
    assert same(first.at(2), expected)
    assert same(open_checkpoint(first.path(2)), expected)
    for piece in ("00001-of-00002", "00002-of-00002"):
        path = first.path(1) / f"model.{piece}.safetensors"
        data = path.read_bytes()
        for place in range(0, len(data), 5):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            damage = f"step-00000001/model.{piece}.safetensors: hash differs"
            with refused("checkpoint-damaged", CheckpointError, damage=damage):
                first.at(2)
        path.write_bytes(data)
    (first.path(1) / "optimizer.00001-of-00002.safetensors").unlink()  # nothing refers to this
    assert same(first.at(2), expected)


def test_ranks_that_do_not_see_the_same_directory_are_told_what_is_wrong(tmp_path: Path) -> None:
    here = tmp_path / "here"
    there = tmp_path / "there"
    there.mkdir()
    said = save_by_turns([Store(here), Store(there)], whole(1))
    for error in said:
        assert isinstance(error, CheckpointError)
        assert error.code == "checkpoint-not-saved"
        assert error.remedies == (Setting("run_dir"),)
    assert Store(here).newest_intact() is None
    assert Disk().names(here) == []


def test_ranks_at_different_steps_save_nothing(tmp_path: Path) -> None:
    messages = Messages()
    leading, following = (Writer(Store(tmp_path), rank=rank, mail=messages) for rank in (0, 1))
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
        assert (writer.saved, writer.failure) == (3, None)
    assert same((Store(tmp_path).newest_intact() or (None,))[0], whole(3))
    assert not [key for key in messages.held if "piece" in key]  # nobody will look for them


def test_nothing_is_cleared_away_while_another_rank_still_writes(tmp_path: Path) -> None:
    done: list[str] = []

    class Noting:
        """The disk of one rank, which is slow or full."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Any:
            return getattr(Disk(), name)

        def append(self, handle: int, data: memoryview) -> None:
            if self.rank == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(0.1)
            done.append("written")
            Disk().append(handle, data)

        def remove(self, path: Path) -> None:
            done.append("removed")
            Disk().remove(path)

    messages = Messages()
    writers = [
        Writer(Store(tmp_path, disk=Noting(rank)), rank=rank, mail=messages) for rank in (0, 1)
    ]
    for rank, writer in enumerate(writers):
        writer.submit(of_rank(whole(1), rank, 2))
    for writer in writers:
        writer.wait()
        assert "No space left on device" in str(writer.failure)
    assert done[:2] == ["written", "written"]
    assert set(done[2:]) == {"removed"}
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
    with refused("ranks-out-of-contact", CheckpointError):
        save_leading(
            Store(tmp_path), of_rank(whole(1), 0, 2), SaveMessages(Messages(), save=1), protected=()
        )


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

    with refused("ranks-out-of-contact", CheckpointError):
        save_leading(
            Store(tmp_path), of_rank(whole(1), 0, 2), SaveMessages(Lost(), save=1), protected=()
        )
    assert list(tmp_path.iterdir()) == []
