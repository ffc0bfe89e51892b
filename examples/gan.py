"""A generative adversarial network: two models, two optimizers, one run that is resumed like any other.

The data are points on a ring of eight Gaussians; Goodfellow et al. 2014 (https://arxiv.org/abs/1406.2661) with the
non-saturating loss of section 3. Run it:  python examples/gan.py runs/gan
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

MODES, NOISE = 8, 4
Models = Mapping[str, nn.Module]


def ring(samples: int = 2048) -> tuple[Tensor]:
    """Return points around eight centers on a circle of radius 2."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.randint(MODES, (samples,), generator=generator) * (2 * math.pi / MODES)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return (centers + 0.1 * torch.randn(samples, 2, generator=generator),)


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """Return a network with two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def made_up(models: Models, points: Tensor) -> Tensor:
    """Generate as many points as `points` has; the noise is a function of (seed, step, micro-batch)."""
    return torch.as_tensor(models["generator"](torch.randn(len(points), NOISE, device=points.device)))


def discriminator_loss(models: Models, batch: tuple[Tensor]) -> Tensor:
    """Return a loss that is low if the discriminator separates real points from generated points."""
    (points,) = batch
    real = models["discriminator"](points)
    unreal = models["discriminator"](made_up(models, points).detach())
    return F.softplus(-real).mean() + F.softplus(unreal).mean()


def generator_loss(models: Models, batch: tuple[Tensor]) -> Tensor:
    """Return a loss that is low if the discriminator takes generated points for real points."""
    return F.softplus(-models["discriminator"](made_up(models, batch[0]))).mean()


def points(models: Models, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    """Return generated points and real points, the outputs and targets of metrics."""
    return made_up(models, batch[0]), batch[0]


def distance_to_the_ring(generated: Tensor, real: Tensor) -> sf.Mean:
    """Return the mean distance of generated points from the nearest of the eight centers."""
    angle = torch.arange(MODES, device=real.device) * (2 * math.pi / MODES)
    nearest = torch.cdist(generated, 2 * torch.stack([angle.cos(), angle.sin()], dim=1)).amin(dim=1)
    return sf.Mean(nearest.sum(), len(nearest))


def build(run_dir: str | Path | None = None, **changes: Any) -> sf.Run:
    """Return the run; `changes` replace its settings."""
    settings: dict[str, Any] = {
        "model": {"generator": lambda: perceptron(NOISE, 2), "discriminator": lambda: perceptron(2, 1)},
        "train_data": ring(),
        "batch_size": 128,
        "length": "1500 steps",
        "optimizer": {
            "generator": sf.optim.adamw(lr=1e-3, betas=(0.5, 0.99), weight_decay=0.0),
            "discriminator": sf.optim.adamw(lr=1e-3, betas=(0.5, 0.99), weight_decay=0.0),
        },
        "splits": {"ring": sf.Split(ring(), metrics=distance_to_the_ring, predict=points, loss=False)},
        "evaluate_every": "300 steps",
        "clip": "off",
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run) -> None:
    """Make all remaining steps: update the discriminator, then the generator against the updated discriminator."""
    with run:
        for step in run.steps():
            sf.forward_backward(step, discriminator_loss)
            sf.update(step, "discriminator")
            fooled = sf.forward_backward(step, generator_loss)
            sf.update(step, "generator")
            step.log(generator_loss=fooled)


if __name__ == "__main__":
    train(build(*sys.argv[1:2]))
