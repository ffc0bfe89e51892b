"""`surefoot resume RUN --from-step N`, and how other commands see a run that went back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.cli.main import _verb
from surefoot.config.setting_change import in_effect
from surefoot.tools.report.run_charts import charts
from surefoot.tools.report.series import read_reported_run
from surefoot.tracking.change_journal import read_changes

LAST = 12


def command(*words: str) -> None:
    _verb(list(words))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has changed its rate at step 4, and was stopped at step 9."""
    run = tmp_path_factory.mktemp("runs") / "digits"
    command(
        "train",
        "images",
        "--length",
        f"{LAST} steps",
        "--stop-after",
        "4 steps",
        "--batch-size",
        "8",
        "--log-every",
        "1 steps",
        "--save-every",
        "2 steps",
        "--report",
        "False",
        "--tensorboard",
        "False",
        "--run-dir",
        str(run),
    )
    command("resume", str(run), "--change", "optimizer.lr=0.5", "--stop-after", "9 steps")
    return run


@pytest.fixture
def run(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left, tmp_path / "run"))


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in sf.load(run).records("train")]


def test_a_run_goes_back_and_on_otherwise(run: Path) -> None:
    before = losses(run)
    command(
        "resume",
        str(run),
        "--from-step",
        "4",
        "--change",
        "optimizer.lr=1e-4",
        "--because",
        "it spikes",
        "--length",
        "14 steps",
    )
    changes = in_effect(read_changes(run))
    assert [(change.setting, change.from_step) for change in changes] == [
        ("step", 4),
        ("optimizer.lr", 4),
        ("length", 4),
    ]
    assert {change.because for change in changes} == {"it spikes"}
    records = list(sf.load(run).records("train"))
    assert [record["step"] for record in records] == list(range(1, 15))
    assert losses(run)[:4] == before[:4]
    assert losses(run)[4:9] != before[4:]
    assert all(record["lr"] <= 1e-4 for record in records[4:])


def test_a_run_goes_back_to_a_step_between_checkpoints(run: Path) -> None:
    command("resume", str(run), "--from-step", "7", "--change", "clip=off")
    assert sf.load(run).settings_at(6)["clip"] != "off"
    assert sf.load(run).settings_at(7)["clip"] == "off"
    assert sf.load(run).settings_at(7)["optimizer.lr"] == 0.5
    assert 7 in sf.load(run).checkpoints


def test_a_change_after_going_back_holds_from_the_step_to_which_the_run_went(run: Path) -> None:
    sf.load(run).go_back(7)
    command("change", str(run), "clip=off")
    assert read_changes(run)[-1].from_step == 7
    command("resume", str(run))
    assert sf.load(run).step == LAST


def test_the_command_may_be_repeated(run: Path) -> None:
    words = ["resume", str(run), "--from-step", "4", "--change", "optimizer.lr=1e-4"]
    command(*words, "--stop-after", "6 steps")
    lines = read_changes(run)
    command(*words)
    assert read_changes(run) == lines
    assert sf.load(run).step == LAST


def test_a_command_for_the_step_at_which_the_run_stands_may_be_repeated(run: Path) -> None:
    words = ["resume", str(run), "--from-step", "9", "--because", "look again"]
    command(*words, "--stop-after", "11 steps")
    lines = read_changes(run)
    command(*words, "--stop-after", "11 steps")
    assert read_changes(run) == lines
    assert sf.load(run).checkpoints[-1] == 11


def test_another_change_at_the_step_goes_back_once_more(run: Path) -> None:
    words = ["resume", str(run), "--from-step", "4"]
    command(*words, "--change", "optimizer.lr=1e-4", "--stop-after", "6 steps")
    command(*words, "--change", "optimizer.lr=1e-3", "--stop-after", "6 steps")
    assert [change.now for change in in_effect(read_changes(run))] == [4, 1e-3]


def test_a_finished_run_goes_back(run: Path) -> None:
    command("resume", str(run))
    command("resume", str(run), "--from-step", "9", "--change", "clip=off")
    assert sf.load(run).step == LAST
    assert sf.load(run).status == "finished"


@pytest.mark.parametrize("step", [9, 4, 0])
def test_a_finished_run_that_went_back_is_stopped_at_its_checkpoint(step: int, run: Path) -> None:
    command("resume", str(run))
    saved = sf.load(run)
    saved.go_back(step)
    assert (saved.step, saved.status) == (saved.checkpoints[-1], "stopped")
    assert saved.step <= step
    command("resume", str(run), "--stop-after", f"{step + 1} steps")
    assert (saved.step, saved.status) == (step + 1, "stopped")
    command("resume", str(run))
    assert (saved.step, saved.status) == (LAST, "finished")


def test_a_run_that_goes_back_twice_is_stopped_at_its_checkpoint(run: Path) -> None:
    command("resume", str(run))
    saved = sf.load(run)
    saved.go_back(9, "no good")
    saved.go_back(9, "no good either")  # which leaves no checkpoint
    assert (saved.step, saved.status) == (saved.checkpoints[-1], "stopped")


def test_a_kill_before_the_branch_is_left_does_not_hide_that_the_run_went_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("resume", str(run))
    monkeypatch.setattr("surefoot.tools.change.go_back.leave_branches", lambda run: None)
    sf.load(run).go_back(4)
    assert (sf.load(run).step, sf.load(run).status) == (4, "stopped")


def test_a_run_that_went_back_is_changed_resumed_replayed_and_verified(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sf.load(run).go_back(4, "no good")
    command("change", str(run), "optimizer.lr=1e-4")
    assert [change.setting for change in in_effect(read_changes(run))] == ["step", "optimizer.lr"]
    command("resume", str(run))
    capsys.readouterr()
    command("verify", str(run), "--json")
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["problems"] == []
    for step in (3, 6):
        logged = sf.load(run).replay(step).logged
        assert logged is not None
        assert logged.equal


def test_a_going_back_without_a_change_supersedes_what_holds_from_there(run: Path) -> None:
    command("resume", str(run), "--from-step", "4")
    saved = sf.load(run)
    assert saved.settings_at(11) == saved.settings_at(0)


def test_a_step_that_is_still_to_come_is_refused(run: Path) -> None:
    with refused("from-step-ahead", value=10, step=9):
        command("resume", str(run), "--from-step", "10")
    assert len(read_changes(run)) == 1


def test_the_newest_step_takes_back_a_change_that_no_step_had(run: Path) -> None:
    command("change", str(run), "clip=off")
    command("resume", str(run), "--from-step", "9")
    assert sf.load(run).settings_at(9)["clip"] != "off"
    assert sf.load(run).step == LAST


def test_the_page_draws_what_was_left_in_grey(run: Path) -> None:
    before = sf.load(run).records("train")
    command("resume", str(run), "--from-step", "4", "--change", "optimizer.lr=1e-4")
    reported = read_reported_run(run)
    loss = next(chart for chart in charts(reported) if chart.name == "loss")
    (grey,) = [line for line in loss.lines if line.name.startswith("loss, left")]
    assert grey.points == tuple(
        (float(record["step"]), record["loss"]) for record in before if record["step"] > 4
    )
    assert grey.faint
    assert [line.name for line in loss.lines if line.series == grey.series and line.named] == [
        grey.name
    ]
    (training,) = [line for line in loss.lines if line.name == "training"]
    assert training.points == tuple(
        (float(record["step"]), record["loss"]) for record in sf.load(run).records("train")
    )
    marks = [mark.title for mark in loss.marks if mark.x == 4]
    assert any("back from step 9" in title for title in marks)


def test_change_goes_back_without_training(run: Path) -> None:
    command("change", str(run), "--from-step", "4", "optimizer.lr=1e-4", "--dry-run")
    before = read_changes(run)
    assert not any(change.goes_back for change in before)

    command("change", str(run), "--from-step", "4", "optimizer.lr=1e-4", "--because", "it spikes")
    lines = read_changes(run)[len(before) :]
    assert [(line.setting, line.from_step, line.because) for line in lines] == [
        ("step", 4, "it spikes"),
        ("optimizer.lr", 4, "it spikes"),
    ]
    assert sf.load(run).settings_at(4)["optimizer.lr"] == 1e-4

    command("resume", str(run))
    assert sf.load(run).step == LAST
