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


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    return {
        f"{file}: {name}": tensor
        for file in FILES
        for name, tensor in load_file(checkpoint / f"{file}.safetensors").items()
    }


def records(file: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_the_stored_runs_do_not_name_a_behavior() -> None:
    for name in STEPS:
        assert "behavior" not in read(STORED / "ends" / name).saved.identity


def test_own_buffers_norms_and_averages_end_in_the_bits_of_behavior_1(here: Path) -> None:
    build(here / "own").train()
    end = here / "own" / "checkpoints" / f"step-{STEPS['own']:08d}"
    expected = tensors(STORED / "ends" / "own")
    resumed = tensors(end)
    assert resumed.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(resumed[name], expected[name])] == []
    assert read(end).saved.identity == read(STORED / "ends" / "own").saved.identity


def test_own_is_verified_and_evaluated_as_it_began(here: Path) -> None:
    saved = sf.load(build(here / "own"))
    verdict = saved.verify(say=None)
    assert verdict.exit_status == 0, str(verdict)
    (recorded,) = [each for each in saved.records("eval") if each["step"] == 4]
    assert saved.evaluate(checkpoint=4)["val/loss"] == recorded["val/loss"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_ends_with_the_weights_and_losses_of_behavior_1(recipe: str, here: Path) -> None:
    steps = STEPS[recipe]
    main(["resume", recipe, "--stop-after", f"{steps} steps"])
    expected = tensors(STORED / "ends" / recipe)
    resumed = tensors(here / recipe / "checkpoints" / f"step-{steps:08d}")
    assert resumed.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    losses, expected_losses = (
        [each["loss"] for each in records(file, "train")]
        for file in (here / recipe / "metrics.jsonl", STORED / "ends" / f"{recipe}.jsonl")
    )
    assert losses == pytest.approx(expected_losses, rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_evaluated_and_verified_as_it_began(recipe: str, here: Path) -> None:
    saved = sf.load(here / recipe)
    (recorded,) = [each for each in saved.records("eval") if each["step"] == 4]
    scores = saved.evaluate(checkpoint=4)
    for name, value in scores.items():
        if isinstance(recorded.get(name), float):
            assert value == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name
    verdict = saved.verify(say=None)
    assert verdict.exit_status == 0, str(verdict)
