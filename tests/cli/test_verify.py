"""`surefoot verify` as it is typed: what it prints, what it leaves with, and data that were
exchanged; 3 s.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged
import small_runs
from stated import numbers_by_line, numbers_in
from surefoot.cli.main import main
from surefoot.cli.verify import progress
from surefoot.program import status_line

PROGRAM = """
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import surefoot as sf

HERE = Path(__file__).parent

@dataclass(frozen=True)
class Config:
    run_dir: str = "runs/mine"

def build(config: Config) -> sf.Run:
    data = torch.from_numpy(np.load(HERE / "data.npy"))
    return sf.Run(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        train_data=(data[:, :4], data[:, 4:]), batch_size=6, length="12 steps", optimizer=sf.optim.adamw(lr=0.01),
        save_every="4 steps", log_every="2 steps", keep_last=9, run_dir=config.run_dir, console=False,
    )
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("program")
    (place / "verified_program.py").write_text(PROGRAM)
    np.save(place / "data.npy", np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32))
    program = str(place / "verified_program.py:build")
    main(["train", program, "--run-dir", str(place / "runs" / "mine")])
    return place


@pytest.fixture
def place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a program, its data and its run `runs/mine`, as they were after training."""
    copy = trained.with_name("copy")
    shutil.copytree(trained, copy, dirs_exist_ok=True)
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield trained
    shutil.rmtree(trained)
    copy.rename(trained)


def exit_status(*arguments: str) -> int:
    try:
        main(["verify", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_run_is_proved_and_what_that_costs_is_said_first(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("mine", "--all") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert numbers_in(first)[:3] == [12, 12, 1]
    assert [0, 12, 6, 4, 8, 12] in [numbers_in(line) for line in lines]
    assert lines[-1].startswith("runs/mine ")


def test_the_verdict_comes_as_json_and_nothing_else_does(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "verified_program.py").write_text(PROGRAM + 'print("said by the program")\n')
    flags = ["--steps=4", "--windows=2", "--json", "--run-changed-program"]
    assert exit_status("latest", *flags) == 0
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert verdict["exit_status"] == 0
    assert verdict["problems"] == []
    assert not verdict["whole"]
    windows = [(window["start"], window["stop"], window["exact"]) for window in verdict["windows"]]
    assert windows == [(0, 4, True), (8, 12, True)]
    assert any("verified_program.py" in line for line in verdict["not_proved"])


def test_windows_may_be_drawn(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = set()
    for seed in range(6):
        assert exit_status("mine", "--steps=4", "--windows=1", f"--seed={seed}", "--json") == 0
        (window,) = json.loads(capsys.readouterr().out)["windows"]
        starts.add(window["start"])
    assert len(starts) > 1


def test_a_changed_weight_leaves_with_8(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(tensors: Any) -> None:
        tensors["2.weight"][0, 3] += 0.5

    forged.tensors_changed(forged.checkpoint(place / "runs" / "mine", 8), edit)
    assert exit_status("mine", "--all") == 8
    output = capsys.readouterr().out
    assert "WRONG\n  step-00000008: model.safetensors, 2.weight[0, 3] " in output
    *_, last_line = output.splitlines()
    assert numbers_in(last_line) == [1]


def test_a_flipped_byte_leaves_with_4(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = forged.checkpoint(place / "runs" / "mine", 12) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert exit_status("mine", "--windows", "0") == 4
    _, _, wrong = capsys.readouterr().out.partition("WRONG\n")
    first_line, *_ = wrong.splitlines()
    assert "step-00000012" in first_line
    assert "model.safetensors" in first_line


def test_exchanged_data_leave_with_3_before_a_step_is_made(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = np.load(place / "data.npy")
    data[7, 2] += 1
    np.save(place / "data.npy", data)
    assert exit_status("mine", "--all") == 3
    output = capsys.readouterr().out
    assert "WRONG\n  training data: data.sha256 was '" in output
    assert output.startswith("proved\n")  # not with the steps to repeat


def first_four_numbers(text: str) -> list[list[float]]:
    return [numbers[:4] for numbers in numbers_by_line(text)]


def test_checkpoints_are_checked_before_an_error_of_data_that_are_gone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "data.npy").unlink()
    with pytest.raises(FileNotFoundError):
        main(["verify", "mine"])
    assert [0, 4, 8, 12] in first_four_numbers(capsys.readouterr().err)


@pytest.mark.parametrize("flags", [["--step", "4"], ["--bogus"], ["--run-dri", "a", "--all"]])
@pytest.mark.parametrize("kind", ["program", "script"])
def test_an_unknown_flag_is_refused_before_any_work(
    kind: str, flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "mine"
    if kind == "script":
        (run / "config.toml").write_text('[program]\nkind = "script"\ncommand = ["train.py"]\n')
    assert exit_status(str(run), *flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "[setting-unknown]" in printed.err


def test_of_a_run_that_a_script_has_made_files_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_runs.build(tmp_path / "a", length="2 steps").train()
    assert exit_status(str(tmp_path / "a")) == 0
    output = capsys.readouterr().out
    _, _, not_proved = output.partition("not proved\n")
    assert "print(sf.load(run).verify())" in not_proved
    assert output.splitlines()[-1].startswith(str(tmp_path / "a"))


def test_a_run_whose_program_is_gone_has_its_files_checked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "verified_program.py").unlink()
    assert exit_status("mine") == 2
    message = capsys.readouterr().err
    assert "verified_program.py" in message
    assert [0, 4, 8, 12] in first_four_numbers(message)
    assert "[program-missing]" in message


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--all", "--steps", "3"], "[option-excluded]"),
        (["--steps", "0"], "[setting-out-of-range]"),
        (["--tolerance", "-1"], "[setting-out-of-range]"),
        (["--nproc", "2"], "[one-process-only]"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    place: Path, flags: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("mine", *flags) == 2
    assert code in capsys.readouterr().err


def test_a_terminal_sees_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ticks = iter([0.0, 10.0, 10.1])
    with status_line() as show:
        watch = progress(show, now=lambda: next(ticks))
        watch(50, 200)
        watch(51, 200)  # too soon after the other
    _, shown, cleared = capsys.readouterr().err.split("\r\x1b[2K")
    assert numbers_in(shown.replace("30s", "30")) == [50, 200, 30]
    assert cleared == ""
