"""Settings with several values over a run, as flags and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

import surefoot as sf
from surefoot.cli.main import _verb
from surefoot.tracking.change_journal import read_changes


def command(*words: str) -> None:
    _verb(list(words))


def test_a_ramp_of_a_flag_is_that_of_the_file_and_resumes(tmp_path: Path) -> None:
    ramps = ["--batch-size", "8, 16 from 50%", "--clip", "norm 1.0, off from 4 steps"]
    settings = ["--length", "12 steps", "--report", "False", "--tensorboard", "False"]
    flag = tmp_path / "flag"
    command("train", "images", *settings, *ramps, "--stop-after", "2 steps", "--run-dir", str(flag))
    assert [
        (change.setting, change.from_step, change.because) for change in read_changes(flag)
    ] == [
        ("clip", 4, "norm 1.0, off from 4 steps"),
        ("batch_size", 6, "8, 16 from 50%"),
    ]
    command("resume", str(flag))
    file = tmp_path / "file"
    text = 'batch_size = "8, 16 from 50%"\nclip = "norm 1.0, off from 4 steps"\n'
    (tmp_path / "settings.toml").write_text(text)
    command(
        "train",
        "images",
        *settings,
        "--config",
        str(tmp_path / "settings.toml"),
        "--run-dir",
        str(file),
    )
    losses = [[record["loss"] for record in sf.load(run).records("train")] for run in (flag, file)]
    assert losses[0][-1] == losses[1][-1]
    assert sf.load(file).step == 12


def test_a_plan_shows_the_steps_of_a_ramp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        "plan",
        "images",
        "--batch-size",
        "64, 128 from 20%",
        "--length",
        "6 epochs",
        "--run-dir",
        str(tmp_path / "run"),
    )
    printed = capsys.readouterr().out
    assert "from step 24 on: batch_size 64 -> 128" in printed
    assert "73 steps in all" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--batch-size", "8, from 50%"), "ramp-not-understood"),
        (("--batch-size", "8, 16 tokens from 50%"), "ramp-in-tokens"),
        (("--clip", "off, norm from 50%"), "clip-not-a-limit"),
    ],
)
def test_a_flag_that_is_no_ramp_is_refused(
    flags: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    with pytest.raises(sf.ConfigError) as refusal:
        command("train", "images", "--run-dir", str(tmp_path / "run"), *flags)
    assert refusal.value.code == code
    assert not (tmp_path / "run").exists()
