"""A run small enough to be killed hundreds of times that still has everything a resume can get
wrong.

Dropout and batch statistics, augmentation through Python's, NumPy's and torch's generators, two
micro-batches a step, an average of the weights, early stopping switched on, a value of the user's
own, epochs that end in the middle of a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import surefoot as sf
import with_closures
from run_files import newest_checkpoint, newest_tensor_hashes, records_of, with_keys
from surefoot.checkpoint.filesystem import Disk

SAMPLES, FEATURES, CLASSES = 52, 8, 3


class Augmented:
    """Real-valued samples, moved about by all three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(FEATURES)
        return self.inputs[sample] + 0.1 * noise, self.labels[sample]


class Batches:
    """A batch sampler that draws anew in each epoch: 9 batches of 6 to 12 samples, some of them
    twice.
    """

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(9):
            yield torch.randint(SAMPLES, (random.randint(6, 12),)).tolist()

    def __len__(self) -> int:
        return 9


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(16, CLASSES),
        )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(run_dir: str | Path | None, **changes: Any) -> sf.Run:
    """A run whose hidden state is not looked for unless `changes` say so: that takes a sixth of its
    time.
    """
    data = Augmented()
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data,
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "4 epochs",
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.05),
        "schedule": sf.schedules.cosine(warmup="10%"),
        "splits": {"val": sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy)},
        "evaluate_every": "5 steps",
        "early_stopping": sf.EarlyStopping("min val/loss", patience=50),
        "save_every": "4 steps",
        "log_every": "3 steps",
        "layer_stats_every": "6 steps",
        "ema": 0.9,
        "run_dir": run_dir,
        "console": False,
        "report": False,  # a tenth of its cost
        "check_state": False,
    }
    settings |= changes
    rule = settings["early_stopping"]
    if isinstance(rule, sf.EarlyStopping) and "best" not in settings:  # the score of the rule
        settings["best"] = rule.monitor
    return sf.Run(**settings)


def train(run: sf.Run, ids: Path | None = None) -> None:
    """All steps that are left; the samples of each are appended to a file, and a value of the
    user's own is kept.
    """
    seen = run.register_state("seen", {"labels": 0, "noise": torch.zeros(())})
    with run:
        for step in run:
            for micro_batch in step.micro_batches:
                if micro_batch.count:
                    labels = micro_batch.batch[1]
                    seen["labels"] += int(labels.sum())
            seen["noise"] += torch.rand(())  # the body's random numbers belong to its step too
            if ids is not None:
                ids_of_step = [part.sample_ids.tolist() for part in step.micro_batches]
                with ids.open("a") as file:
                    file.write(json.dumps([step.index, ids_of_step]) + "\n")


class KilledBeforeOperation:
    """A disk that kills this process before its n-th operation (from 1) that changes anything, or a
    path named like `path`.
    """

    CHANGING = (
        "make_directory",
        "create",
        "append",
        "flush",
        "close",
        "flush_directory",
        "rename",
        "remove",
        "remove_directory",
    )

    def __init__(self, n: int, path: str = "") -> None:
        self.left = n
        self.path = path
        self.disk = Disk()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.disk, name)
        if name not in self.CHANGING:
            return operation

        def count_and_do(*arguments: Any, **named: Any) -> Any:
            if self.path in str(arguments):
                self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **named)

        return count_and_do


def session(spec: dict[str, Any]) -> None:
    """One start of the run in `spec["run_dir"]`, killed where `spec` says."""
    run_dir = Path(spec["run_dir"])
    changes: dict[str, Any] = {
        "workers": spec.get("workers", 0),
        "check_state": True,
        **spec.get("changes", {}),
    }
    if "weights" in spec:
        changes["order"] = sf.data.Weighted(spec["weights"])
    if "batches" in spec:
        changes |= {
            "train_data": DataLoader(Augmented(), batch_sampler=Batches()),  # type: ignore[arg-type]
            "batch_size": None,
        }
    if "plateau" in spec:
        changes["plateau"] = sf.ReduceLROnPlateau(**spec["plateau"])
    if "early_stopping" in spec:
        changes["early_stopping"] = sf.EarlyStopping(**spec["early_stopping"])
    if "optimizer" in spec:
        changes |= {"optimizer": with_closures.source(spec["optimizer"]), "length": "12 steps"}
    if "operation" in spec:
        changes["disk"] = KilledBeforeOperation(spec["operation"], spec.get("path", ""))
    if "pass" in spec:
        left = [spec["pass"]]

        def killing_loss(model: nn.Module, batch: Any) -> Tensor:
            if model.training and torch.is_grad_enabled():  # no pass of the start
                left[0] -= 1
                if left[0] == 0:
                    if spec.get("waits"):  # for the save of an earlier step
                        run.parts.checkpointing.writer.wait()  # type: ignore[union-attr]  # it has a directory
                    os.kill(os.getpid(), signal.SIGKILL)
            return loss(model, batch)

        changes |= {"loss": killing_loss, "check_state": False}  # it counts
    if "evaluated" in spec:  # killed in the n-th batch that is evaluated
        to_evaluate = [spec["evaluated"]]

        def accuracy(outputs: Any, targets: Any) -> Any:
            to_evaluate[0] -= 1
            if to_evaluate[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return sf.metrics.accuracy(outputs, targets)

        held_out = sf.Split((Augmented().inputs, Augmented().labels), metrics=accuracy)
        changes["splits"] = {"val": held_out}
    if "signal_at_step" in spec:
        step, number = spec["signal_at_step"]
        passes = [0]

        def signalling_loss(model: nn.Module, batch: Any) -> Tensor:
            if model.training and torch.is_grad_enabled():  # no pass of the start
                passes[0] += 1
                if passes[0] == 2 * step + 1:  # in the first of the step's two micro-batches
                    os.kill(os.getpid(), number)
            return loss(model, batch)

        changes |= {"loss": signalling_loss, "check_state": False}
    is_main = os.environ.get("RANK", "0") == "0"
    run = build(run_dir, **changes)
    train(run, run_dir.with_suffix(".ids") if is_main else None)


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything that must be equal to the bit: tensors, records, sample ids, and the state that is
    not about time.
    """
    newest = newest_checkpoint(run_dir)
    state = json.loads((newest / "state.json").read_text())
    del state["clock"], state["machine"]
    del state["fingerprints"]["sources"]["loss"]  # a loss that kills has another text
    lines = [json.loads(line) for line in run_dir.with_suffix(".ids").read_text().splitlines()]
    shown = (
        "kind",
        "step",
        "loss",
        "grad_norm",
        "grad_norm_max",
        "clip_fraction",
        "targets",
        "skipped",
        "lr",
        "lr_factor",
        "val/loss",
        "val/accuracy",
        "loss_max",
        "loss_max_step",
        "first_step_loss",
        "skipped_steps",
        "measured_step",
        "grad_norm",
        "weight_norm",
        "update_norm",
        "zero_grad_row_fraction",
        "saturated_fraction",
        "activation_rms",
        "grad_noise",
        "never_updated",
    )
    return {
        "step": newest.name,
        "tensors": newest_tensor_hashes(run_dir),
        "state": state,
        "records": with_keys(records_of(run_dir, "train", "epoch", "eval", "layer_stats"), shown),
        "ids": dict(lines),
    }
