"""Checkpoints that several processes write and find together, over real mailboxes. 8 seconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rank_processes import forks, on_ranks
from sharded_saves import of_rank, whole
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.init_weights import load_initial_weights
from surefoot.checkpoint.manifest import bounds
from surefoot.checkpoint.writer import Writer
from surefoot.distributed.world import World, joined
from surefoot.errors import CheckpointError

pytestmark = forks


def save_by_ranks(directory: Path, *steps: int, count: int) -> None:
    """Save checkpoints by so many ranks, in the background of each."""

    def save(rank: int) -> None:
        world = joined("cpu")
        writer = Writer(Store(directory), rank=rank, mail=world.mailbox("checkpoint"))
        for step in steps:
            writer.submit(of_rank(whole(step), rank, count))
        writer.wait()
        # as at the end of a run: rank 0 keeps the mailbox until all have read theirs
        world.gathered(None)
        assert writer.saved == steps[-1]
        assert writer.failure is None

    assert on_ranks(count, save) == [0] * count


def look_by_ranks(count: int, directory: Path, look: Callable[[World, Store], Any]) -> list[Any]:
    """What each of so many ranks returns or raises there, as JSON."""
    files = [directory.with_name(f"seen-{rank}") for rank in range(count)]

    def look_on_rank(rank: int) -> None:
        world = joined("cpu")
        try:
            result = look(world, Store(directory))
        except CheckpointError as problem:
            result = f"error: {problem}"
        files[rank].write_text(json.dumps(result))

    assert on_ranks(count, look_on_rank) == [0] * count
    return [json.loads(file.read_text()) for file in files]


def error_of_ranks(count: int, directory: Path, look: Callable[[World, Store], Any]) -> str:
    """The error that all of the ranks raise."""
    first, *others = look_by_ranks(count, directory, look)
    assert others == [first] * len(others)
    return str(first)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def newest(world: World, store: Store) -> Any:
    """The newest intact checkpoint: its step, the damage of later ones, and the weights of this
    rank's rows.
    """
    intact = store.newest_intact(world=world if world.size > 1 else None)
    if intact is None:
        return None
    checkpoint, damaged = intact
    weight: Any = checkpoint.files["model"]["weight"]
    if world.size > 1:
        start, stop = bounds(5, world.rank, world.size)
        weight = weight.rows(start, stop)
    return {
        "step": checkpoint.step,
        "damage": [str(damage) for damage in damaged],
        "rows": weight.tolist(),
    }


def steps_and_damage(seen: list[Any]) -> list[tuple[int, list[str]]]:
    return [(by_rank["step"], by_rank["damage"]) for by_rank in seen]


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2), (2, 1)])
def test_what_ranks_have_saved_any_number_of_ranks_finds(
    writers: int, readers: int, tmp_path: Path
) -> None:
    save_by_ranks(tmp_path / "c", 1, 2, count=writers)

    seen = look_by_ranks(readers, tmp_path / "c", newest)

    rows = []
    for seen_by_rank in seen:
        rows += seen_by_rank["rows"]
    assert steps_and_damage(seen) == [(2, [])] * readers
    assert rows == whole(2).tensors("model")["weight"].tolist()


def test_damage_that_one_rank_finds_all_name_and_take_the_next_older_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "c"
    save_by_ranks(checkpoints, 1, 2, 3, count=2)
    flip(checkpoints / "step-00000003" / "optimizer.00002-of-00002.safetensors")
    (checkpoints / "step-00000002" / "model.00001-of-00002.safetensors").unlink()

    seen = look_by_ranks(2, checkpoints, newest)

    damage = [
        "checkpoint step-00000003 is damaged (optimizer.00002-of-00002.safetensors: hash differs)",
        "checkpoint step-00000002 is damaged (model.00001-of-00002.safetensors: missing)",
    ]
    assert steps_and_damage(seen) == [(1, damage)] * 2


def test_every_file_is_checked_by_some_rank(tmp_path: Path) -> None:
    save_by_ranks(tmp_path / "c", 1, 2, count=2)
    files = sorted(file.name for file in (tmp_path / "c" / "step-00000002").iterdir())
    assert len(files) == 7

    def flip_each(world: World, store: Store) -> list[str]:
        """Flip a bit of one file after the other; the files that are named as damaged."""
        named = []
        for file in files:
            if world.is_main:
                flip(store.path(2) / file)
            world.gathered(None)
            intact = store.newest_intact(world=world)
            if intact is not None and intact[0].step == 1:
                (damage,) = intact[1]
                named.append(damage.problem.split(":")[0])
            world.gathered(None)
            if world.is_main:
                flip(store.path(2) / file)
        return named

    assert look_by_ranks(3, tmp_path / "c", flip_each) == [files] * 3


def test_one_that_is_asked_for_is_found_or_the_same_error_told_to_all(tmp_path: Path) -> None:
    checkpoints = tmp_path / "c"
    save_by_ranks(checkpoints, 1, 2, count=2)
    flip(checkpoints / "step-00000002" / "state.json")

    def at(step: int) -> Callable[[World, Store], Any]:
        return lambda world, store: store.at(step, world=world).step

    assert look_by_ranks(2, checkpoints, at(1)) == [1, 1]
    assert error_of_ranks(2, checkpoints, at(3)).endswith("[step-without-checkpoint]")
    assert error_of_ranks(2, checkpoints, at(2)).endswith("[checkpoint-damaged]")


def test_all_ranks_start_from_the_same_weights_though_one_alone_finds_the_damage(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run" / "checkpoints"
    run.parent.mkdir()
    save_by_ranks(run, 1, 2, count=2)
    flip(run / "step-00000002" / "model.00002-of-00002.safetensors")

    def start_from(source: Path) -> Callable[[World, Store], Any]:
        def start(world: World, _: Store) -> Any:
            model = nn.Linear(2, 5, bias=False)
            model.register_buffer("mean", torch.zeros(3))
            report = load_initial_weights({"model": model}, source, world=world)
            return [report.splitlines()[0], model.weight.tolist()]

        return start

    weight = whole(1).tensors("model")["weight"].tolist()
    from_run = look_by_ranks(3, run, start_from(run.parent))
    from_checkpoint = look_by_ranks(2, run, start_from(run / "step-00000001"))
    error = error_of_ranks(2, run, start_from(run / "step-00000002"))

    assert from_run == [[f"init    {tmp_path}/run, step 1", weight]] * 3
    assert from_checkpoint == [[f"init    {run}/step-00000001", weight]] * 2
    assert error.endswith("[checkpoint-damaged]")


def test_that_there_is_none_is_told_to_all(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()

    assert look_by_ranks(2, tmp_path / "c", newest) == [None, None]


def test_that_none_is_intact_is_told_to_all(tmp_path: Path) -> None:
    save_by_ranks(tmp_path / "c", 1, count=2)
    flip(tmp_path / "c" / "step-00000001" / "manifest.json")

    assert error_of_ranks(2, tmp_path / "c", newest).endswith("[no-intact-checkpoint]")


class Killing:
    """A disk that kills this process in the middle of a write."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Disk(), name)

    def append(self, handle: int, data: memoryview) -> None:
        os.write(handle, data[:5])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint_and_the_next_group_goes_on(
    tmp_path: Path,
) -> None:
    save_by_ranks(tmp_path / "c", 1, count=2)

    def save(rank: int) -> None:
        world = joined("cpu")
        disk: Any = Killing() if rank == 1 else Disk()
        store = Store(tmp_path / "c", disk=disk)
        writer = Writer(store, rank=rank, mail=world.mailbox("checkpoint"))
        writer.submit(of_rank(whole(2), rank, 2))
        if rank == 0:
            # as one that waits for the dead one, until the test ends it
            os.kill(os.getpid(), signal.SIGSTOP)
        writer.wait()

    statuses = on_ranks(2, save, patience_s=4.0)
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL]
    assert steps_and_damage(look_by_ranks(2, tmp_path / "c", newest)) == [(1, [])] * 2

    save_by_ranks(tmp_path / "c", 2, count=2)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["step-00000001", "step-00000002"]
