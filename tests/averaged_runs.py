"""Runs whose body moves what no optimizer trains: a momentum encoder, a queue, a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.checkpoint import Store, average_weights

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(48, 6, generator=GENERATOR)
LABELS = torch.randint(3, (48,), generator=GENERATOR)


class Student(nn.Module):
    """A network and its momentum encoder, whose outputs it adds to its own, in one module."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.online = nn.Linear(6, 3, dtype=dtype)
        self.target = nn.Linear(6, 3, dtype=dtype).requires_grad_(False)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.temperature = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.online.weight.dtype)
        outputs = self.online(inputs) + self.target(inputs)
        return outputs.float() / self.temperature + self.shift + self.scratch


class Student16(Student):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


def loss(model: Any, batch: Any) -> Any:
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]), (outputs, batch[1])


def move(model: Any, *, unsaved: bool = True) -> None:
    """Let the momentum encoder and a buffer follow, and if `unsaved` what no checkpoint has."""
    with torch.no_grad():
        for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
            slow.mul_(0.5).add_(fast, alpha=0.5)
        model.shift.add_(0.125)
        if unsaved:
            model.scratch.add_(0.25)
            model.temperature = model.temperature / 2 + 0.25


def build(run_dir: str | Path | None, *, optimizer: str = "adamw", **changes: Any) -> sf.Run:
    optimizers = {
        "adamw": sf.optim.adamw(lr=0.01),
        "schedule_free": sf.optim.schedule_free(lr=0.01),
    }
    settings: dict[str, Any] = {
        "model": Student,
        "loss": loss,
        "train_data": (INPUTS, LABELS),
        "splits": {"val": sf.Split((INPUTS[:20], LABELS[:20]), metrics=sf.metrics.accuracy)},
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "12 steps",
        "optimizer": optimizers[optimizer],
        "evaluate_every": "4 steps",
        "run_dir": run_dir,
        "console": False,
        "report": False,
        "device": "cpu",
    }
    if optimizer == "adamw":
        settings["ema"] = 0.9
    return sf.Run(**(settings | changes))


def trained(run_dir: str | Path | None, *, unsaved: bool = True, **changes: Any) -> sf.Run:
    """Train with a body that moves the rest."""
    run = build(run_dir, **changes)
    with run:
        for _ in run:
            move(run.state.model, unsaved=unsaved)
    return run


def trained_on_ranks(*, bits: int, run_dir: str, **changes: Any) -> dict[str, float]:
    """As `trained`, on each rank; the scores at the end."""
    run = trained(run_dir, model=Student if bits == 32 else Student16, **changes)
    return run.evaluate()


class Normed(torch.nn.Module):
    """Batch norms, one of which stays in evaluation mode, a queue and a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.fixed = torch.nn.BatchNorm1d(8).eval()
        self.last = torch.nn.Linear(8, 3)
        self.register_buffer("queue", torch.zeros(4))

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.fixed(self.norm(self.first(inputs)))))


def loss_of_normed(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def normed(run_dir: str | Path | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Normed,
        "loss": loss_of_normed,
        "train_data": (INPUTS, LABELS),
        "splits": {"val": sf.Split((INPUTS[:20], LABELS[:20]))},
        "batch_size": 12,
        "micro_batch_size": 6,
        "length": "16 steps",
        "order": "sequential",
        "optimizer": sf.optim.adamw(lr=0.05),
        "save_every": "4 steps",
        "keep_last": 4,
        "run_dir": run_dir,
        "console": False,
        "report": False,
        "device": "cpu",
    }
    return sf.Run(**(settings | changes))


def score_of_mean(*, saved_in: str, **changes: Any) -> float:
    """The score of the mean of a saved run's last three checkpoints."""
    run = normed(None, **changes)
    run.load_checkpoint(average_weights(Store(Path(saved_in) / "checkpoints"), 3))
    return run.evaluate()["val/loss"]
