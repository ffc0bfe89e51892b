"""Law 4 for weights that do not lie row by row: fused kernels walk memory, so optimizer state must
lie as its parameter does.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf


def convolutional() -> nn.Module:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return layers.to(memory_format=torch.channels_last)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weights(run_dir: Path, stop_after: str | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(40, 3, 8, 8, generator=generator),
        torch.randint(3, (40,), generator=generator),
    )
    run = sf.Run(
        model=convolutional,
        loss=loss,
        train_data=data,
        batch_size=8,
        length="12 steps",
        optimizer=sf.optim.adamw(lr=1e-2),
        run_dir=run_dir,
        stop_after=stop_after,
        console=False,
    )
    run.train()
    return [parameter.detach().clone() for parameter in run.state.models["model"].parameters()]


def test_a_channels_last_model_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", None)
    weights(tmp_path / "stopped", "5 steps")
    resumed = weights(tmp_path / "stopped", None)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
