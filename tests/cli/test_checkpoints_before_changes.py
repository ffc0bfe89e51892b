"""Readers of a checkpoint from before a change use the settings that made it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import surefoot as sf
from surefoot.cli.main import main

PROGRAM = """
import torch, surefoot as sf

class Net(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(dropout))

    def forward(self, inputs):
        return self.layers(inputs)

def panels(model):
    title = f"dropout {model.layers[1].p}"
    return [sf.report.ConfusionMatrix(title=title, classes=("x",), counts=((4,),))]

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def build():
    data = torch.arange(8.0)[:, None], torch.arange(8.0)[:, None]
    return sf.Run(
        model=Net, model_settings={"dropout": 0.25}, loss=loss, train_data=data, batch_size=4,
        length="4 steps", optimizer=sf.optim.sgd(lr=0.001), splits={"all": sf.Split(data)},
        evaluate_every="2 steps", best="max all/loss", save_every="2 steps", keep_last=9,
        run_dir="runs/a", panels_fn=panels, console=False, report=False,
    )
"""
RUN = Path("runs/a")


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sf.SavedRun:
    """A run whose first 4 steps have no average and another dropout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    Path("program.py").write_text(PROGRAM)
    main(["train", "program.py:build"])
    saved = sf.load(RUN)
    saved.change(**{"length": "8 steps", "model.dropout": 0.5, "ema": 0.9})
    main(["resume", str(RUN)])
    return saved


def test_panels_are_those_of_the_settings_of_the_best_checkpoint(changed: sf.SavedRun) -> None:
    main(["evaluate", str(RUN), "--panels"])
    panels = changed.panels()
    assert panels is not None
    assert [panel.title for panel in panels.panels] == ["dropout 0.25"]


@pytest.mark.parametrize(("step", "dropout"), [(2, 0.25), (4, 0.25), (6, 0.5)])
def test_a_model_is_built_with_the_settings_of_its_checkpoint(
    step: int, dropout: float, changed: sf.SavedRun
) -> None:
    model = changed.load_model(checkpoint=step)
    assert model.layers[1].p == dropout  # type: ignore[union-attr, index]


@pytest.mark.parametrize(("step", "is_averaged"), [(4, False), (6, True)])
def test_an_export_takes_the_average_if_the_checkpoint_has_one(
    step: int, is_averaged: bool, changed: sf.SavedRun
) -> None:
    assert changed.export(checkpoint=step).averaged == is_averaged


def test_a_mean_of_checkpoints_before_and_after_a_change_says_so(
    changed: sf.SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    changed.change(length="16 steps", clip="norm 1.0")
    main(["resume", str(RUN)])
    capsys.readouterr()
    changed.evaluate(checkpoint="average 6")
    assert "clip, length changed" in capsys.readouterr().err
    changed.evaluate(checkpoint="average 4")
    assert "changed" not in capsys.readouterr().err
