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
    ("settings", "settings_of_torch"),
    [
        pytest.param({}, {}, id="default"),
        pytest.param(
            {"lr": 1.0, "weight_decay": 0.1}, {"lr": 1.0, "weight_decay": 0.1}, id="rate falls"
        ),
        pytest.param(
            {"beta2_decay": -0.5, "clip_threshold": 1.5, "min_scale": 0.5},
            {"beta2_decay": -0.5, "d": 1.5, "eps": (None, 0.5)},
            id="all",
        ),
    ],
)
def test_it_is_torchs(settings, settings_of_torch):
    trained = parameters()
    optimizer = Adafactor(trained, **settings)
    expected = parameters()
    torchs = torch.optim.Adafactor(expected, **settings_of_torch)

    for step in range(12):
        size = 100 if step == 4 else 1
        give_gradients(trained, step, size)
        optimizer.step()
        give_gradients(expected, step, size)
        torchs.step()

    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
    for parameter, other in zip(trained, expected, strict=True):
        state = optimizer.state[parameter]
        torch.testing.assert_close(state, dict(torchs.state[other]), rtol=1e-5, atol=1e-7)


def give_gradients(parameters, step, size):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def test_a_matrix_costs_its_rows_and_columns():
    weight = nn.Parameter(torch.ones(300, 200))
    optimizer = Adafactor([weight])
    weight.grad = torch.ones(300, 200)
    optimizer.step()

    state = optimizer.state[weight]
    assert sum(tensor.numel() for tensor in state.values()) == 300 + 200 + 1


def test_a_kernel_that_lies_otherwise_in_memory_gets_the_same_update():
    plain = nn.Parameter(torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)))
    other = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for weight in (plain, other):
        weight.grad = torch.arange(48.0).view(4, 3, 2, 2).clone()
        Adafactor([weight]).step()

    torch.testing.assert_close(other.detach(), plain.detach(), rtol=0, atol=1e-7)
