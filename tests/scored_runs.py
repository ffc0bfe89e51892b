"""Runs whose scores are functions of the step: the only weight counts the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf


class Count(nn.Module):
    """A weight that is the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps.expand(len(x))


def loss(model: nn.Module, batch: Any) -> Tensor:
    counts: Tensor = model(batch[0])
    return -counts.mean()


def scored(scores: Sequence[float]) -> Any:
    """A metric with the value `scores[step]`; the last one goes on."""

    def score(outputs: Tensor, targets: Tensor) -> float:
        del targets
        return scores[min(int(outputs[0]), len(scores) - 1)]

    return sf.metrics.whole_split(score)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.zeros(4, 1, dtype=torch.float64)
    return x, x


def build(run_dir: Path | str | None, **settings: Any) -> sf.Run:
    fixed: dict[str, Any] = {
        "model": Count,
        "loss": loss,
        "train_data": rows(),
        "optimizer": sf.optim.sgd(lr=1.0),
        "length": "9 steps",
        "batch_size": 2,
        "device": "cpu",
        "console": False,
        "tensorboard": False,
        "report": False,
        "check_state": False,
        "log_every": "1 step",
        "save_every": "1 step",
        "evaluate_every": "1 step",
        "run_dir": run_dir,
    }
    return sf.Run(**(fixed | settings))
