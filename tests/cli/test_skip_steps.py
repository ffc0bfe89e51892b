"""`surefoot resume RUN --skip-steps A..B`, and `surefoot change RUN skip_steps=A..B`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.cli.main import _verb
from surefoot.tools.change.change import plan_changes
from surefoot.tracking.change_journal import read_changes
from surefoot.train.changed_settings import Wish

LAST = 12
STOPPED = 8


def command(*words: str) -> None:
    _verb(list(words))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    flags = {
        "--length": f"{LAST} steps",
        "--stop-after": f"{STOPPED} steps",
        "--batch-size": "8",
        "--log-every": "1 steps",
        "--save-every": "2 steps",
        "--report": "False",
        "--tensorboard": "False",
        "--run-dir": str(run),
    }
    command("train", "images", *[word for flag in flags.items() for word in flag])
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def lines(run: Path) -> list[tuple[int, str | None, str]]:
    changes = [change for change in read_changes(run) if change.setting == "skip_steps"]
    return [(change.from_step, change.now, change.because) for change in changes]


def steps(run: Path) -> list[int]:
    return [record["step"] for record in sf.load(run).records("train")]


def test_resume_skips_steps_on_record(run: Path) -> None:
    command("resume", str(run), "--skip-steps", "10..11", "--because", "a damaged shard")
    assert lines(run) == [(9, "10..11", "a damaged shard"), (11, None, "a damaged shard")]
    assert steps(run) == [*range(1, 10), 12]


def test_steps_that_are_completed_are_skipped_after_going_back(run: Path) -> None:
    with refused("skipped-steps-completed", step=STOPPED) as refusal:
        command("resume", str(run), "--skip-steps", "6..7")
    assert "--from-step 5 --skip-steps 6..7" in str(refusal.value)
    assert lines(run) == []
    command("resume", str(run), "--from-step", "5", "--skip-steps", "6..7", "--because", "bad")
    assert lines(run) == [(5, "6..7", "bad"), (7, None, "bad")]
    assert steps(run) == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("words", [("change",), ("resume",)])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("10", "setting-out-of-range"),
        ("10-11", "setting-out-of-range"),
        ("11..10", "setting-out-of-range"),
        ("0..1", "setting-out-of-range"),
        ("10..11,", "setting-out-of-range"),
        ("ten..11", "setting-out-of-range"),
        ("10..11, 3..4", "skipped-steps-completed"),
        ("8..9", "skipped-steps-completed"),
        ("10..12", "skipped-steps-beyond-length"),
        ("13..14", "skipped-steps-after-end"),
    ],
)
def test_a_range_that_cannot_be_skipped_is_refused_and_nothing_written(
    value: str, code: str, words: tuple[str], run: Path
) -> None:
    with refused(code, setting="skip_steps"):
        if words == ("change",):
            command("change", str(run), f"skip_steps={value}")
        else:
            command("resume", str(run), "--skip-steps", value)
    assert read_changes(run) == ()
    assert sf.load(run).step == STOPPED


def test_a_range_that_the_journal_has_is_not_added_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("change", str(run), "skip_steps=10..11")
    journal = read_changes(run)
    for value in ("10..11", "10..10", "11..11", "10..11, 10..10"):
        command("change", str(run), f"skip_steps={value}")
        assert read_changes(run) == journal
    capsys.readouterr()
    for _ in range(2):  # as a queue repeats it
        command("resume", str(run), "--skip-steps", "10..11", "--stop-after", "11 steps")
    assert read_changes(run) == journal
    command("resume", str(run), "--skip-steps", "10..11")
    assert read_changes(run) == journal
    assert steps(run) == [*range(1, 10), 12]


@pytest.mark.parametrize("word", ["none", "None", "off", "null"])
def test_none_ends_all_ranges_that_are_to_come(word: str, run: Path) -> None:
    command("change", str(run), "skip_steps=9..9, 11..11")
    command("resume", str(run), "--skip-steps", word)
    assert steps(run) == [*range(1, LAST + 1)]
    command("change", str(run), "length=14 steps")
    journal = read_changes(run)
    command("change", str(run), f"skip_steps={word}")
    assert read_changes(run) == journal


def test_a_dry_run_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("change", str(run), "skip_steps=10..11", "--dry-run")
    assert "steps 10..11 are skipped" in capsys.readouterr().out
    assert read_changes(run) == ()


def test_a_command_that_goes_back_and_skips_steps_may_be_repeated(run: Path) -> None:
    words = ["resume", str(run), "--from-step", "5", "--skip-steps", "7..8"]
    command(*words, "--stop-after", "6 steps")
    journal = read_changes(run)
    command(*words, "--stop-after", "10 steps")
    command(*words)
    assert read_changes(run) == journal
    assert steps(run) == [*range(1, 7), *range(9, LAST + 1)]


def test_a_command_with_another_range_goes_back_once_more(run: Path) -> None:
    words = ["resume", str(run), "--from-step", "5", "--stop-after", "6 steps"]
    command(*words, "--skip-steps", "7..8")
    command(*words, "--skip-steps", "7..9")
    backs = [change for change in read_changes(run) if change.goes_back]
    assert [back.from_step for back in backs] == [5, 5]
    command("resume", str(run))
    assert steps(run) == [*range(1, 7), *range(10, LAST + 1)]


def test_a_range_waits_for_no_epoch(run: Path) -> None:
    plan = plan_changes(run, [Wish("skip_steps", "10..11", "")])
    assert not any(line.startswith("skip_steps changes") for line in plan.lines)
