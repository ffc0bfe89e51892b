"""The time from opening a run that goes on to its first step made, by the step that its checkpoint
is of.

A run of an MLP (32-64-10) on 50,000 rows is trained for 10 steps. Its checkpoint is then made one
of step 100 to 1,000,000 by saving the same contents as that step, beside the records that a run
with the default settings has by then: one for every 50 steps. Each is gone on with from a copy of
its directory, in turns.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import surefoot as sf
from growing.records import write_records
from growing.told import Clock, Told
from surefoot.checkpoint.store import Store
from surefoot.tracking.jsonl import JsonLines

BEGUN, LOG_EVERY = 10, 50  # steps
STEPS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)


def told(now: Clock, *, short: bool) -> Told:
    steps, rounds = (STEPS[::5], 3) if short else (STEPS, 9)
    found: dict[str, dict[int, list[float]]] = {"with its records": {}, "records gone": {}}
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(StringIO()):
        data = rows()
        begun = Path(directory) / "begun"
        run(begun, data, stop_after=f"{BEGUN} steps").train()
        for step in steps:
            for name in found:
                standing_at(
                    step,
                    begun,
                    Path(directory) / f"{name} {step}",
                    with_records=name == "with its records",
                )
        for turn in range(rounds + 1):
            for step in steps:
                for name, times in found.items():
                    copy = Path(directory) / "copy"
                    shutil.copytree(Path(directory) / f"{name} {step}", copy)
                    taken = to_first_step(copy, data, step, now)
                    shutil.rmtree(copy)
                    if turn:  # the first of each warms up
                        times.setdefault(step, []).append(taken)
    table = {name: {step: median(times[step]) for step in steps} for name, times in found.items()}
    least = steps[0]
    most = steps[-1]
    with_records = table["with its records"]
    without = table["records gone"]
    return Told(
        [f"{'step':>9} {'records':>8} {'ms to the first step':>21} {'ms, records gone':>17}"]
        + [
            f"{step:>9,} {step // LOG_EVERY:>8,} {with_records[step] * 1e3:>21.1f} {without[step] * 1e3:>17.1f}"
            for step in steps
        ],
        f"resume: {with_records[most] * 1e3:.0f} ms at step {most:,} with {most // LOG_EVERY:,} records,"
        f" {with_records[least] * 1e3:.0f} ms at step {least}; without records {without[most] / without[least]:.2f} times",
        "from opening to the first step",
        "step of the checkpoint",
        "seconds",
        {name: list(times.items()) for name, times in table.items()},
    )


def rows() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(50_000, 32), torch.randint(10, (50_000,)))


def run(run_dir: Path, data: TensorDataset, **settings: Any) -> sf.Run:
    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    return sf.Run(
        model=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=loss,
        train_data=data,
        batch_size=32,
        length="2000000 steps",
        optimizer=sf.optim.adamw(lr=1e-3),
        precision="fp32",
        log_every=f"{BEGUN if settings else LOG_EVERY} steps",
        report=False,
        run_dir=run_dir,
        **settings,
    )


def standing_at(step: int, begun: Path, run_dir: Path, *, with_records: bool) -> None:
    """A copy of a run whose newest checkpoint is of another step."""
    shutil.copytree(begun, run_dir)
    if with_records:
        write_records(run_dir / "metrics.jsonl", step // LOG_EVERY, every=LOG_EVERY)
    store = Store(run_dir / "checkpoints")
    found = store.newest_intact()
    assert found is not None
    metrics = JsonLines(run_dir / "metrics.jsonl")
    store.save(replace(found[0], step=step, log=metrics.state()))
    metrics.close()


def to_first_step(run_dir: Path, data: TensorDataset, step: int, now: Clock) -> float:
    begun = now()
    again = run(run_dir, data)
    with again:
        for made in again:
            taken = now() - begun
            assert made.index == step
            break
    return taken
