"""What `--help` prints: plain, narrow, of every verb; and quickly; 3 seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from surefoot.cli import help as texts
from surefoot.cli.main import _VERBS, main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_verb_has_a_help_and_stands_in_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(texts.VERBS) == list(_VERBS)
    whole = printed(capsys, "--help")
    for verb in _VERBS:
        assert f"surefoot {verb} " in whole
        assert printed(capsys, verb, "--help").startswith(f"surefoot {verb} ")


@pytest.mark.parametrize("text", [texts.WHOLE, *texts.VERBS.values()], ids=["whole", *texts.VERBS])
def test_no_line_is_wider_than_a_terminal(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= 88
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("  "))


def test_help_of_a_recipe_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    from surefoot.config import flatten
    from surefoot.recipes.gpt import Config

    said = printed(capsys, "train", "gpt", "--help")
    assert [name for name in flatten(Config()) if f"--{name.replace('_', '-')} " not in said] == []
    assert "(default: 0.05)" in said


@pytest.mark.parametrize("arguments", [["--help"], ["train", "gpt", "--help"], ["find-batch", "gpt", "--help"]])
def test_help_comes_in_a_fraction_of_a_second(arguments: list[str]) -> None:
    """0.3 s is the aim. Processor time, not the clock, because the machine may be busy; and twice that, for slower ones."""
    command = [sys.executable, "-c", "from surefoot.cli.main import main; main()", *arguments]
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.6
