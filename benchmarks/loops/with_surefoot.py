"""surefoot: `for step in run`, and the same with a DataLoader as its training data."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from loops.training import RATE, WINDOW, Rows, Training


def surefoot(training: Training) -> nn.Module:
    """With everything on: console, JSONL, TensorBoard, layers watched every 200 steps, checkpoints
    at 0, every 500 steps, at the end.
    """
    work = training.work
    data = (Rows if training.loader else TensorDataset)(work.inputs, work.targets)
    return _trained(training, train_data=data, batch_size=work.batch_size)


def from_loader(training: Training) -> nn.Module:
    """As above, given a shuffled DataLoader: surefoot's permutation of its data set is the order
    that every loop gets.
    """
    work = training.work
    data = (Rows if training.loader else TensorDataset)(work.inputs, work.targets)
    return _trained(training, train_data=DataLoader(data, batch_size=work.batch_size, shuffle=True))


def _trained(training: Training, **data: Any) -> nn.Module:
    work = training.work
    run = sf.Run(
        model=work.model,
        loss=training.loss,
        check_state=False,  # it collects the losses, for the comparison
        **data,
        length=f"{training.steps} steps",
        optimizer=sf.optim.adamw(lr=RATE),
        schedule=sf.schedules.cosine(warmup=f"{training.warmup} steps"),
        precision="fp32",
        run_dir=tempfile.mkdtemp(dir=training.place),
        log_every=f"{WINDOW} steps",
        save_every="500 steps",
        report=False,  # of a run that is over, as its time is
    )
    with run:
        for step in run:
            # a window's log is written after its last step was yielded: it counts in the next
            training.asked(step.index)
    return run.state.models["model"]
