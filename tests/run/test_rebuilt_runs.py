"""Runs that are built again where their settings change: what stays theirs, and what is given up."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from surefoot.tracking.change_journal import CHANGES
from surefoot.tracking.run_reader import lock_holder

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


class BuildError(Exception):
    """What a function that builds a model raises."""


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def run_in(run_dir: Path, **settings: Any) -> sf.Run:
    chosen: dict[str, Any] = {
        "model": build_model,
        "loss": loss,
        "train_data": (INPUTS, INPUTS.sum(1, keepdim=True)),
        "optimizer": sf.optim.adamw(lr=1e-2),
        "batch_size": 8,
        "length": "12 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(chosen | settings))


def train(run: sf.Run) -> None:
    """Train a run whose body changes the learning rate in its fifth step."""
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)


def at_second_call(action: Callable[[], None]) -> Callable[[], nn.Module]:
    """Return a function that builds a model, and does something more where it builds it again."""
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(build_model())
        if len(models) == 2:
            action()
        return models[-1]

    return build


# --- the lock of the directory --------------------------------------------------------------------


def can_lock(run_dir: Path) -> bool:
    """Return True if another process can lock the directory of a run."""
    child = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'r+b') as lock:\n"
        "    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    command = [sys.executable, "-c", child, str(run_dir / ".lock")]
    done = subprocess.run(command, check=False, capture_output=True)
    return done.returncode == 0


def test_no_other_process_can_take_a_run_that_is_built_again(tmp_path: Path) -> None:
    can_take = []
    model = at_second_call(lambda: can_take.append(can_lock(tmp_path)))
    train(run_in(tmp_path, model=model))
    assert can_take == [False]
    assert can_lock(tmp_path)


def fail() -> None:
    raise BuildError


def test_a_run_that_cannot_be_built_again_leaves_its_directory(tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        train(run_in(tmp_path, model=at_second_call(fail)))
    assert lock_holder(tmp_path) == 0
    assert can_lock(tmp_path)


def test_a_session_that_cannot_be_opened_after_a_change_leaves_its_directory(
    tmp_path: Path,
) -> None:
    def damage_the_journal() -> None:
        (tmp_path / CHANGES).write_text("{}\n")

    with refused("journal-of-changes-damaged", sf.CheckpointError):
        train(run_in(tmp_path, model=at_second_call(damage_the_journal)))
    assert lock_holder(tmp_path) == 0
    assert can_lock(tmp_path)
