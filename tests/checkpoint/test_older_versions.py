"""A run directory of surefoot 0.1.0 is resumed, loaded, exported, verified and reported as one of
today.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import surefoot as sf
from surefoot.checkpoint import Store
from surefoot.checkpoint.reader import read, read_bases

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from run_of_0_1_0 import STORED, Net, build, train

FILES = ("model", "ema", "optimizer")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / "run", tmp_path / "run"))


def of(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    return {file: load_file(checkpoint / f"{file}.safetensors") for file in FILES}


def test_the_stored_checkpoints_are_read_with_every_tensor() -> None:
    for step in (0, 2, 4):
        path = STORED / "run" / "checkpoints" / f"step-{step:08d}"
        assert json.loads((path / "manifest.json").read_text())["format_version"] == 5
        checkpoint = read(path)
        assert checkpoint.saved.planned_steps == 6
        for file, tensors in of(path).items():
            assert tensors.keys() == checkpoint.files[file].keys()
            assert all(
                torch.equal(checkpoint.tensors(file)[name], each) for name, each in tensors.items()
            )


def test_a_resume_ends_in_the_bits_in_which_0_1_0_ended(run_dir: Path) -> None:
    train(build(run_dir))
    newest, damaged = Store(run_dir / "checkpoints").newest_intact() or pytest.fail("no checkpoint")
    assert (newest.step, damaged) == (6, [])
    for file, tensors in of(STORED / "step-00000006").items():
        assert newest.files[file].keys() == tensors.keys()
        assert all(torch.equal(newest.tensors(file)[name], each) for name, each in tensors.items())
    assert newest.saved.user_state == read(STORED / "step-00000006").saved.user_state
    assert read_bases(run_dir / "checkpoints" / "step-00000006") == {
        4
    }  # the frozen layer, where it was last written
    assert [record["step"] for record in sf.load(run_dir).records("train")] == [1, 2, 3, 4, 5, 6]


def test_it_is_loaded_exported_verified_and_reported(run_dir: Path, tmp_path: Path) -> None:
    last = of(run_dir / "checkpoints" / "step-00000004")
    run = sf.load(run_dir)
    assert (run.step, run.status, run.checkpoints) == (4, "stopped", [0, 2, 4])
    for weights, file in (("auto", "ema"), ("trained", "model")):
        model = run.load_model(Net(), weights=weights).state_dict()
        exported = load_file(
            run.export(tmp_path / file, weights=weights).directory / "model.safetensors"
        )
        assert all(
            torch.equal(model[name], each) and torch.equal(exported[name], each)
            for name, each in last[file].items()
        )
    started = build(None, init_from=str(run_dir), stop_after="1 step", best=None)
    with started:
        assert torch.equal(started.state.model.head.weight, last["ema"]["head.weight"])
    assert run.report(tmp_path / "page.html").stat().st_size > 10_000
    assert [finding.name for finding in run.diagnose() if finding.severity == "error"] == [
        "train-validation-overlap"
    ]
    verdict = sf.load(build(run_dir)).verify(say=None)
    assert verdict.exit_status == 0, str(verdict)
