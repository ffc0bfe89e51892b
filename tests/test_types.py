"""A user's small project has no type error under mypy and pyright in strict mode; a wrong keyword
or type is one in both.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import surefoot as sf

PROJECT = '''
from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import surefoot as sf

Batch = tuple[Tensor, Tensor]


class Points(Dataset[Batch]):
    """Points on a plane, each with the number of its quadrant."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Batch:
        point = self.points[index]
        return point, 2 * (point[0] > 0).long() + (point[1] > 0).long()


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.head = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        hidden: Tensor = self.hidden(points)
        logits: Tensor = self.head(hidden.relu())
        return logits


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    points, quadrants = batch
    logits: Tensor = model(points)
    return F.cross_entropy(logits, quadrants), (logits, quadrants)


def confidence(outputs: Tensor, targets: Tensor) -> sf.Mean:
    """The mean probability of the right quadrant."""
    right = outputs.softmax(-1).gather(1, targets[:, None])
    return sf.Mean(right.sum(), len(targets))


def build(run_dir: str | Path) -> sf.Run:
    return sf.Run(
        model=Net,
        loss=loss,
        train_data=Points(256, seed=0),
        splits={"val": sf.Split(Points(64, seed=1), metrics=[sf.metrics.accuracy, confidence], batch_size=32)},
        optimizer=sf.optim.adamw(lr=1e-2, weight_decay=0.05, lr_multipliers=[sf.optim.frozen("hidden.bias")]),
        schedule=sf.schedules.cosine(warmup="5%", min_lr_ratio=0.1),
        early_stopping=sf.EarlyStopping("max val/accuracy", patience=5),
        batch_size=32,
        length="2 epochs",
        clip="norm 1.0",
        best="max val/accuracy",
        device="cpu",
        console=False,
        seed=7,
        run_dir=run_dir,
    )


def train(run: sf.Run) -> dict[int, float]:
    """Run code after each step; return the accuracies by step."""
    accuracies: dict[int, float] = {}
    with run:
        for step in run:
            if step.metrics:
                accuracies[step.index] = step.metrics["val/accuracy"]
    return accuracies


def train_with_own_updates(run: sf.Run) -> int:
    """Write the update of each step; return the number of steps."""
    with run:
        for step in run.steps():
            step_loss = sf.forward_backward(step)
            sf.update(step)
            step.log(doubled=2 * step_loss)
    return run.state.step


def look(run_dir: Path) -> str:
    """Use a run that is finished."""
    saved = sf.load(run_dir)
    losses = [record["loss"] for record in saved.records("train")]
    model = saved.load_model(Net, checkpoint="best")
    findings = [str(finding) for finding in saved.diagnose()]
    page: Path = saved.report()
    metrics: dict[str, float] = sf.evaluate(model, sf.Split(Points(64, seed=2), metrics=confidence), loss=loss)
    return f"{saved.step} {saved.status} {losses} {findings} {page.name} {metrics['confidence']}"
'''

WRONG = """
import torch

import surefoot as sf
from project import Net, Points, build, loss

data, adamw = Points(8, seed=0), sf.optim.adamw(lr=1e-3)
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs")
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs", epochs=3)  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length=30)  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4.5, length="1 epochs")  # wrong
sf.Run(model=3, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs")  # wrong
sf.Run(Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs")  # wrong
sf.Run(model=Net, loss="loss", train_data=data, optimizer=adamw, batch_size=4, length="1 epochs")  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer="adamw", batch_size=4, length="1 epochs")  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs", clip=1.0)  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs", splits=data)  # wrong
sf.Run(model=Net, loss=loss, train_data=data, optimizer=adamw, batch_size=4, length="1 epochs", parallel="dp")  # wrong
sf.optim.adamw(learning_rate=1e-3)  # wrong
sf.optim.adamw(lr="1e-3")  # wrong
sf.optim.adamw()  # wrong
sf.optim.adam_w(lr=1e-3)  # wrong
sf.schedules.cosine(warm_up="5%")  # wrong
sf.schedules.cosine(warmup=[5])  # wrong
sf.Split(data, metric=sf.metrics.accuracy)  # wrong
sf.Split(data, metrics=3)  # wrong
sf.EarlyStopping("min val/loss", patience="3")  # wrong
sf.Mean(torch.ones(()), count="3")  # wrong
sf.load(3)  # wrong
sf.load("runs/a").replay("3")  # wrong
print(sf.load("runs/a").steps)  # wrong
run = build("runs/a")
sf.update(run)  # wrong
for step in run.steps():
    sf.forward_backward(run)  # wrong
    step.log(text="text")  # wrong
    accuracy: str = step.metrics["val/accuracy"]  # wrong
print(run.trains())  # wrong
"""


def write_project(directory: Path) -> None:
    """Write the project, and beside it a module in which each line that ends with "# wrong" has an
    error.
    """
    (directory / "project.py").write_text(PROJECT)
    (directory / "wrong.py").write_text(WRONG)


def environment_with_the_package(directory: Path) -> Path:
    """Create an environment in which surefoot lies as an installed package; return its
    interpreter.
    """
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    (packages / "surefoot").symlink_to(Path(sf.__file__).parent)
    paths_of_others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("\n".join(paths_of_others))
    return python


def errors_of_mypy(project: Path, python: Path) -> set[tuple[str, int]]:
    cache = project.parent / "cache"
    options = ["--strict", f"--python-executable={python}", f"--cache-dir={cache}"]
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "."],
        cwd=project,
        text=True,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    places = re.findall(r"(?m)^(\S+?):(\d+): error", process.stdout)
    return {(file, int(line)) for file, line in places}


def errors_of_pyright(project: Path, python: Path) -> set[tuple[str, int]]:
    (project / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    process = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", str(python), "--outputjson"],
        cwd=project,
        # the extra `nodejs` of pyright brings its own
        env=os.environ | {"PYRIGHT_PYTHON_GLOBAL_NODE": "0"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    places = set()
    for problem in json.loads(process.stdout)["generalDiagnostics"]:
        line = problem["range"]["start"]["line"] + 1
        places.add((Path(problem["file"]).name, line))
    return places


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", [errors_of_mypy, errors_of_pyright])
def test_a_project_of_a_user_has_no_type_error_and_each_wrong_line_has_one(
    errors_of: Callable[[Path, Path], set[tuple[str, int]]], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    write_project(project)
    python = environment_with_the_package(tmp_path / "environment")
    lines = enumerate(WRONG.splitlines(), 1)
    wrong = {("wrong.py", number) for number, line in lines if line.endswith("# wrong")}

    errors = errors_of(project, python)

    assert len(wrong) > 20
    assert errors == wrong


def test_that_project_trains(tmp_path: Path) -> None:
    write_project(tmp_path)
    project = SimpleNamespace(**runpy.run_path(str(tmp_path / "project.py")))

    accuracies = project.train(project.build(tmp_path / "a"))
    steps = project.train_with_own_updates(project.build(tmp_path / "b"))

    assert max(accuracies.values()) > 0.3  # by guessing 0.25
    assert steps == 16
    assert sf.load(tmp_path / "b").metrics == sf.load(tmp_path / "a").metrics
    assert project.look(tmp_path / "a").startswith("16 finished ")
