"""Options of verbs: what a mistake is answered, wherever it stands, and what belongs to something
else; 3 seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused as refused_with
from surefoot.cli.main import main
from surefoot.cli.options import SavedRunOptions, check_excluded, find_run, parse, refuse_unknown
from surefoot.errors import ConfigError, Setting

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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) <= 5
    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["diagnose", "a", "--jsn"],
            "[setting-unknown]",
        ),
        (["diagnose", "a", "b"], "[flags-not-understood]"),
        (["report", "a", "--port", "-1", "--watch"], "[setting-out-of-range]"),
        (
            ["evaluate", "a", "--checkpont", "best"],
            "[setting-unknown]",
        ),
        (["compare", "gpt", "--threads", "many"], "[flags-not-understood]"),
        (
            ["compare", "gpt", "--sampler", "tep"],
            "[flags-not-understood]",
        ),
        (
            ["plan", "--schedules", "all", "--nproc", "2"],
            "[option-excluded]",
        ),
        (
            ["plan", "gpt", "--world-size", "8", "--flops", "nan"],
            "[setting-out-of-range]",
        ),
        (
            ["plan", "program.py:plain", "--world-size", "8", "--nproc", "2"],
            "[option-excluded]",
        ),
        (
            ["find-lr", "gpt", "--checkpoint", "best"],
            "[option-of-other-kind]",
        ),
        (
            ["find-lr", "a", "--config", "mine.toml"],
            "[option-of-other-kind]",
        ),
        (["train", "program.py"], "[setting-missing]"),
        (["train", "program.py", "--steps", "4", "--width"], "[flags-not-understood]"),
        (["train", "program.py", "--steps", "4", "again"], "[flags-not-understood]"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_a_mistake_is_answered_with_what_to_type(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)


def test_what_was_typed_is_in_the_error_of_flags_that_are_not_understood() -> None:
    typed = ["a", "--checkpoint"]
    with refused_with("flags-not-understood", verb="evaluate", arguments=typed):
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
    assert "built with Config(steps=4, width=8, wide=True)" in refused(capsys, "train", *arguments)


def test_help_of_a_program_shows_its_settings_then_the_options_of_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "program.py", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert 0 < said.index("--steps INT") < said.index("--width INT") < said.index("--accept-change")


def test_every_option_that_another_one_excludes_is_to_be_left_out() -> None:
    others = ["nproc", "world_size"]
    with refused_with("option-excluded", setting="schedules", others=others) as refusal:
        check_excluded("schedules", others, reason="it trains nothing")
    assert refusal.value.remedies == tuple(("leave out", Setting(name)) for name in others)
    check_excluded("schedules", [], reason="it trains nothing")


def test_help_of_a_program_with_many_settings_shows_the_first_ten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = "".join(f"    option_{number}: int = {number}\n" for number in range(12))
    program = f"from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n{fields}"
    Path("many.py").write_text(f"{program}\n\ndef build(config: Config): ...\n")
    pages = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["train", "many.py", flag])
        pages[flag] = capsys.readouterr().out
    shown = [
        f"--option-{number} " for number in range(12) if f"--option-{number} " in pages["--help"]
    ]
    assert shown == [f"--option-{number} " for number in range(10)]
    assert "All 12 settings: surefoot train many.py --help-all" in pages["--help"]
    assert "--option-11 " in pages["--help-all"]


def test_a_setting_named_like_a_python_keyword_is_shown_as_it_is_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n"
    program += "    lambda_: float = 0.5\n"
    program += "\n\ndef build(config: Config):\n    raise ValueError(config.lambda_)\n"
    Path("regularized.py").write_text(program)
    with pytest.raises(SystemExit):
        main(["train", "regularized.py", "--help"])
    assert "  --lambda_ FLOAT " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^0\.25$"):
        main(["train", "regularized.py", "--lambda_", "0.25"])
    assert "try: --lambda_" in refused(capsys, "train", "regularized.py", "--lambda", "0.25")


def test_every_unknown_flag_is_named() -> None:
    typed = [(name, [f"--{name}", "1"]) for name in ("first", "second", "third", "fourth", "fifth")]
    with pytest.raises(ConfigError) as refusal:
        refuse_unknown(typed, ["length"], verb="train gpt")
    problems = refusal.value.problems
    assert [problem.code for problem in problems] == ["setting-unknown"] * 5
    assert [problem.fields["setting"] for problem in problems] == [name for name, _ in typed]


@pytest.mark.parametrize("run", ["runs/a", "a"])
def test_a_run_behind_its_input_is_answered_with_the_order(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "predict", "two words.png", run)
    assert "[run-not-first]" in said
    assert f"{run} 'two words.png'" in said


def test_a_missing_run_is_answered_with_the_five_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["gpt-1", "gpt-2", "gpt-10", "gpt", "translation", "gpt-3", "images", "a\x1b[31m"]
    for name in names:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    near = ["gpt-1", "gpt-10", "gpt-2", "gpt-3", "gpt"]
    with refused_with("run-missing", run="gpt-4") as caught:
        find_run("gpt-4")
    assert sorted(caught.value.fields["nearest"]) == sorted(near)
    with refused_with("run-missing", nearest=caught.value.fields["nearest"]):
        sf.load("runs/gpt-4").diagnose()
    with refused_with("run-missing", run="runs"):
        find_run("runs")
    assert find_run("gpt-3") == Path("runs/gpt-3")
