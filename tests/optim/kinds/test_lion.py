"""Lion against ten lines of NumPy, and that its update is a sign. (1 s)"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.optim.kinds.lion import Lion


def gradients(steps: int = 9) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, 3, 4))


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.0)])
def test_lion_is_the_published_algorithm(betas, decay):
    weight = np.ones((3, 4))
    momentum = np.zeros((3, 4))
    lr = 0.02
    parameter = nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = Lion([parameter], lr=lr, betas=betas, weight_decay=decay)
    for gradient in gradients():
        direction = np.sign(betas[0] * momentum + (1 - betas[0]) * gradient)
        weight = weight - lr * (direction + decay * weight)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()

    np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)
    buffer = optimizer.state[parameter]["momentum_buffer"]
    np.testing.assert_allclose(buffer.numpy(), momentum, rtol=1e-12)


def test_every_number_moves_by_the_rate_or_not_at_all():
    parameter = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = Lion([parameter], lr=0.25)
    for step in range(5):
        before = parameter.detach().clone()
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(50, dtype=torch.float64, generator=generator)
        gradient[0] = 0.0
        parameter.grad = gradient * 10**step
        optimizer.step()

        assert (parameter.detach() - before).abs().unique().tolist() == [0.0, 0.25]


def test_a_closure_is_called_with_gradients_on():
    parameter = nn.Parameter(torch.ones(2))

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert Lion([parameter], lr=0.5).step(closure) == 2.0
    assert parameter.tolist() == [0.5, 0.5]
