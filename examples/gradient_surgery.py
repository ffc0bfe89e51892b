"""Gradients of your own between `forward_backward` and `update`: two tasks whose conflicting gradients are projected.

PCGrad (Yu et al. 2020, algorithm 1: https://arxiv.org/abs/2001.06782) removes from each task's gradient the part that points
against the other task's gradient. After `forward_backward`, `parameter.grad` is the gradient of the global batch, on every rank.
`update` clips what it finds there, and skips it if it is not finite. Run it:  python examples/gradient_surgery.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

Batch = tuple[Tensor, Tensor, Tensor]


def rings(samples: int = 600) -> Batch:
    """Return points in the plane, the half-plane of each point, and its distance from the center."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(0))
    return points, (points[:, 0] > points[:, 1]).long(), points.norm(dim=1)


def model() -> nn.Module:
    """Return a network with two outputs for the classes and one for the distance."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the classes."""
    return F.cross_entropy(model(batch[0])[:, :2], batch[1])


def distance_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of the distances."""
    return F.mse_loss(model(batch[0])[:, 2], batch[2])


def without_conflict(gradients: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return gradients without their component against the other gradients; no value is read on the host."""
    dot = torch.stack([(own * other).sum() for own, other in zip(gradients, others, strict=True)]).sum()
    square = torch.stack([other.square().sum() for other in others]).sum()
    share = torch.clamp(dot / square, max=0.0)
    return [own - share * other for own, other in zip(gradients, others, strict=True)]


def build(**changes: Any) -> sf.Run:
    """Return the run; `changes` replace its settings."""
    settings: dict[str, Any] = {
        "model": model,
        "train_data": rings(),
        "batch_size": 50,
        "length": "20 epochs",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "clip": "norm 1.0",
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run) -> None:
    """Make all remaining steps, each with the projected gradients of both tasks."""
    weights = list(run.state.model.parameters())
    with run:
        for step in run.steps():
            by_task: list[list[Tensor]] = []
            for loss in (class_loss, distance_loss):
                value = sf.forward_backward(step, loss)
                by_task.append([weight.grad for weight in weights if weight.grad is not None])
                for weight in weights:
                    weight.grad = None  # the next call would add to it
            first, second = without_conflict(*by_task), without_conflict(*by_task[::-1])
            for weight, own, other in zip(weights, first, second, strict=True):
                weight.grad = own + other
            sf.update(step)
            step.log(distance_loss=value)


if __name__ == "__main__":
    train(build())
