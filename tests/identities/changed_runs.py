"""A small run whose settings change while it goes on, and what says that two runs end alike."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import same_bits
import surefoot as sf
from rank_processes import on_ranks
from same_bits import assert_same_bits
from surefoot.checkpoint.reader import read
from surefoot.run.run import Run

SAMPLES = 60
CHANGED_AT = 10
LAST = 23  # step of `run_in`


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def data(samples: int = SAMPLES, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.sum(1, keepdim=True)


def run_in(run_dir: Path | None, **settings: Any) -> Run:
    chosen: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": data(),
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        "schedule": sf.schedules.cosine("10%"),
        "clip": "norm 1.0",
        "ema": 0.9,
        "batch_size": 8,
        "length": "3 epochs",
        "device": "cpu",
        "console": False,
        "report": False,
        "log_every": "1 steps",
        "run_dir": run_dir,
    }
    return sf.Run(**(chosen | settings))


def on_two_ranks(run_dir: Path, **settings: Any) -> None:
    assert on_ranks(2, lambda _: run_in(run_dir, **settings).train()) == [0, 0]


def given_the_journal_of(changed: Path, run_dir: Path) -> Path:
    """Return a new directory of a run that has the journal of another from the start."""
    run_dir.mkdir()
    shutil.copy(changed / "changes.jsonl", run_dir)
    return run_dir


def weights(run: Run) -> list[Tensor]:
    """Return copies of the parameters of a model and of their average, if there is one."""
    tensors = list(run.state.model.parameters())
    average = run.state.ema_models.get("model")
    if average is not None:
        tensors += average.model.parameters()
    return [tensor.detach().clone() for tensor in tensors]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def tensors_of(run_dir: Path, step: int) -> dict[str, Tensor]:
    return same_bits.tensors_of(read(run_dir / "checkpoints" / f"step-{step:08d}"))


def assert_same_end(one: Path, other: Path, *, step: int = LAST) -> None:
    assert sf.load(one).step == sf.load(other).step == step
    assert_same_bits(tensors_of(other, step), tensors_of(one, step))


def optimizer_state(run_dir: Path, *, step: int) -> dict[int, dict[str, Tensor]]:
    """Return the moments of a layer's two parameters, in the form of torch's optimizers."""
    state: dict[int, dict[str, Tensor]] = {0: {}, 1: {}}
    checkpoint = read(run_dir / "checkpoints" / f"step-{step:08d}")
    for name, tensor in checkpoint.tensors("optimizer").items():
        parameter, _, moment = name.partition("/")
        state[0 if parameter == "weight" else 1][moment] = tensor
    return state


def samples_read(plan: Any, steps: range) -> list[tuple[int, int]]:
    """Return the samples of some steps with their epochs, in order."""
    samples: list[tuple[int, int]] = []
    for step in steps:
        for ids, epochs in plan.micro_batches(step):
            samples += zip(epochs.tolist(), ids.tolist(), strict=True)
    return samples


def halved(run: Run) -> None:
    """Train a run whose body halves the rate after step 4."""
    with run:
        for step in run:
            if step.index == 4:
                for group in run.state.optimizers["model"].optimizer.param_groups:
                    group["lr"] = group["lr"] / 2
