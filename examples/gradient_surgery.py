"""Gradient surgery: https://github.com/tianheyu927/PCGrad, Yu et al. 2020.

Each task's gradient loses the part that points against the other's (algorithm 1). Your
code stands between `forward_backward` and `update`, which clips the gradient it gets.
"""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0])[:, :2], batch[1])


def distance_loss(model, batch):
    return F.mse_loss(model(batch[0])[:, 2], batch[2])


def without_conflict(own, other):
    dot = sum((a * b).sum() for a, b in zip(own, other, strict=True))
    share = torch.clamp(dot / sum(b.square().sum() for b in other), max=0.0)
    return [a - share * b for a, b in zip(own, other, strict=True)]


def build():
    points = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    return sf.Run(
        model=lambda: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3)),
        train_data=(points, (points[:, 0] > points[:, 1]).long(), points.norm(dim=1)),
        batch_size=50,
        length="20 epochs",
        optimizer=sf.optim.adam(lr=1e-2),
        clip="norm 1.0",
        run_dir="runs/gradient-surgery",
    )


def train(run):
    weights = list(run.state.model.parameters())
    with run:
        for step in run.steps():
            tasks = []
            for loss in (class_loss, distance_loss):
                step.log(**{loss.__name__: sf.forward_backward(step, loss)})
                tasks.append([weight.grad for weight in weights])
                for weight in weights:
                    weight.grad = None  # the next call would add to it
            projected = without_conflict(*tasks), without_conflict(*tasks[::-1])
            for weight, first, second in zip(weights, *projected, strict=True):
                weight.grad = first + second
            sf.update(step)


if __name__ == "__main__":
    train(build())
