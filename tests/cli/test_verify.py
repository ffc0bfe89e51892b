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
from stated import numbers_in
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
    main(
        [
            "train",
            str(place / "verified_program.py:build"),
            "--run-dir",
            str(place / "runs" / "mine"),
        ]
    )
    return place


@pytest.fixture
def place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a program, its data and its run `runs/mine`, as they were after training."""
    kept = trained.with_name("kept")
    shutil.copytree(trained, kept, dirs_exist_ok=True)
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield trained
    shutil.rmtree(trained)
    kept.rename(trained)


def left_with(*arguments: str) -> int:
    try:
        main(["verify", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_run_is_proved_and_what_that_costs_is_said_first(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_with("mine", "--all") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert numbers_in(first)[:3] == [12, 12, 1]
    assert [0, 12, 6, 4, 8, 12] in [numbers_in(line) for line in lines]
    assert lines[-1].startswith("runs/mine ")


def test_the_verdict_comes_as_json_and_nothing_else_does(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "verified_program.py").write_text(PROGRAM + 'print("said by the program")\n')
    assert (
        left_with("latest", "--steps", "4", "--windows", "2", "--json", "--run-changed-program")
        == 0
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["exit_status"], found["problems"], found["whole"]) == (0, [], False)
    assert [(window["start"], window["stop"], window["exact"]) for window in found["windows"]] == [
        (0, 4, True),
        (8, 12, True),
    ]
    assert any("verified_program.py" in line for line in found["not_proved"])


def test_windows_may_be_drawn(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = set()
    for seed in range(6):
        assert (
            left_with("mine", "--steps", "4", "--windows", "1", "--seed", str(seed), "--json") == 0
        )
        drawn |= {window["start"] for window in json.loads(capsys.readouterr().out)["windows"]}
    assert len(drawn) > 1


def test_a_changed_weight_leaves_with_8(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(held: Any) -> None:
        held["2.weight"][0, 3] += 0.5

    forged.tensors_changed(forged.checkpoint(place / "runs" / "mine", 8), edit)
    assert left_with("mine", "--all") == 8
    said = capsys.readouterr().out
    assert "WRONG\n  step-00000008: model.safetensors, 2.weight[0, 3] " in said
    assert numbers_in(said.splitlines()[-1]) == [1]


def test_a_flipped_byte_leaves_with_4(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = forged.checkpoint(place / "runs" / "mine", 12) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert left_with("mine", "--windows", "0") == 4
    _, _, wrong = capsys.readouterr().out.partition("WRONG\n")
    assert "step-00000012" in wrong.splitlines()[0]
    assert "model.safetensors" in wrong.splitlines()[0]


def test_exchanged_data_leave_with_3_before_a_step_is_made(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = np.load(place / "data.npy")
    data[7, 2] += 1
    np.save(place / "data.npy", data)
    assert left_with("mine", "--all") == 3
    said = capsys.readouterr().out
    assert "WRONG\n  training data: data.sha256 was '" in said
    assert said.startswith("proved\n")  # not with the steps to repeat
    (place / "data.npy").unlink()
    with pytest.raises(FileNotFoundError):
        main(["verify", "mine"])
    said = capsys.readouterr().err
    assert [0, 4, 8, 12] in [numbers_in(line)[:4] for line in said.splitlines()]


@pytest.mark.parametrize("flags", [["--step", "4"], ["--bogus"], ["--run-dri", "a", "--all"]])
@pytest.mark.parametrize("kind", ["program", "script"])
def test_an_unknown_flag_is_refused_before_any_work(
    kind: str, flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "mine"
    if kind == "script":
        (run / "config.toml").write_text('[program]\nkind = "script"\ncommand = ["train.py"]\n')
    assert left_with(str(run), *flags) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "[setting-unknown]" in said.err


def test_of_a_run_that_a_script_has_made_files_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_runs.build(tmp_path / "a", length="2 steps").train()
    assert left_with(str(tmp_path / "a")) == 0
    said = capsys.readouterr().out
    assert "print(sf.load(run).verify())" in said.partition("not proved\n")[2]
    assert said.splitlines()[-1].startswith(str(tmp_path / "a"))


def test_a_run_whose_program_is_gone_has_its_files_checked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "verified_program.py").unlink()
    assert left_with("mine") == 2
    said = capsys.readouterr().err
    assert "verified_program.py" in said
    assert [0, 4, 8, 12] in [numbers_in(line)[:4] for line in said.splitlines()]
    assert "[program-missing]" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--all", "--steps", "3"], "[option-excluded]"),
        (["--steps", "0"], "[setting-out-of-range]"),
        (["--tolerance", "-1"], "[setting-out-of-range]"),
        (["--nproc", "2"], "[one-process-only]"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    place: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_with("mine", *flags) == 2
    assert said in capsys.readouterr().err


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
