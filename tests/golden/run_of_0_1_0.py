"""A run directory as surefoot 0.1.0 wrote it: `run_of_0_1_0/`, stopped after 4 of 6 steps, and how
that run ended.

All of its arithmetic is exact (sums of small multiples of powers of two, in float64), so that it
has the same bits on every machine. `python tests/golden/run_of_0_1_0.py tests/golden/run_of_0_1_0`,
with surefoot 0.1.0 installed, wrote it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf

STORED = Path(__file__).with_suffix("")


class Net(nn.Module):
    """A frozen layer, a trained one, and a buffer that counts forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 3).double().requires_grad_(False)
        self.head = nn.Linear(3, 1).double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            self.trunk.weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 1.0], [0.0, 1.0]]))
            self.trunk.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
            self.head.weight.copy_(torch.tensor([[1.0, 0.0, -1.0]]))
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.head(self.trunk(x))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def build(run_dir: Path | str | None, **settings: Any) -> sf.Run:
    x = torch.tensor(
        [[a, b] for a in (-1.0, 0.0, 1.0, 2.0) for b in (-1.0, 0.0, 1.0, 2.0)], dtype=torch.float64
    )
    y = x.sum(dim=1, keepdim=True)
    defaults = {
        "length": "6 steps",
        "batch_size": 4,
        "device": "cpu",
        "console": False,
        "tensorboard": False,
    }
    often = {
        "log_every": "1 step",
        "save_every": "2 steps",
        "evaluate_every": "2 steps",
        "best": "min val/loss",
    }
    return sf.Run(
        model=Net,
        loss=loss,
        train_data=(x, y),
        splits={"val": sf.Split((x[:4], y[:4]))},
        optimizer=sf.optim.sgd(lr=2**-5, momentum=0.5),
        ema=0.5,
        run_dir=run_dir,
        **(defaults | often | settings),
    )


def train(run: sf.Run) -> None:
    with run:
        steps = run.register_state("steps", [])
        for step in run:
            steps.append(step.index)


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    train(build(out / "run", stop_after="4 steps"))
    shutil.copytree(out / "run", out / "whole")
    train(build(out / "whole"))
    shutil.move(out / "whole" / "checkpoints" / "step-00000006", out / "step-00000006")
    shutil.rmtree(out / "whole")
    for name in ("report.html", ".lock"):
        (out / "run" / name).unlink(missing_ok=True)
    forget_the_machine(out / "run" / "environment.json")


def forget_the_machine(environment: Path) -> None:
    """Leave out of environment.json what is about the machine alone."""
    sessions = json.loads(environment.read_text(encoding="utf-8"))["sessions"]
    for session in sessions:
        session |= {
            "directory": "/home/user",
            "platform": "Linux",
            "processors": 2,
            "memory_bytes": 8 << 30,
            "git_commit": None,
        }
    text = json.dumps({"sessions": sessions}, indent=1) + "\n"
    environment.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
