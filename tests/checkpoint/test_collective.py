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
from surefoot.checkpoint.init_weights import load_initial_weights
from surefoot.checkpoint.manifest import bounds
from surefoot.checkpoint.writer import Writer
from surefoot.distributed.world import World, joined
from surefoot.errors import CheckpointError

pytestmark = forks


def saved(directory: Path, *steps: int, count: int) -> None:
    """Checkpoints by so many ranks, in the background of each."""

    def save(rank: int) -> None:
        world = joined("cpu")
        writer = Writer(Store(directory), rank=rank, mail=world.mailbox("checkpoint"))
        for step in steps:
            writer.submit(of_rank(whole(step), rank, count))
        writer.wait()
        world.gathered(
            None
        )  # as at the end of a run: rank 0 keeps the mailbox until all have read theirs
        assert (writer.saved, writer.failure) == (steps[-1], None)

    assert on_ranks(count, save) == [0] * count


def seen_by(count: int, directory: Path, look: Callable[[World, Store], Any]) -> list[Any]:
    """What each of so many ranks sees there, as JSON."""

    def tell(rank: int) -> None:
        world = joined("cpu")
        try:
            told = look(world, Store(directory))
        except CheckpointError as problem:
            told = f"error: {problem}"
        directory.with_name(f"seen-{rank}").write_text(json.dumps(told))

    assert on_ranks(count, tell) == [0] * count
    return [json.loads(directory.with_name(f"seen-{rank}").read_text()) for rank in range(count)]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def newest(world: World, store: Store) -> Any:
    found = store.newest_intact(world=world if world.size > 1 else None)
    if found is None:
        return None
    held: Any = found[0].files["model"]["weight"]
    start, stop = bounds(5, world.rank, world.size)
    rows = held.rows(start, stop).tolist() if world.size > 1 else held.tolist()
    return [found[0].step, [str(damage) for damage in found[1]], rows]


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2), (2, 1)])
def test_what_ranks_have_saved_any_number_of_ranks_finds(
    writers: int, readers: int, tmp_path: Path
) -> None:
    saved(tmp_path / "c", 1, 2, count=writers)
    seen = seen_by(readers, tmp_path / "c", newest)
    assert [told[:2] for told in seen] == [[2, []]] * readers
    assert torch.equal(
        torch.tensor([row for told in seen for row in told[2]]), whole(2).tensors("model")["weight"]
    )


def test_damage_that_one_rank_finds_all_name_and_take_the_next_older_checkpoint(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "c", 1, 2, 3, count=2)
    flip(tmp_path / "c" / "step-00000003" / "optimizer.00002-of-00002.safetensors")
    (tmp_path / "c" / "step-00000002" / "model.00001-of-00002.safetensors").unlink()
    seen = seen_by(2, tmp_path / "c", newest)
    assert [told[:2] for told in seen] == [
        [
            1,
            [
                "checkpoint step-00000003 is damaged (optimizer.00002-of-00002.safetensors: hash differs)",
                "checkpoint step-00000002 is damaged (model.00001-of-00002.safetensors: missing)",
            ],
        ]
    ] * 2


def test_every_file_is_checked_by_some_rank(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, count=2)
    files = sorted(file.name for file in (tmp_path / "c" / "step-00000002").iterdir())
    assert len(files) == 7

    def each(world: World, store: Store) -> list[str]:
        told = []
        for file in files:
            if world.is_main:
                flip(store.path(2) / file)
            world.gathered(None)
            found = store.newest_intact(world=world if world.size > 1 else None)
            told.append(
                "" if found is None or found[0].step != 1 else found[1][0].problem.split(":")[0]
            )
            world.gathered(None)
            if world.is_main:
                flip(store.path(2) / file)
        return told

    assert seen_by(3, tmp_path / "c", each) == [files] * 3


def test_one_that_is_asked_for_is_found_or_the_same_error_told_to_all(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, count=2)
    flip(tmp_path / "c" / "step-00000002" / "state.json")

    def at(step: int) -> Callable[[World, Store], Any]:
        return lambda world, store: store.at(step, world=world).step

    assert seen_by(2, tmp_path / "c", at(1)) == [1, 1]
    (absent,) = {*seen_by(2, tmp_path / "c", at(3))}
    assert absent.endswith("[step-without-checkpoint]")
    (damaged,) = {*seen_by(2, tmp_path / "c", at(2))}
    assert damaged.endswith("[checkpoint-damaged]")


def test_all_ranks_start_from_the_same_weights_though_one_alone_finds_the_damage(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run" / "checkpoints"
    run.parent.mkdir()
    saved(run, 1, 2, count=2)
    flip(run / "step-00000002" / "model.00002-of-00002.safetensors")

    def started(place: Path) -> Callable[[World, Store], Any]:
        def start(world: World, _: Store) -> Any:
            model = nn.Linear(2, 5, bias=False)
            model.register_buffer("mean", torch.zeros(3))
            said = load_initial_weights({"model": model}, place, world=world)
            return [said.splitlines()[0], model.weight.tolist()]

        return start

    weight = whole(1).tensors("model")["weight"].tolist()
    told = seen_by(3, run, started(tmp_path / "run"))
    assert told == [[f"init    {tmp_path}/run, step 1", weight]] * 3
    assert (
        seen_by(2, run, started(run / "step-00000001"))
        == [[f"init    {run}/step-00000001", weight]] * 2
    )
    (damaged,) = {*seen_by(2, run, started(run / "step-00000002"))}
    assert damaged.endswith("[checkpoint-damaged]")


def test_none_or_none_intact_is_told_to_all(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert seen_by(2, tmp_path / "c", newest) == [None, None]
    saved(tmp_path / "c", 1, count=2)
    flip(tmp_path / "c" / "step-00000001" / "manifest.json")
    (told,) = {*seen_by(2, tmp_path / "c", newest)}
    assert told.endswith("[no-intact-checkpoint]")


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint_and_the_next_group_goes_on(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "c", 1, count=2)

    class Killing:
        def __getattr__(self, name: str) -> Any:
            from surefoot.checkpoint.filesystem import Disk

            return getattr(Disk(), name)

        def append(self, handle: int, data: memoryview) -> None:
            os.write(handle, data[:5])
            os.kill(os.getpid(), signal.SIGKILL)

    def save(rank: int) -> None:
        world = joined("cpu")
        store = Store(tmp_path / "c", disk=Killing()) if rank == 1 else Store(tmp_path / "c")
        writer = Writer(store, rank=rank, mail=world.mailbox("checkpoint"))
        writer.submit(of_rank(whole(2), rank, 2))
        if rank == 0:
            os.kill(
                os.getpid(), signal.SIGSTOP
            )  # as one that waits for the dead one, until the test ends it
        writer.wait()

    statuses = on_ranks(2, save, patience_s=4.0)
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL]
    assert [told[:2] for told in seen_by(2, tmp_path / "c", newest)] == [[1, []]] * 2
    saved(tmp_path / "c", 2, count=2)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
