"""Runs over a stream, for processes of their own: what a run over a list of the same rows computes
is the reference.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from small_runs import KilledBeforeOperation
from surefoot.checkpoint.filesystem import Disk
from surefoot.data.streams import reader, recorder
from surefoot.data.streams.tape import Tape

FEATURES = 6


def row(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(FEATURES, generator=generator),
        "y": number % 3,
        "name": f"row {number}",
        "bytes": bytes(100),
    }


def endless() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield row(number)


def finite(rows: int) -> Any:
    return lambda: map(row, range(rows))


def noisy(recorded: dict[str, Any]) -> tuple[Tensor, int]:
    """A `decode_fn` that augments, with two of the generators that are seeded for each sample."""
    return recorded["x"] + 0.1 * random.random() + 0.1 * torch.rand(FEATURES), recorded["y"]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(
    run_dir: Path | None,
    source: Any = endless,
    *,
    stream: dict[str, Any] | None = None,
    **changes: Any,
) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": source
        if isinstance(source, Drawn)
        else sf.data.Stream(source, **({"decode_fn": noisy} | (stream or {}))),
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "20 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "save_every": "4 steps",
        "log_every": "2 steps",
        "layer_stats_every": None,
        "run_dir": run_dir,
        "console": False,
        "report": False,
        "tensorboard": False,
        "device": "cpu",
    }
    return sf.Run(**(settings | changes))


class Drawn:
    """The same rows in a list-like data set, whose augmentation draws alike."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return noisy(row(number))


def train(run: sf.Run, ids: Path | None = None) -> list[Any]:
    """Losses of all steps that are left, with their sample ids; both are appended to a file,
    too.
    """
    losses = []
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(
                [
                    step.index,
                    float(step.loss),
                    [part.sample_ids.tolist() for part in step.micro_batches],
                ]
            )
            if ids is not None:
                with ids.open("a") as file:
                    file.write(json.dumps(losses[-1]) + "\n")
    return losses


class TornAppend(Disk):
    """A disk that kills this process in the middle of the n-th append to a tape, from 1."""

    def __init__(self, n: int) -> None:
        self.left = n

    def append(self, handle: int, data: memoryview) -> None:
        self.left -= threading.current_thread().name == "surefoot-tape"
        if self.left == 0:
            super().append(handle, data[: len(data) // 2 + 1])
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(handle, data)


def session(spec: dict[str, Any], source: Any = None) -> None:
    """One start of the run in `spec["run_dir"]`, killed before an operation on the tape, in a pass,
    or in the source, which `source` replaces.
    """
    run_dir = Path(spec["run_dir"])
    changes: dict[str, Any] = {"workers": spec.get("workers", 0), **spec.get("changes", {})}
    if "operation" in spec:
        changes["disk"] = KilledBeforeOperation(spec["operation"], spec.get("path", ""))
    if "torn_append" in spec:
        changes["disk"] = TornAppend(spec["torn_append"])
    reader._SENT_BYTES, recorder._AHEAD_STEPS = 1, 1  # two appends per row
    parent = os.getpid()

    def killing_source() -> Iterator[dict[str, Any]]:
        heavy = bytes(spec.get("heavy", 100))
        for each in itertools.islice(endless(), spec.get("rows")):
            each["bytes"] = heavy
            if each["name"] == f"row {spec.get('stalls_at')}":
                threading.Event().wait()
            if each["name"] == f"row {spec.get('source_kills_at')}":
                os.kill(parent, signal.SIGKILL)  # the run, from the process that reads
            yield each

    left = [spec.get("pass", -1)]

    def killing_loss(model: nn.Module, batch: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    wait = Tape.wait
    ids = run_dir.with_suffix(f".ids{os.environ.get('RANK', '').strip('0')}")

    def noted_wait(tape: Tape, at: int) -> bool:
        if at >= spec["stalls_at"] and os.getpid() == parent:  # not in a loader worker
            ids.with_suffix(".waits").touch()
        return wait(tape, at)

    if "stalls_at" in spec:
        Tape.wait = noted_wait  # type: ignore[method-assign, assignment]
    run = build(
        run_dir,
        source or killing_source,
        stream=spec.get("stream"),
        loss=killing_loss,
        check_state=False,
        **changes,
    )
    train(run, ids)
