"""Buffers of other kinds and on other devices than batch statistics; what those come to is in tests/identities. (1 s)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.train.batch_norm_buffers import BatchStatistics


@dataclass
class Ranks:
    """A world of so many ranks, on a device that holds no numbers: torch's meta device refuses what CUDA does."""

    size: int

    def add_up(self, tensor: Tensor) -> None:
        assert tensor.is_meta


@pytest.mark.parametrize("size", [1, 2])
def test_buffers_may_lie_elsewhere_than_weights_that_are_kept_on_the_cpu(size: int) -> None:
    norm = nn.BatchNorm1d(2, device="meta")
    world: Any = Ranks(size)
    statistics = BatchStatistics([norm], world=world)
    for _ in range(2):
        statistics.start_pass()
        norm(torch.zeros(3, 2, device="meta"))
        statistics.end_pass()
    statistics.finish(torch.zeros(()))
    assert all(buffer.is_meta for buffer in statistics.tensors())


class Noting(nn.Module):
    """Adds to a floating buffer in each pass, counts passes, and raises a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.tensor([-0.0, 1.0, 2.0]))
        self.register_buffer("passes", torch.tensor(7))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, amounts: Tensor) -> None:
        self.added, self.passes, self.flag = self.added + amounts, self.passes + 1, torch.tensor(True)


class OneProcess:
    size = 1

    def add_up(self, tensor: Tensor) -> None:
        pytest.fail("one process adds nothing up")


class TwoProcesses:
    """The other one has made no pass, so it adds nothing."""

    size = 2

    def add_up(self, tensor: Tensor) -> None:
        assert tensor[-1] == 4  # the passes


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("world", [None, OneProcess(), TwoProcesses()])
def test_floating_buffers_move_by_the_mean_of_the_passes_and_others_once(world: Any, skipped: bool) -> None:
    """Also where the passes add up to exactly 1, and a buffer that no pass touched keeps its bits."""
    model = Noting()
    statistics = BatchStatistics([model], world=world)
    for _ in range(4):
        statistics.start_pass()
        model(torch.tensor([-0.0, 0.25, 0.5]))
        statistics.end_pass()
    statistics.finish(torch.tensor(float(skipped)))

    moved = torch.tensor([-0.0, 1.0, 2.0] if skipped else [-0.0, 1.25, 2.5])
    assert torch.equal(model.added, moved)
    assert torch.equal(model.added.signbit(), moved.signbit())
    assert (int(model.passes), bool(model.flag)) == ((7, False) if skipped else (8, True))


class Masked(nn.Module):
    """A constant mask of one megabyte, a counter, and a running mean that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((512, 512), float("-inf")).triu(1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("running", torch.zeros(3))

    def forward(self, amounts: Tensor) -> None:
        self.count += 1
        self.running = 0.5 * self.running + amounts


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_writes_no_buffer_that_its_passes_left_alone(passes: int) -> None:
    model = Masked()
    statistics, mask = BatchStatistics([model]), model.mask.clone()
    for _ in range(2):
        version = model.mask._version
        for _ in range(passes):
            statistics.start_pass()
            model(torch.ones(3))
            statistics.end_pass()
        assert model.mask._version == version
        statistics.finish(torch.zeros(()))
    assert torch.equal(model.mask, mask)
    assert int(model.count) == 2
    assert model.running.tolist() == [1.5] * 3


@pytest.mark.parametrize("write", [lambda mask: mask.data.fill_(2.0), lambda mask: mask.numpy().fill(2.0)])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_bad_step_undoes_what_autograd_does_not_see(passes: int, write: Any) -> None:
    """`.data` and NumPy change a buffer without changing its version."""
    model = Masked()
    statistics, mask = BatchStatistics([model]), model.mask.clone()
    for index in range(passes):
        statistics.start_pass()
        assert torch.equal(model.mask, mask), f"pass {index} starts from the buffers of the step"
        write(model.mask)
        statistics.end_pass()
    statistics.finish(torch.ones(()))
    assert torch.equal(model.mask, mask)


def test_a_buffer_may_have_another_shape_in_the_next_step() -> None:
    model = Masked()
    statistics = BatchStatistics([model])
    for size in (3, 5):
        model.running = torch.zeros(size)
        for _ in range(2):
            statistics.start_pass()
            model(torch.arange(float(size)))
            statistics.end_pass()
        statistics.finish(torch.zeros(()))
        assert model.running.tolist() == list(range(size))


def test_passes_that_are_repeated_within_a_step_change_nothing() -> None:
    model = Masked()
    statistics = BatchStatistics([model])
    statistics.start_pass()
    model(torch.ones(3))
    statistics.end_pass()
    with statistics.repeated():
        statistics.start_pass()
        assert model.running.tolist() == [0.0] * 3
        model(torch.full((3,), 9.0))
        statistics.end_pass()
    assert model.running.tolist() == [1.0] * 3
    statistics.start_pass()
    model(torch.full((3,), 3.0))
    statistics.end_pass()
    statistics.finish(torch.zeros(()))
    assert model.running.tolist() == [2.0] * 3


def test_a_pass_that_fails_is_undone_where_the_pass_before_it_changed_nothing() -> None:
    model = Masked()
    statistics, mask = BatchStatistics([model]), model.mask.clone()
    for _ in range(2):
        statistics.start_pass()
        model(torch.ones(3))
        statistics.end_pass()
    statistics.start_pass()
    model.mask.fill_(2.0)  # and then an exception
    statistics.undo()
    assert torch.equal(model.mask, mask)
