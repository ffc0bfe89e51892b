"""`surefoot change`, and `surefoot resume --change`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import surefoot as sf
from identities.changed_runs import run_in
from refused import refused
from surefoot.cli.main import _verb
from surefoot.config.setting_change import SettingChange
from surefoot.errors import Command
from surefoot.tracking.change_journal import append_changes, read_changes


def command(*words: str) -> None:
    _verb(list(words))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    command("train", "images", "--length", "12 steps", "--stop-after", "4 steps", "--batch-size", "8",
            "--log-every", "1 steps", "--report", "False", "--tensorboard", "False", "--run-dir", str(run))  # fmt: skip
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_a_change_is_a_line_with_its_reason_and_holds_from_the_newest_checkpoint(run: Path) -> None:
    command("change", str(run), "optimizer.lr=1e-4", "--because", "a = b", "clip=off")
    changes = read_changes(run)
    assert [(change.setting, change.now) for change in changes] == [
        ("optimizer.lr", 1e-4),
        ("clip", "off"),
    ]
    assert {change.from_step for change in changes} == {4}
    assert {change.because for change in changes} == {"a = b"}


def test_a_dry_run_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("change", str(run), "length=20 steps", "--dry-run")
    assert read_changes(run) == ()
    printed = capsys.readouterr().out
    assert "12 -> 20 steps" in printed
    assert "16 steps with 128 samples" in printed


def test_samples_left_are_those_of_each_batch_size_that_is_to_come(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_changes(run, [SettingChange(0, 9, "batch_size", 8, 16)])
    command("change", str(run), "optimizer.lr=1e-4", "--dry-run")
    assert "8 steps with 88 samples" in capsys.readouterr().out  # 5 of 8, 3 of 16


def test_the_value_that_holds_is_no_change(run: Path) -> None:
    command("change", str(run), "batch_size=8")
    assert read_changes(run) == ()


def test_resume_changes_and_goes_on(run: Path) -> None:
    command("resume", str(run), "--change", "optimizer.lr=1e-4", "--change", "clip=off", "--because",
            "it spikes", "--length", "14 steps")  # fmt: skip
    saved = sf.load(run)
    assert saved.step == 14
    assert [change.setting for change in read_changes(run)] == ["optimizer.lr", "clip", "length"]
    records = list(saved.records("train"))
    assert len(records) == 14
    assert all(record["lr"] <= 1e-4 for record in records[4:])
    assert "12 steps" in (run / "config.toml").read_text()


def test_a_change_at_a_resume_that_is_there_already_is_not_made_again(run: Path) -> None:
    command("resume", str(run), "--change", "clip=off", "--stop-after", "6 steps")
    command("resume", str(run), "--change", "clip=off", "--stop-after", "8 steps")
    assert len(read_changes(run)) == 1


@pytest.mark.parametrize(
    ("assignment", "code"),
    [
        ("optimizer.lrr=1", "setting-cannot-change"),
        ("seed=1", "setting-cannot-change"),
        ("model.width=3", "setting-cannot-change"),
        ("optimizer.lr=-1", "setting-out-of-range"),
        ("batch_size=0", "setting-out-of-range"),
        ("clip=loose", "clip-not-a-limit"),
        ("length=3", "duration-without-unit"),
        ("length=3 steps", "length-already-passed"),
        ("schedule.name=cosin", "schedule-unknown"),
        ("schedule.cooldown=10%", "schedule-setting-foreign"),
        ("ema=2", "setting-out-of-range"),
        ("micro_batch_size=3", "micro-batch-size-not-divisor"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    assignment: str, code: str, run: Path
) -> None:
    with pytest.raises(sf.ConfigError) as refusal:
        command("change", str(run), assignment)
    assert refusal.value.code == code
    assert read_changes(run) == ()


def test_a_finished_run_takes_a_change_only_with_a_longer_length(run: Path) -> None:
    command("resume", str(run))
    with refused("change-of-finished-run", step=12):
        command("change", str(run), "clip=off")
    command("change", str(run), "clip=off", "length=16 steps")
    command("resume", str(run))
    assert sf.load(run).step == 16


def test_a_change_without_an_assignment_is_refused(run: Path) -> None:
    with refused("change-without-setting"):
        command("change", str(run))


def test_a_run_that_trains_is_not_changed_by_a_resume(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.tools.change.change.is_running", lambda run: True)
    with refused("change-of-training-run"):
        command("resume", str(run), "--change", "clip=off")


def test_a_run_that_begins_with_a_journal_ends_as_the_one_that_was_changed(
    run: Path, tmp_path: Path
) -> None:
    command("resume", str(run), "--change", "optimizer.lr=1e-4", "--change", "batch_size=16")
    given = tmp_path / "given"
    begin = ["train", "images", "--config", str(run / "config.toml"), "--run-dir", str(given)]
    command(*begin, "--stop-after", "2 steps", "--changes", str(run / "changes.jsonl"))
    command(*begin, "--changes", str(run / "changes.jsonl"))
    assert [record["loss"] for record in sf.load(given).records("train")] == [
        record["loss"] for record in sf.load(run).records("train")
    ]
    assert read_changes(given) == read_changes(run)


def test_a_journal_is_for_a_run_that_has_not_begun(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    append_changes(other, [SettingChange(0, 9, "clip", "norm 1.0", "off")])
    begin = ["train", "images", "--config", str(run / "config.toml"), "--run-dir", str(run)]
    with refused("journal-of-begun-run"):
        command(*begin, "--changes", str(other / "changes.jsonl"))
    with refused("path-not-usable"):
        command(*begin, "--changes", str(tmp_path / "missing.jsonl"))


def test_a_change_before_one_that_is_to_come_leaves_it_as_it_is(run: Path) -> None:
    append_changes(run, [SettingChange(0, 9, "clip", "norm 1.0", "off")])
    command("change", str(run), "optimizer.lr=1e-4")
    command("resume", str(run), "--stop-after", "9 steps")  # up to a change, and from one on
    command("resume", str(run))
    saved = sf.load(run)
    assert [(change.from_step, change.setting) for change in read_changes(run)] == [
        (9, "clip"),
        (4, "optimizer.lr"),
    ]
    settings = [(saved.settings_at(step)["clip"], saved.settings_at(step)["optimizer.lr"])
                for step in (3, 4, 8, 9)]  # fmt: skip
    lr = settings[0][1]
    assert settings == [("norm 1.0", lr), ("norm 1.0", 1e-4), ("norm 1.0", 1e-4), ("off", 1e-4)]
    clipped = ["clip_fraction" in record for record in saved.records("train")]
    assert clipped == [True] * 9 + [False] * 3


@pytest.mark.parametrize("clip", ["value 0.1", "norm 1.0"])
def test_a_change_supersedes_what_was_to_come_of_its_setting(clip: str, run: Path) -> None:
    append_changes(run, [SettingChange(0, 9, "clip", "norm 1.0", "off")])
    command("change", str(run), f"clip={clip}")
    command("change", str(run), f"clip={clip}")
    assert len(read_changes(run)) == 2
    command("resume", str(run))
    saved = sf.load(run)
    assert saved.step == 12
    assert saved.settings_at(9)["clip"] == clip


def test_a_journal_of_another_run_is_refused(run: Path) -> None:
    command("resume", str(run), "--change", "clip=off", "--stop-after", "6 steps")
    (run / "changes.jsonl").unlink()
    with pytest.raises(sf.CheckpointError) as refusal:
        command("resume", str(run))
    assert refusal.value.code == "journal-of-another-run"
    assert refusal.value.fields["number"] == 1


def test_a_change_in_the_program_names_the_line_to_type(run: Path) -> None:
    with pytest.raises(sf.CheckpointError) as refusal:
        command("train", "images", "--config", str(run / "config.toml"), "--run-dir", str(run),
                "--batch-size", "16")  # fmt: skip
    assert refusal.value.code == "settings-changed"
    assert f"surefoot change {run} batch_size=16" in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["length=20 steps"], "the schedule goes on from its present rate"),
        (["length=20 steps", "schedule=stretch"], "a run that had 20 steps from the start"),
        (["length=20 steps", "schedule.name=linear"], "the new schedule begins at step 4"),
    ],
)
def test_a_change_of_the_length_says_how_the_rate_goes_on_and_draws_it(
    words: list[str], line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("change", str(run), *words, "--dry-run")
    *_, head, now, then, last = capsys.readouterr().out.splitlines()
    assert line in last
    assert head.split()[:3] == ["lr", "at", "4"]
    assert [now.split()[0], then.split()[0]] == ["now", "then"]
    assert [len(row.split()[-1]) for row in (now, then)] == [12, 20]  # one letter a step


def test_the_rates_that_are_printed_are_those_of_the_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("change", str(run), "length=20 steps", "schedule=stretch", "optimizer.lr=1e-3")
    then = capsys.readouterr().out.splitlines()[-2].split()
    command("resume", str(run))
    rates = [record["lr"] for record in sf.load(run).records("train")]
    assert then[1:3] == [f"{rates[4]:.4g}", f"{rates[-1]:.4g}"]


def test_a_change_says_that_a_run_is_exactly_the_longer_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command("train", "images", "--length", "12 steps", "--stop-after", "4 steps", "--batch-size", "8",
            "--schedule.name", "wsd", "--report", "False", "--tensorboard", "False", "--run-dir", str(run))  # fmt: skip
    capsys.readouterr()
    command("change", str(run), "length=20 steps", "--dry-run")
    assert capsys.readouterr().out.splitlines()[-1].startswith("exact: ")


def test_of_a_setting_named_twice_the_last_value_counts(run: Path) -> None:
    command("change", str(run), "clip=off", "clip=value 0.1")
    assert [change.now for change in read_changes(run)] == ["value 0.1"]


def test_a_batch_that_is_large_again_has_the_micro_batches_that_were_chosen(run: Path) -> None:
    command("resume", str(run), "--change", "batch_size=4", "--stop-after", "5 steps")
    command("change", str(run), "batch_size=16")
    follows = [change.follows["micro_batch_size"] for change in read_changes(run)]
    assert follows == [[8, 4], [4, 8]]
    command("resume", str(run), "--stop-after", "6 steps")
    command("change", str(run), "micro_batch_size=2")
    command("change", str(run), "batch_size=32")
    assert read_changes(run)[-1].follows["micro_batch_size"] == [2, 2]


def test_a_finished_run_says_how_it_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("resume", str(run))
    capsys.readouterr()
    command("resume", str(run))
    assert f"surefoot change {run} length=" in capsys.readouterr().out


def test_a_change_in_python_returns_the_lines_of_the_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command("change", str(run), "clip=off", "--dry-run")
    printed = capsys.readouterr().out.splitlines()
    saved = sf.load(run)
    assert saved.change(clip="off", dry_run=True) == printed
    assert read_changes(run) == ()
    assert saved.change(clip="off") == printed


def test_changes_that_are_to_come_are_printed_at_the_beginning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sf.load(run).change(clip="off")
    begin = ["train", "images", "--config", str(run / "config.toml"), "--stop-after", "1 steps"]
    capsys.readouterr()
    command(*begin, "--run-dir", str(tmp_path / "new"), "--changes", str(run / "changes.jsonl"))
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "change 1, from step 4 on: clip norm 1.0 -> off"


@pytest.mark.parametrize(
    "text",
    [
        "clip=1.0",
        "clip=norm",
        "micro_batch_size=7",
        "skip_steps=7..12",
    ],
)
@pytest.mark.parametrize("words", [("change",), ("resume", "--change")])
def test_what_an_error_says_to_try_can_be_typed(
    words: tuple[str, ...], text: str, run: Path
) -> None:
    verb, *flag = words
    with pytest.raises(sf.ConfigError) as caught:
        command(verb, str(run), *flag, text)
    assert caught.value.remedies
    for remedy in caught.value.remedies:
        assert isinstance(remedy, tuple)
        (words_to_type,) = remedy
        (assignment,) = shlex.split(str(words_to_type))
        command("change", str(run), assignment, "--dry-run")
    assert read_changes(run) == ()


# --- a run of a script ----------------------------------------------------------------------------


@pytest.fixture
def of_script(tmp_path: Path) -> Path:
    run_in(tmp_path / "run", stop_after="8 steps", save_every="4 steps").train()
    return tmp_path / "run"


def first_line(*words: str) -> list[str]:
    """Return the words of the first line that the refusal of a script's run says to type."""
    with refused("run-of-script") as caught:
        command("resume", *words)
    line, then, *_ = caught.value.remedies
    assert isinstance(line, Command)
    assert isinstance(then, Command)  # the script
    return shlex.split(line.line)


def test_a_resume_of_a_script_with_changes_names_the_command_that_makes_them(
    of_script: Path,
) -> None:
    changes = ["--change", "optimizer.lr=1e-4", "--change=clip=norm 0.5"]
    length = ["--length", "4 epochs", "--because", "a test"]
    _, *words = first_line(str(of_script), *changes, *length)
    command(*words)
    lines = [(line.setting, line.because) for line in read_changes(of_script)]
    assert sorted(lines) == [(name, "a test") for name in ("clip", "length", "optimizer.lr")]


def test_a_resume_of_a_script_that_goes_back_names_the_command_that_does(of_script: Path) -> None:
    words = ["--from-step", "4", "--change", "optimizer.lr=1e-4", "--skip-steps", "10..11"]
    _, *words = first_line(str(of_script), *words, "--because", "a test")
    command(*words)
    lines = [(line.setting, line.from_step) for line in read_changes(of_script)]
    assert lines == [("step", 4), ("optimizer.lr", 4), ("skip_steps", 9), ("skip_steps", 11)]


def test_a_resume_of_a_script_alone_names_the_script(of_script: Path) -> None:
    with refused("run-of-script") as caught:
        command("resume", str(of_script))
    commands = [each for each in caught.value.remedies if isinstance(each, Command)]
    assert len(commands) == 1
