"""Options of verbs: what a mistake is answered, wherever it stands, and what belongs to something
else; 3 seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import surefoot as sf
from command_line import error_of
from refused import refused
from surefoot.cli.main import main
from surefoot.cli.options import SavedRunOptions, check_excluded, find_run, parse, refuse_unknown
from surefoot.errors import Setting

PROGRAM = """
from dataclasses import dataclass
import surefoot as sf

@dataclass(frozen=True)
class Config:
    steps: int
    width: int | None = None
    wide: bool = False

def build(config: Config):
    raise sf.ConfigError(f"built with {config}")

def plain():
    raise sf.ConfigError("built with nothing")
"""
RUN = """
steps = 4
[program]
kind = "recipe"
recipe = "gpt"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a program and a run that holds nothing but its settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    Path("program.py").write_text(PROGRAM)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.toml").write_text(RUN)


def short_error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    message = error_of(capsys, *arguments)
    assert message.startswith("error: ")
    assert len(message.splitlines()) <= 5
    return message


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("diagnose a --jsn", "setting-unknown"),
        ("diagnose a b", "flags-not-understood"),
        ("report a --port -1 --watch", "setting-out-of-range"),
        ("evaluate a --checkpont best", "setting-unknown"),
        ("compare gpt --threads many", "flags-not-understood"),
        ("compare gpt --sampler tep", "flags-not-understood"),
        ("plan --schedules all --nproc 2", "option-excluded"),
        ("plan gpt --world-size 8 --flops nan", "setting-out-of-range"),
        ("plan program.py:plain --world-size 8 --nproc 2", "option-excluded"),
        ("find-lr gpt --checkpoint best", "option-of-other-kind"),
        ("find-lr a --config mine.toml", "option-of-other-kind"),
        ("train program.py", "setting-missing"),
        ("train program.py --steps 4 --width", "flags-not-understood"),
        ("train program.py --steps 4 again", "flags-not-understood"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(
    typed: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"[{code}]" in short_error_of(capsys, *typed.split())


def test_what_was_typed_is_in_the_error_of_flags_that_are_not_understood() -> None:
    typed = ["a", "--checkpoint"]
    with refused("flags-not-understood", verb="evaluate", arguments=typed):
        parse(SavedRunOptions, typed, verb="evaluate")


@pytest.mark.parametrize(
    "arguments",
    [
        ["program.py", "--steps", "4", "--wide", "--width=8"],
        ["program.py:build", "--wide=true", "--width", "8", "--steps=4"],
        ["program.py", "--config", "mine.toml", "--width", "8", "--wide", "True"],
    ],
    ids=" ".join,
)
def test_settings_may_be_written_in_any_way(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text("steps = 4\n")
    assert "built with Config(steps=4, width=8, wide=True)" in short_error_of(
        capsys, "train", *arguments
    )


def test_help_of_a_program_shows_its_settings_then_the_options_of_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "train", "program.py", "--help")
    flags = ["--steps INT", "--width INT", "--accept-change"]
    places = [text.index(flag) for flag in flags]
    assert places == sorted(places)


def test_every_option_that_another_one_excludes_is_to_be_left_out() -> None:
    others = ["nproc", "world_size"]
    with refused("option-excluded", setting="schedules", others=others) as refusal:
        check_excluded("schedules", others, reason="it trains nothing")
    assert refusal.value.remedies == tuple(("leave out", Setting(name)) for name in others)
    check_excluded("schedules", [], reason="it trains nothing")


def test_help_of_a_program_with_many_settings_shows_the_first_ten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = "".join(f"    option_{number}: int = {number}\n" for number in range(12))
    program = f"from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n{fields}"
    Path("many.py").write_text(f"{program}\n\ndef build(config: Config): ...\n")

    short = help_of(capsys, "train", "many.py", "--help")

    flags = re.findall(r"--option-\d+ ", short)
    assert flags == [f"--option-{number} " for number in range(10)]
    assert "All 12 settings: surefoot train many.py --help-all" in short
    assert "--option-11 " in help_of(capsys, "train", "many.py", "--help-all")


def test_a_setting_named_like_a_python_keyword_is_shown_as_it_is_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n"
    program += "    lambda_: float = 0.5\n"
    program += "\n\ndef build(config: Config):\n    raise ValueError(config.lambda_)\n"
    Path("regularized.py").write_text(program)
    assert "  --lambda_ FLOAT " in help_of(capsys, "train", "regularized.py", "--help")
    with pytest.raises(ValueError, match=r"^0\.25$"):
        main(["train", "regularized.py", "--lambda_", "0.25"])
    assert "try: --lambda_" in short_error_of(capsys, "train", "regularized.py", "--lambda", "0.25")


def test_every_unknown_flag_is_named() -> None:
    names = ["first", "second", "third", "fourth", "fifth"]
    typed = [(name, [f"--{name}", "1"]) for name in names]
    with pytest.raises(sf.ConfigError) as refusal:
        refuse_unknown(typed, ["length"], verb="train gpt")
    problems = refusal.value.problems
    assert [problem.code for problem in problems] == ["setting-unknown"] * 5
    assert [problem.fields["setting"] for problem in problems] == names


@pytest.mark.parametrize("run", ["runs/a", "a"])
def test_a_run_behind_its_input_is_answered_with_the_order(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = short_error_of(capsys, "predict", "two words.png", run)
    assert "[run-not-first]" in message
    assert f"{run} 'two words.png'" in message


@pytest.fixture
def named_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with runs that hold nothing but a file of settings."""
    monkeypatch.chdir(tmp_path)
    names = ["gpt-1", "gpt-2", "gpt-10", "gpt", "translation", "gpt-3", "images", "a\x1b[31m"]
    for name in names:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    return tmp_path


def test_a_missing_run_is_answered_with_the_five_nearest(named_runs: Path) -> None:
    with refused("run-missing", run="gpt-4") as caught:
        find_run("gpt-4")
    nearest = caught.value.fields["nearest"]
    assert sorted(nearest) == ["gpt", "gpt-1", "gpt-10", "gpt-2", "gpt-3"]
    with refused("run-missing", nearest=nearest):
        sf.load("runs/gpt-4").diagnose()


def test_a_run_is_found_by_its_name_and_the_directory_of_runs_is_none(named_runs: Path) -> None:
    with refused("run-missing", run="runs"):
        find_run("runs")
    assert find_run("gpt-3") == Path("runs/gpt-3")
