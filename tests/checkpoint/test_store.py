"""Which checkpoints exist and which stay, and the writer beside the training. 7 seconds."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.writer import Writer
from surefoot.errors import CheckpointError, Setting
from waiting import HANG_S


def contents(step: int, value: float = 0.0) -> Checkpoint:
    return Checkpoint(
        step,
        {"model": {"w": torch.full((4,), value)}, "optimizer": {"m": torch.ones(4)}},
        {"value": value},
    )


def damage(store: Store, step: int, file: str = "model.safetensors") -> None:
    path = store.path(step) / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def store_with(directory: Path, *steps: int, **settings: Any) -> Store:
    store = Store(directory, **settings)
    for step in steps:
        store.save(contents(step))
    return store


# ---- finding ----


def test_a_directory_that_does_not_exist_holds_no_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")

    assert store.steps() == []
    assert store.newest_step() is None
    assert store.newest_intact() is None


def test_a_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    store = store_with(tmp_path, 0, 10, 20)
    assert store.at(10).step == 10
    with refused("step-without-checkpoint", CheckpointError, step=15, available=[0, 10, 20]):
        store.at(15)


def test_names_that_only_look_like_a_checkpoint_are_passed_over(tmp_path: Path) -> None:
    store = store_with(tmp_path, 3)
    for name in (
        "step-4",
        "step-000000005",
        "step-00000006.bak",
        "600",
        "checkpoint-7",
        ".partial-step-00000008",
    ):
        shutil.copytree(store.path(3), tmp_path / name)
    assert store.steps() == [3]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 3)
    store.path(3).rename(store.path(8))
    with refused("no-intact-checkpoint", CheckpointError, damaged=[store.path(8)]):
        store.newest_intact()
    assert store.newest_step() is None


def test_a_damaged_newest_is_named_and_the_next_older_one_used(tmp_path: Path) -> None:
    store = store_with(tmp_path, 500, 600)
    damage(store, 600, "optimizer.safetensors")

    newest, (damaged,) = store.newest_intact() or pytest.fail("no checkpoint")

    assert newest.step == 500
    assert (
        str(damaged) == "checkpoint step-00000600 is damaged (optimizer.safetensors: hash differs)"
    )


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_entry_that_is_no_directory_is_named_and_the_next_older_one_used(
    tmp_path: Path, kind: str
) -> None:
    store = store_with(tmp_path, 1)
    if kind == "file":
        store.path(99).touch()
    else:
        store.path(99).symlink_to(tmp_path / "nothing")

    newest, (damaged,) = store.newest_intact() or pytest.fail("no checkpoint")

    assert newest.step == 1
    assert damaged.path.name == "step-00000099"


def test_a_chosen_file_can_be_read_where_another_is_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    damage(store, 1, "optimizer.safetensors")
    assert list(store.at(1, only=["model"]).files) == ["model"]
    assert store.newest_intact(only=["model"]) is not None


def test_the_newest_step_is_told_without_reading_a_tensor(tmp_path: Path) -> None:
    class Noting(Disk):
        def __init__(self) -> None:
            self.read_files: list[str] = []

        def read(self, path: Path, *, start: int, length: int) -> bytes:
            self.read_files.append(path.name)
            return super().read(path, start=start, length=length)

    store = store_with(tmp_path, 1, 2)
    os.truncate(store.path(2) / "model.safetensors", 5)
    disk = Noting()

    newest_step = Store(tmp_path, disk=disk).newest_step()

    assert newest_step == 1
    assert set(disk.read_files) == {"manifest.json"}


# ---- letting go ----


def test_the_newest_and_step_zero_stay(tmp_path: Path) -> None:
    assert store_with(tmp_path, 0, 10, 20, 30, 40, keep_last=2).steps() == [0, 30, 40]


def test_every_so_often_one_stays(tmp_path: Path) -> None:
    def keep_every_20(step: int) -> bool:
        return step % 20 == 0

    store = store_with(tmp_path, 0, 10, 20, 30, 40, 50, keep_last=1, keep_every=keep_every_20)

    assert store.steps() == [0, 20, 40, 50]


def test_the_best_stays_as_long_as_it_is_the_best(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        store.save(contents(step), protected=[1])
    assert store.steps() == [1, 3]
    store.save(contents(4), protected=[3])
    assert store.steps() == [3, 4]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, keep_last=3)
    damage(store, 2)
    damage(store, 3)
    store = Store(tmp_path, keep_last=2)
    newest, _ = store.newest_intact() or pytest.fail("no checkpoint")
    assert newest.step == 1

    store.save(contents(4))
    assert 1 in store.steps()

    store.save(contents(5))
    assert store.steps() == [4, 5]


def test_a_checkpoint_of_which_some_files_were_read_does_not_count_as_intact(
    tmp_path: Path,
) -> None:
    """One damaged in a file that was not read would cost the last sound one its place."""
    store_with(tmp_path, 1, 2)
    damage(Store(tmp_path), 2, "optimizer.safetensors")
    store = Store(tmp_path, keep_last=2)
    assert store.at(2, only=["model"]).step == 2
    assert store.newest_intact(only=["model"]) is not None
    store.save(contents(3))
    assert store.steps() == [1, 2, 3]
    assert store.at(1).step == 1


def test_checkpoints_nobody_has_read_go_only_once_enough_newer_ones_are_known_to_be_intact(
    tmp_path: Path,
) -> None:
    store_with(tmp_path, 1, 2, 3)
    store = Store(tmp_path, keep_last=2)
    store.save(contents(4))
    assert store.steps() == [1, 2, 3, 4]
    store.save(contents(5))
    assert store.steps() == [4, 5]


def test_the_one_just_saved_stays_even_where_newer_ones_of_another_session_exist(
    tmp_path: Path,
) -> None:
    store_with(tmp_path, 600, 700, 800)
    store = Store(tmp_path, keep_last=1)
    store.newest_intact()
    store.save(contents(100))
    assert 100 in store.steps()


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with refused("keep-last-too-small", value=0):
        Store(tmp_path, keep_last=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    store.save(contents(2, value=5.0))
    assert store.at(2).state == {"value": 5.0}
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


# ---- failing ----


class Full(Disk):
    """Has no room, once told so."""

    full = False

    def free_bytes(self, path: Path) -> int:
        return 3 if self.full else super().free_bytes(path)


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    disk = Full()
    store = Store(tmp_path, disk=disk)
    store.save(contents(1))
    disk.full = True
    with refused("checkpoint-not-saved", CheckpointError, step=2) as caught:
        store.save(contents(2))
    assert Setting("keep_last") in caught.value.remedies[0]
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_contents_that_cannot_be_written_leave_no_litter(tmp_path: Path) -> None:
    weight = torch.ones(2)
    store = store_with(tmp_path, 1)
    with refused("not-writable-into-checkpoint", CheckpointError, name="model.safetensors"):
        store.save(Checkpoint(2, {"model": {"a": weight, "b": weight}}))
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_what_resists_removal_is_named_but_the_save_counts(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, keep_last=1)
    (tmp_path / ".deleted-step-00000001" / "somebody's directory").mkdir(parents=True)
    with refused("old-checkpoints-not-removed", CheckpointError, step=3):
        store.save(contents(3))
    assert store.at(3).step == 3


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("checkpoint-not-saved", CheckpointError, step=1) as caught:
        Store(tmp_path / "file" / "checkpoints").save(contents(1))
    assert str(tmp_path / "file") in str(caught.value.reason)


# ---- the writer ----


class Gate(Disk):
    """Lets a save begin only when opened, and fail when told so."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.fails = False

    def create(self, path: Path) -> int:
        assert self.opened.wait(HANG_S)
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().create(path)


def test_submitting_returns_before_the_save_has_ended(tmp_path: Path) -> None:
    gate = Gate()
    writer = Writer(Store(tmp_path, disk=gate))
    writer.submit(contents(1))
    assert writer.store.steps() == []
    gate.opened.set()
    writer.wait()
    assert writer.store.steps() == [1]
    assert writer.saved == 1
    assert writer.failure is None


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    gate = Gate()
    writer = Writer(Store(tmp_path, disk=gate))
    writer.submit(contents(1))
    threading.Timer(0.1, gate.opened.set).start()
    writer.submit(contents(2))
    assert 1 in writer.store.steps()
    writer.wait()
    assert writer.store.steps() == [1, 2]


def test_the_writer_survives_a_failing_save_and_says_so_until_one_succeeds(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    writer = Writer(Store(tmp_path, disk=gate))
    gate.fails = True
    writer.submit(contents(1))
    writer.wait()
    assert writer.failure is not None
    assert writer.failure.code == "checkpoint-not-saved"
    assert writer.failure.fields["step"] == 1

    gate.fails = False
    writer.submit(contents(2))
    writer.wait()
    assert writer.failure is None
    assert writer.saved == 2


def test_an_error_that_nobody_foresaw_reaches_the_caller_too(tmp_path: Path) -> None:
    class Broken(Disk):
        def create(self, path: Path) -> int:
            raise ZeroDivisionError("a bug")

    writer = Writer(Store(tmp_path, disk=Broken()))
    writer.submit(contents(1))
    writer.wait()
    assert writer.failure is not None
    assert writer.failure.code == "checkpoint-not-saved"
    assert "ZeroDivisionError: a bug" in str(writer.failure)


def test_a_failure_that_is_kept_does_not_keep_the_tensors(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    gate.fails = True
    writer = Writer(Store(tmp_path, disk=gate))
    tensor = torch.ones(10)
    gone = weakref.ref(tensor)
    writer.submit(Checkpoint(1, {"model": {"w": tensor}}))
    writer.wait()
    failure = writer.failure
    del tensor
    gc.collect()

    assert failure is not None
    assert gone() is None


def test_no_thread_exists_before_the_first_save_nor_after_the_last(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = Writer(Store(tmp_path))
    assert threading.active_count() == before
    writer.submit(contents(1))
    writer.wait()
    writer.wait()
    assert threading.active_count() == before


def test_where_no_thread_can_start_the_save_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    writer = Writer(Store(tmp_path))
    writer.submit(contents(1))
    assert writer.store.steps() == [1]
    writer.wait()


_EXIT = """
import sys, time, torch
from pathlib import Path
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.writer import Writer
class Slow:
    def __getattr__(self, name):
        time.sleep(0.02)
        return getattr(Disk(), name)
writer = Writer(Store(Path(sys.argv[1]), disk=Slow()))
for step in (1, 2):
    writer.submit(Checkpoint(step, {"model": {"w": torch.ones(3)}}))
if sys.argv[2] == "idle":
    writer.wait()
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", [pytest.param("idle", marks=pytest.mark.slow), "saving"])
def test_the_interpreter_ends_by_itself_and_finishes_the_save_in_flight(
    state: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _EXIT, str(tmp_path), state], timeout=HANG_S, check=False
    )
    assert ended.returncode == 3
    assert Store(tmp_path).at(2).step == 2
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
