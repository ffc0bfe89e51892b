"""Sharpness-aware minimization: https://github.com/davda54/sam, Foret et al. 2021.

The gradient at the worst point within a radius moves the weights of before.
"""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


def spirals(samples=600):
    random, labels = torch.Generator().manual_seed(0), torch.arange(samples) % 2
    angle = torch.rand(samples, generator=random).sqrt() * 9
    signed = angle * (1.0 - 2.0 * labels) / 5
    points = torch.stack([angle.cos() * signed, angle.sin() * signed], dim=1)
    return points + 0.05 * torch.randn(samples, 2, generator=random), labels


def network():
    hidden = nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(32, 2))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build():
    return sf.Run(
        model=network,
        loss=loss,
        train_data=spirals(),
        batch_size=50,
        length="20 epochs",
        optimizer=sf.optim.sgd(lr=0.2, momentum=0.9),
        run_dir="runs/sam",
    )


def train(run, radius=0.05):
    weights = list(run.state.model.parameters())
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            before = [weight.detach().clone() for weight in weights]
            norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
            for weight in weights:
                weight.data += weight.grad * (radius / (norm + 1e-12))
                weight.grad = None
            sf.forward_backward(step)
            for weight, start in zip(weights, before, strict=True):
                weight.data.copy_(start)
            sf.update(step)


if __name__ == "__main__":
    train(build())
