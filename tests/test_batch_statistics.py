"""Buffers where they and the decision on a step lie on different devices; what they come to is in tests/identities. (1 s)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.batch_statistics import BatchStatistics


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
