"""The training that every file of examples/launch starts: a small network that tells two noisy
spirals apart.

It takes about ten seconds and saves often, so that you can kill it on the way. The same command
resumes the run and ends
with the same bits. Without a launcher:  surefoot train examples/launch/train.py:build --run-dir runs/launched
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that flags change. The micro-batch size is fixed, so the run is the same on 1, 2 or
    4 processes.
    """

    run_dir: str = "runs/launched"
    length: str = "800 steps"
    batch_size: int = 64
    micro_batch_size: int = 16
    save_every: str = "20 steps"


def spirals(samples: int = 1024) -> tuple[Tensor, Tensor]:
    """Return noisy points on two spirals in the plane, and the spiral of each point."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    angle = torch.rand(samples, generator=generator).sqrt() * 9
    points = (
        torch.stack([angle.cos(), angle.sin()], dim=1)
        * (angle * (1.0 - 2.0 * labels))[:, None]
        / 5
    )
    return points + 0.05 * torch.randn(samples, 2, generator=generator), labels


def model() -> nn.Module:
    """Return a small classifier of points."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over points."""
    return F.cross_entropy(model(batch[0]), batch[1])


def build(config: Config) -> sf.Run:
    """Return the run."""
    points, labels = spirals()
    return sf.Run(
        model=model,
        loss=loss,
        train_data=(points, labels),
        optimizer=sf.optim.adamw(lr=1e-2),
        run_dir=config.run_dir,
        length=config.length,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        save_every=config.save_every,
    )
