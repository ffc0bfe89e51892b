"""log.txt: what the console says and every record, as plain lines beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.tracking.format import number

STEPS = 6


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    inputs = torch.linspace(-1, 1, 16).reshape(8, 2)
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "train_data": (inputs, inputs.sum(1, keepdim=True)),
        "splits": {"val": sf.Split((inputs, inputs.sum(1, keepdim=True)))},
        "sample_fn": lambda model: f"weights {model.weight.numel()}",
        "batch_size": 4,
        "length": f"{STEPS} steps",
        "evaluate_every": "3 steps",
        "log_every": "2 steps",
        "optimizer": sf.optim.sgd(lr=0.01),
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "text_log": True,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "log.txt").read_text().splitlines()


@pytest.mark.parametrize("console", [False, True])
def test_it_has_every_record_and_message(
    tmp_path: Path, console: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "a", console=console).train()

    text = lines(tmp_path / "a")

    for record in sf.load(tmp_path / "a").records():
        of_step = [line for line in text if f"step={record['step']}/{STEPS}" in line]
        if record["kind"] == "train":
            assert any(f"train/loss={number(record['loss'])}" in line for line in of_step)
        if record["kind"] == "eval":
            assert any(f"val/loss={number(record['val/loss'])}" in line for line in of_step)
    assert "weights 2" in text
    assert any(line.startswith("model      Linear") for line in text)  # the header
    assert any(f"finished: {STEPS} steps" in line for line in text)
    assert not any("\x1b" in line for line in text)
    is_printed = capsys.readouterr().out != ""
    assert is_printed == console


def test_a_resume_goes_on_with_it(tmp_path: Path) -> None:
    build(tmp_path / "a", stop_after="4 steps").train()
    first_lines = lines(tmp_path / "a")
    build(tmp_path / "a").train()
    all_lines = lines(tmp_path / "a")
    count = len(first_lines)
    assert all_lines[:count] == first_lines
    assert any(f"step={STEPS}/{STEPS}" in line for line in all_lines[count:])


def test_no_run_writes_it_unless_it_is_asked_for(tmp_path: Path) -> None:
    build(tmp_path / "a", text_log=False).train()
    assert not (tmp_path / "a" / "log.txt").exists()


def test_a_file_of_somebody_else_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("theirs")
    with refused("directory-has-other-files", setting="run_dir", files=["log.txt"]):
        build(tmp_path).train()
    assert (tmp_path / "log.txt").read_text() == "theirs"
    build(tmp_path, text_log=False).train()  # such as the output of the command itself
    assert (tmp_path / "log.txt").read_text() == "theirs"


def test_a_file_of_the_recipe_in_its_place_is_refused(tmp_path: Path) -> None:
    with refused("extra-file-name", value="log.txt"):
        build(tmp_path / "a", extra_files={"log.txt": "of the recipe"})


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "a", stop_after="2 steps").train()
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "a" / "log.txt").unlink()
    (tmp_path / "a" / "log.txt").symlink_to(tmp_path / "theirs")
    with refused("run-directory-with-strange-file"):
        build(tmp_path / "a").train()
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_without_a_directory_it_is_refused() -> None:
    with refused("text-log-without-directory", setting="text_log", value=True):
        build(None)
