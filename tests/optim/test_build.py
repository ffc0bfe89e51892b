"""Optimizers are made without torch's compiler, and are what they would be with it. (3 s, most of
them a fresh interpreter)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from surefoot.optim.build import without_compiler

RUNS = """
import sys
from pathlib import Path
import torch, torch.nn.functional as F, surefoot as sf

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))

def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

data = torch.randn(16, 4), torch.randn(16, 8)

def train(name, optimizer, length):
    sf.Run(
        model=build,
        loss=loss,
        train_data=data,
        batch_size=4,
        length=length,
        optimizer=optimizer,
        run_dir=Path(sys.argv[1]) / name,
        splits={"val": sf.Split(data)},
        console=False,
        report=False,
    ).train()

train("adamw", sf.optim.adamw(lr=1e-2), "2 steps")
train("adamw", sf.optim.adamw(lr=1e-2), "4 steps")
train("muon", sf.optim.muon(lr=1e-2, adamw_modules=("0",)), "2 steps")
train("muon", sf.optim.muon(lr=1e-2, adamw_modules=("0",)), "4 steps")
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RUNS, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert ended.stdout == "False\n"
    assert ended.stderr == ""


def test_groups_are_those_that_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.5},
        {"params": [torch.nn.Parameter(torch.ones(3))]},
    ]
    usual = torch.optim.AdamW([dict(group) for group in groups], lr=0.1)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with without_compiler():
        assert Optimizer.add_param_group.__qualname__ == "Optimizer.add_param_group"
        assert not hasattr(Optimizer.add_param_group, "__wrapped__")
        optimizer = torch.optim.AdamW([dict(group) for group in groups], lr=0.1)
    assert optimizer.param_groups == usual.param_groups


def test_torch_is_as_it_was_when_the_block_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)  # imports the compiler
    before = Optimizer.add_param_group

    with without_compiler():
        assert Optimizer.add_param_group is before
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with pytest.raises(ValueError, match="empty parameter list"), without_compiler():
        torch.optim.SGD([], lr=0.1)
    assert Optimizer.add_param_group is before
