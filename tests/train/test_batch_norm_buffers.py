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
