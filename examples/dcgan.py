"""DCGAN: a step generates its pictures once, and the losses of both models use them.

The discriminator's loss keeps the generated pictures of a micro-batch, with their graph. The generator's loss takes them after
the discriminator's update, as in Radford et al. 2016 (https://arxiv.org/abs/1511.06434). Without the dictionary, `gan.py`
generates the same pictures twice from the same seeds. Run it:  python examples/dcgan.py runs/dcgan
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

NOISE = 8
Models = Mapping[str, nn.Module]


def discs(samples: int = 1024) -> tuple[Tensor]:
    """Return pictures of 8 x 8 pixels, from -1 to 1, each of one bright disc."""
    generator = torch.Generator().manual_seed(0)
    center, radius = (
        2 + 3 * torch.rand(samples, 2, 1, 1, generator=generator),
        1 + torch.rand(samples, 1, 1, generator=generator),
    )
    row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    distance = ((row - center[:, 0]) ** 2 + (column - center[:, 1]) ** 2).sqrt()
    return (torch.tanh(2 * (radius - distance))[:, None],)


def generator() -> nn.Module:
    """Return a network from noise of shape (NOISE, 1, 1) to pictures."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    """Return a network from pictures to one logit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 2),
        nn.Flatten(0),
    )


def towards(logits: Tensor, label: float) -> Tensor:
    """Return the mean cross-entropy between logits and one label."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


class Losses:
    """The losses of both models. `fakes` has the generated pictures of each micro-batch between the two updates."""

    def __init__(self) -> None:
        self.fakes: dict[int, Tensor] = {}

    def discriminator(self, models: Models, batch: tuple[Tensor]) -> Tensor:
        """Generate pictures, keep them, and return a loss that is low if they are told apart from real ones."""
        (real,) = batch
        fake = models["generator"](torch.randn(len(real), NOISE, 1, 1, device=real.device))
        self.fakes[id(batch)] = fake  # the generator's loss receives the same object
        return towards(models["discriminator"](real), 1.0) + towards(models["discriminator"](fake.detach()), 0.0)

    def generator(self, models: Models, batch: tuple[Tensor]) -> Tensor:
        """Return a loss that is low if the discriminator takes the generated pictures for real ones."""
        return towards(models["discriminator"](self.fakes.pop(id(batch))), 1.0)


def build(run_dir: str | Path | None = None, **changes: Any) -> sf.Run:
    """Return the run; `changes` replace its settings."""
    settings: dict[str, Any] = {
        "model": {"generator": generator, "discriminator": discriminator},
        "train_data": discs(),
        "batch_size": 64,
        "length": "20 epochs",
        "optimizer": {name: sf.optim.adam(lr=2e-3, betas=(0.5, 0.999)) for name in ("generator", "discriminator")},
        "clip": "off",
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run) -> None:
    """Make all remaining steps: update the discriminator, then the generator with the same pictures."""
    losses = Losses()
    with run:
        for step in run.steps():
            sf.forward_backward(step, losses.discriminator)
            sf.update(step, "discriminator")
            step.log(generator_loss=sf.forward_backward(step, losses.generator))
            sf.update(step, "generator")


if __name__ == "__main__":
    train(build(*sys.argv[1:2]))
