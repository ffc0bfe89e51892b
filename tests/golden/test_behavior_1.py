"""Runs that began with behavior 1 are resumed, verified and evaluated as they began. (8 s)

The run `own` has exact arithmetic, so its bits are compared. The recipes' arithmetic rounds
differently from machine to machine, by far less than any change of behavior.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import surefoot as sf
from run_files import same_tensors
from surefoot.checkpoint.reader import read
from surefoot.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))
from runs_of_behavior_1 import STEPS, STORED, build

FILES = ("model", "ema", "optimizer")
RECIPES = ("gpt", "images")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the runs and their inputs, in the working directory."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, named by their file too."""
    tensors = {}
    for file in FILES:
        for name, tensor in load_file(checkpoint / f"{file}.safetensors").items():
            tensors[f"{file}: {name}"] = tensor
    return tensors


def training_losses(file: Path) -> list[float]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def scores_at_step_4(run: sf.SavedRun) -> dict[str, Any]:
    """The scores that a run recorded when it began."""
    (record,) = [record for record in run.records("eval") if record["step"] == 4]
    return record


def test_the_stored_runs_do_not_name_a_behavior() -> None:
    for name in STEPS:
        assert "behavior" not in read(STORED / "ends" / name).saved.identity


def test_own_buffers_norms_and_averages_end_in_the_bits_of_behavior_1(here: Path) -> None:
    end = here / "own" / "checkpoints" / f"step-{STEPS['own']:08d}"
    expected_end = STORED / "ends" / "own"

    build(here / "own").train()

    assert same_tensors(tensors_of(end), tensors_of(expected_end))
    assert read(end).saved.identity == read(expected_end).saved.identity


def test_own_is_verified_as_it_began(here: Path) -> None:
    verdict = sf.load(build(here / "own")).verify(say=None)
    assert verdict.exit_status == 0, str(verdict)


def test_own_is_evaluated_as_it_began(here: Path) -> None:
    run = sf.load(build(here / "own"))
    assert run.evaluate(checkpoint=4)["val/loss"] == scores_at_step_4(run)["val/loss"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_ends_with_the_weights_and_losses_of_behavior_1(recipe: str, here: Path) -> None:
    steps = STEPS[recipe]
    expected_tensors = tensors_of(STORED / "ends" / recipe)
    expected_losses = training_losses(STORED / "ends" / f"{recipe}.jsonl")

    main(["resume", recipe, "--stop-after", f"{steps} steps"])

    tensors = tensors_of(here / recipe / "checkpoints" / f"step-{steps:08d}")
    assert tensors.keys() == expected_tensors.keys()
    for name, expected in expected_tensors.items():
        torch.testing.assert_close(tensors[name], expected, rtol=1e-3, atol=1e-5, msg=name)
    losses = training_losses(here / recipe / "metrics.jsonl")
    assert losses == pytest.approx(expected_losses, rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_evaluated_as_it_began(recipe: str, here: Path) -> None:
    run = sf.load(here / recipe)
    recorded = scores_at_step_4(run)

    scores = run.evaluate(checkpoint=4)

    common = [name for name in scores if isinstance(recorded.get(name), float)]
    assert "val/loss" in common
    for name in common:
        assert scores[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_verified_as_it_began(recipe: str, here: Path) -> None:
    verdict = sf.load(here / recipe).verify(say=None)
    assert verdict.exit_status == 0, str(verdict)
