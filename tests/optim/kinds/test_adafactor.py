"""Adafactor against torch's own, which waits; and how much it remembers. (1 s)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.optim.kinds.adafactor import Adafactor


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 5), (7,), (4, 3, 2, 2), (1, 9), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 1.0, "weight_decay": 0.1},
        {"beta2_decay": -0.5, "clip_threshold": 1.5, "min_scale": 0.5},
    ],
    ids=["default", "rate falls", "all"],
)
def test_it_is_torchs(settings):
    ours, theirs = parameters(), parameters()
    theirs_called = {"clip_threshold": "d", "min_scale": "eps"}
    named = {
        theirs_called.get(key, key): (None, value) if key == "min_scale" else value
        for key, value in settings.items()
    }
    pair = Adafactor(ours, **settings), torch.optim.Adafactor(theirs, **named)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator) * (100 if step == 4 else 1)
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            pair[0].state[one], dict(pair[1].state[other]), rtol=1e-5, atol=1e-7
        )


def test_a_matrix_costs_its_rows_and_columns():
    weight = nn.Parameter(torch.ones(300, 200))
    optimizer = Adafactor([weight])
    weight.grad = torch.ones(300, 200)
    optimizer.step()

    assert sum(held.numel() for held in optimizer.state[weight].values()) == 300 + 200 + 1


def test_a_kernel_that_lies_otherwise_in_memory_gets_the_same_update():
    plain = nn.Parameter(torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)))
    other = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for weight in (plain, other):
        weight.grad = torch.arange(48.0).view(4, 3, 2, 2).clone(memory_format=torch.preserve_format)
        Adafactor([weight]).step()

    torch.testing.assert_close(other.detach(), plain.detach(), rtol=0, atol=1e-7)
