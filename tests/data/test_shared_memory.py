"""Where shared memory is small or missing, the error is about it, not about the data."""

from __future__ import annotations

import errno
import signal
import sys
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader

from forked_script import run_forked
from refused import refused
from surefoot.data.loader import Feed
from surefoot.data.order import Order
from surefoot.errors import DataError

FULL = "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loader workers are forked")


class Pictures:
    def __len__(self):
        return 8

    def __getitem__(self, sample):
        return torch.full((4,), float(sample))


def first_batch(dataset, *, collate=None, workers=1):
    plan = Order(3, samples=len(dataset), batch_size=4)
    feed = Feed(
        dataset,
        plan,
        seed=3,
        micro_batch_size=4,
        device=torch.device("cpu"),
        workers=workers,
        collate=collate,
    )
    try:
        feed.start(0)
        return feed.micro_batches(0)
    finally:
        feed.close()


def full(*_):
    raise RuntimeError(FULL)


def test_a_batch_that_the_workers_memory_cannot_take_does_not_blame_the_batch():
    with refused("shared-memory-full", setting="workers") as caught:
        first_batch(Pictures(), collate=full)
    assert FULL in caught.value.problem
    assert [type(remedy).__name__ for remedy in caught.value.remedies] == ["Command", "Setting"]


def test_an_error_that_hides_it_is_about_shared_memory_too():
    def collate(samples):
        try:
            full()
        except RuntimeError as problem:
            raise ValueError("no batch") from problem

    with refused("shared-memory-full", setting="workers"):
        first_batch(Pictures(), collate=collate)


def test_a_batch_of_ones_own_collate_fn_is_moved_where_an_error_is_seen(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with refused("shared-memory-full", setting="workers"):
        first_batch(Pictures(), collate=torch.stack)
    assert len(first_batch(Pictures(), collate=torch.stack, workers=0)) == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOENT, errno.EACCES])
def test_locks_of_workers_that_cannot_be_made_are_about_shared_memory(number, monkeypatch):
    def locks(self):
        raise OSError(number, "no")

    monkeypatch.setattr(DataLoader, "__iter__", locks)
    with refused("shared-memory-full", setting="workers"):
        first_batch(Pictures())


def test_other_errors_of_starting_workers_stay_what_they_are(monkeypatch):
    def too_many(self):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(DataLoader, "__iter__", too_many)
    with pytest.raises(BlockingIOError):
        first_batch(Pictures())


def test_a_worker_that_a_missing_page_has_killed_is_about_shared_memory():
    class Unlucky(Pictures):
        def __getitem__(self, sample):
            signal.raise_signal(signal.SIGBUS)

    with refused("shared-memory-full", setting="workers"):
        first_batch(Unlucky())


def test_a_batch_that_cannot_be_built_is_still_an_error_of_the_data():
    def uneven(samples):
        raise RuntimeError("stack expects each tensor to be equal size")

    with refused("samples-not-collated", DataError):
        first_batch(Pictures(), collate=uneven)


def test_an_error_that_only_a_worker_met_ends_a_script_without_a_traceback(tmp_path, ranks):
    program = """
        import torch, surefoot as sf
        rows = [torch.ones(1) for _ in range(64)]
        rows[50] = torch.ones(2)
        sf.Run(
            model=lambda: torch.nn.Linear(1, 1), loss=lambda model, batch: model(batch).mean(),
            train_data=rows, batch_size=32, length="2 steps",
            workers=1, optimizer=sf.optim.sgd(lr=0.1), console=False,
        ).train()
    """
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(program))
    ended = run_forked(file, ranks)
    assert ended.status == 3, ended.text
    assert "Traceback" not in ended.text
