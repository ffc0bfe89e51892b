"""The public API as README.md and docs/start/your-own-model.md show it, run to the letter. (about 3
s)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import surefoot as sf

ROOT = Path(__file__).parents[1]


class MyNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def images(samples: int, seed: int) -> TensorDataset:
    """Four kinds of noisy pictures that can be told apart."""
    kinds = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    noise = 0.5 * torch.randn(samples, 8, 8, generator=generator)
    return TensorDataset(kinds[labels] + noise, labels)


def blocks(page: str) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", (ROOT / page).read_text())


@pytest.mark.parametrize(
    ("page", "epochs", "steps", "least"),
    [
        ("README.md", 1, 21, 0.2),  # by guessing 0.1
        pytest.param("README.md", 30, 607, 0.97, marks=pytest.mark.slow),
        ("docs/start/your-own-model.md", 30, 71, 0.9),
    ],
)
def test_the_example_learns_and_finds_itself_finished_when_it_is_started_again(
    page: str,
    epochs: int,
    steps: int,
    least: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training, *afterwards = blocks(page)
    training = training.replace('"30 epochs"', f'"{epochs} epochs"')
    monkeypatch.chdir(tmp_path)
    held_out = images(200, 2)
    given = {"MyNet": MyNet, "my_dataset": images(1200, 1), "held_out": held_out}

    names: dict[str, Any] = dict(given)
    exec(training, names)
    accuracies = re.findall(r"(?m)^\d+ ([\d.]+)$", capsys.readouterr().out)
    assert len(accuracies) == epochs
    assert float(accuracies[-1]) > least
    assert (tmp_path / "runs" / "digits" / "metrics.jsonl").exists()

    exec(training, dict(given))
    words = " ".join(capsys.readouterr().out.split())
    assert f" is finished: all {steps:,} steps " in words

    for code in afterwards:
        exec(code, names)
    if afterwards:
        split = sf.Split(held_out, metrics=sf.metrics.accuracy)
        assert sf.evaluate(names["model"], split)["accuracy"] > 0.9
