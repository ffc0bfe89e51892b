"""Sharpness-aware minimization in a dozen lines: the two functions of the training loop, called in another order.

Foret et al. 2021, equations 2 and 3 (https://arxiv.org/abs/2010.01412): move the weights to the worst point within
`radius`, compute the gradient there, and apply it to the original weights. Run it:  python examples/sam.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf


def spirals(samples: int = 600) -> tuple[Tensor, Tensor]:
    """Return noisy points on two spirals in the plane, and the spiral of each point."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    angle = torch.rand(samples, generator=generator).sqrt() * 9
    sign = 1.0 - 2.0 * labels
    points = torch.stack([angle.cos() * angle * sign, angle.sin() * angle * sign], dim=1) / 5
    return points + 0.05 * torch.randn(samples, 2, generator=generator), labels


def model() -> nn.Module:
    """Return a small classifier of points."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over points."""
    return F.cross_entropy(model(batch[0]), batch[1])


def build(**changes: Any) -> sf.Run:
    """Return the run; `changes` replace its settings."""
    points, labels = spirals()
    settings: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": (points[:500], labels[:500]),
        "batch_size": 50,
        "length": "20 epochs",
        "optimizer": sf.optim.sgd(lr=0.2, momentum=0.9),
        "schedule": sf.schedules.cosine(warmup="5%"),
        "splits": {"val": sf.Split((points[500:], labels[500:]), metrics=sf.metrics.accuracy)},
        "evaluate_every": "5 epochs",
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run, radius: float = 0.05) -> None:
    """Make all remaining steps, each with the gradient at the worst nearby point."""
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            weights = [held for held in run.state.model.parameters() if held.grad is not None]
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            before = [weight.detach().clone() for weight in weights]
            norm = torch.nn.utils.get_total_norm(gradients)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.add_(gradient * (radius / (norm + 1e-12)))
            for weight in weights:
                weight.grad = None
            sf.forward_backward(step)
            with torch.no_grad():
                for weight, start in zip(weights, before, strict=True):
                    weight.copy_(start)  # subtracting the change would round
            sf.update(step)


if __name__ == "__main__":
    train(build())
