"""A run directory of surefoot 0.1.0 is resumed, loaded, exported, verified and reported as one of
today.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import surefoot as sf
from forged import checkpoint as checkpoint_dir
from same_bits import assert_same_bits, newest_checkpoint
from surefoot.checkpoint.reader import read, read_bases

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from run_of_0_1_0 import STORED, Net, build, train

FILES = ("model", "ema", "optimizer")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / "run", tmp_path / "run"))


def stored_tensors(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    return {file: load_file(checkpoint / f"{file}.safetensors") for file in FILES}


@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_stored_checkpoints_are_read_with_every_tensor(step: int) -> None:
    path = checkpoint_dir(STORED / "run", step)

    checkpoint = read(path)

    assert json.loads((path / "manifest.json").read_text())["format_version"] == 5
    assert checkpoint.saved.planned_steps == 6
    for file, tensors in stored_tensors(path).items():
        assert_same_bits(checkpoint.tensors(file), tensors)


def test_a_run_of_0_1_0_changes_its_length_and_its_rate(run_dir: Path) -> None:
    sf.load(run_dir).change("older", **{"length": "9 steps", "optimizer.lr": 2**-6})
    run = build(run_dir)
    train(run)
    rates = [record["lr"] for record in sf.load(run_dir).records("train")]
    assert run.state.step == 9
    assert rates == [2**-5] * 4 + [2**-6] * 5


def test_a_resume_ends_in_the_bits_in_which_0_1_0_ended(run_dir: Path) -> None:
    train(build(run_dir))

    newest = newest_checkpoint(run_dir)
    assert newest.step == 6
    for file, tensors in stored_tensors(STORED / "step-00000006").items():
        assert_same_bits(newest.tensors(file), tensors)
    assert newest.saved.user_state == read(STORED / "step-00000006").saved.user_state
    # the frozen layer, where it was last written
    assert read_bases(checkpoint_dir(run_dir, 6)) == {4}
    assert [record["step"] for record in sf.load(run_dir).records("train")] == [1, 2, 3, 4, 5, 6]


def test_its_state_is_told(run_dir: Path) -> None:
    run = sf.load(run_dir)

    assert run.step == 4
    assert run.status == "stopped"
    assert run.checkpoints == [0, 2, 4]


@pytest.mark.parametrize(("weights", "file"), [("auto", "ema"), ("trained", "model")])
def test_its_weights_are_loaded_and_exported(
    weights: Literal["auto", "trained"], file: str, run_dir: Path, tmp_path: Path
) -> None:
    run = sf.load(run_dir)

    model = run.load_model(Net(), weights=weights).state_dict()
    export = run.export(tmp_path / file, weights=weights)

    exported = load_file(export.directory / "model.safetensors")
    for name, tensor in stored_tensors(checkpoint_dir(run_dir, 4))[file].items():
        assert torch.equal(model[name], tensor)
        assert torch.equal(exported[name], tensor)


def test_a_run_starts_from_its_weights(run_dir: Path) -> None:
    average = stored_tensors(checkpoint_dir(run_dir, 4))["ema"]

    started = build(None, init_from=str(run_dir), stop_after="1 step", best=None)

    with started:
        assert torch.equal(started.state.model.head.weight, average["head.weight"])


def test_it_is_reported_diagnosed_and_verified(run_dir: Path, tmp_path: Path) -> None:
    run = sf.load(run_dir)

    page = run.report(tmp_path / "page.html")
    errors = [finding.name for finding in run.diagnose() if finding.severity == "error"]
    verdict = sf.load(build(run_dir)).verify(say=None)

    assert page.stat().st_size > 10_000
    assert errors == ["train-validation-overlap"]
    assert verdict.exit_status == 0, str(verdict)
