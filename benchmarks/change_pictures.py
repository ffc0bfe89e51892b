"""docs/images/change-*.svg: the three stories of the guide to changes, each told by small runs.

    python benchmarks/change_pictures.py [--out docs/images]

Under a minute on one core. The data are random numbers and the answers of a random network. Seeds
are fixed, so the curves come out the same. `make pictures ONLY=changes` calls it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.config.setting_change import in_effect
from surefoot.tools.report.charts import Chart, Line, Mark
from surefoot.tools.report.figures import picture, write_file
from surefoot.tools.report.run_charts import loss_charts, points_of
from surefoot.tools.report.series import ReportedRun, read_reported_run
from surefoot.tracking.change_journal import read_changes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SAMPLES = 2048
INPUTS = 32
CLASSES = 10


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def data() -> tuple[Tensor, Tensor]:
    """Return random inputs, and the classes that a random network gives them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(INPUTS, 16, generator=generator) / 3)
    return inputs, (hidden @ torch.randn(16, CLASSES, generator=generator)).argmax(1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(run_dir: Path, **settings: Any) -> None:
    """Train a run, or go on with it."""
    chosen: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": data(),
        "batch_size": 64,
        "device": "cpu",
        "console": False,
        "report": False,
        "log_every": "4 steps",
        "run_dir": run_dir,
    }
    sf.Run(**(chosen | settings)).train()


def marks(run: Path) -> tuple[Mark, ...]:
    """Return a mark with its reason for each step at which settings changed."""
    reasons: dict[int, str] = {}
    for change in in_effect(read_changes(run)):
        reasons[change.from_step] = change.because
    return tuple(Mark("event", step, None, reason) for step, reason in reasons.items())


def loss_chart(run: ReportedRun) -> Chart:
    chart = loss_charts(run, None)[0]
    return Chart("loss", "Loss", chart.lines, marks(run.files.path), scale="linear", wide=True)


def line(run: ReportedRun, key: str, name: str, series: int = 0) -> Line:
    return Line(name, points_of(run.train[key], None), series)


def spike(place: Path) -> list[Chart]:
    """A rate that was raised too far, and the way back to the step before it was."""
    run_dir = place / "spike"
    settings: dict[str, Any] = {
        "optimizer": sf.optim.adamw(lr=1e-3),
        "schedule": sf.schedules.constant(),
        "length": "600 steps",
        "save_every": "100 steps",
    }
    train(run_dir, **settings, stop_after="200 steps")
    sf.load(run_dir).change("bolder", **{"optimizer.lr": 0.1})
    train(run_dir, **settings, stop_after="320 steps")
    sf.load(run_dir).go_back(200, "the loss spikes: back to step 200", **{"optimizer.lr": 1e-4})
    train(run_dir, **settings)
    return [loss_chart(read_reported_run(run_dir))]


def longer(place: Path) -> list[Chart]:
    """A run that has ended under a cosine, made longer in two ways."""
    settings: dict[str, Any] = {
        "optimizer": sf.optim.adamw(lr=1e-3),
        "schedule": sf.schedules.cosine("5%", min_lr_ratio=0.02),
        "length": "10 epochs",
    }
    present = place / "present"
    restarted = place / "restarted"
    train(present, **settings)
    shutil.copytree(present, restarted)
    sf.load(present).change("twice as long", length="20 epochs")
    new_cosine = {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.02}
    sf.load(restarted).change("twice as long", length="20 epochs", **new_cosine)
    losses = []
    rates = []
    names = {present: "from the present rate", restarted: "with a new cosine"}
    for series, (run_dir, name) in enumerate(names.items()):
        train(run_dir, **settings)
        run = read_reported_run(run_dir)
        losses.append(line(run, "loss", name, series))
        rates.append(line(run, "lr", name, series))
    return [
        Chart("loss", "Loss", tuple(losses), marks(present), scale="linear"),
        Chart("rate", "Learning rate", tuple(rates), marks(present), scale="linear", zero=True),
    ]


def ramp(place: Path) -> list[Chart]:
    """A batch that becomes four times as large, known from the start."""
    run_dir = place / "ramp"
    train(
        run_dir,
        optimizer=sf.optim.adamw(lr=1e-3),
        schedule=sf.schedules.cosine("5%"),
        length="16 epochs",
        batch_size="32, 128 from 40%",
    )
    run = read_reported_run(run_dir)
    change = in_effect(read_changes(run_dir))[0]
    end = float(run.last_step)
    sizes = (
        (0.0, float(change.was)),
        (float(change.from_step), float(change.was)),
        (float(change.from_step), float(change.now)),
        (end, float(change.now)),
    )
    at_change = marks(run_dir)
    return [
        Chart("loss", "Loss", (line(run, "loss", "training"),), at_change, scale="linear"),
        Chart("size", "Batch size", (Line("size", sizes),), at_change, scale="linear", zero=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args().out
    stories = {
        "change-spike": (spike, "The loss spikes"),
        "change-longer": (longer, "It is still improving"),
        "change-ramp": (ramp, "The batch ramp"),
    }
    with tempfile.TemporaryDirectory() as place:
        for name, (story, title) in stories.items():
            svg = picture(story(Path(place)), title=title)
            write_file(out / f"{name}.svg", svg.encode())


if __name__ == "__main__":
    main()
