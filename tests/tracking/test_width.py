"""What a run says is wrapped once, at the width of the terminal, and never inside a word; 5
seconds.
"""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from small_runs import Augmented, build
from surefoot.tracking import live_terminal
from surefoot.tracking.console import WIDTH, Console
from surefoot.tracking.format import cells, wrapped
from surefoot.tracking.live_terminal import Terminal
from tracking.in_steps import hand
from tracking.in_terminal import Screen

WIDTHS = [40, 41, 57, 79, 80, 81, 120, 200]
PROSE = (
    "a warning about expected_calibration_error with some_quite_long_names 宽宽宽 and short ones"
)


def assert_wrapped_once(lines: list[str], width: int) -> None:
    """A line ends only where the next word does not fit."""
    for line, following in pairwise(lines):
        assert cells(line) <= width
        assert cells(f"{line} {following.split()[0]}") > width


@pytest.mark.parametrize("indent", [2, 11])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_text_is_wrapped_at_its_width_between_words(width: int, indent: int) -> None:
    text = " ".join([PROSE] * 4)
    lines = wrapped(text, indent=indent, width=width).split("\n")
    assert_wrapped_once(lines, width)
    assert " ".join(lines).split() == text.split()
    assert wrapped("\n".join(lines), width=10_000) == "\n".join(lines)


@pytest.mark.parametrize(("length", "indent"), [(29, 11), (30, 10), (38, 2), (40, 0), (41, 11)])
def test_a_word_that_fits_into_a_line_has_one_with_less_indent_if_need_be(
    length: int, indent: int
) -> None:
    word = "x" * length
    assert wrapped(f"run_dir    of {word}", indent=11, width=40) == (
        f"run_dir    of\n{' ' * indent}{word}"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_terminal_says_was_not_wrapped_at_another_width_before(
    width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen(width, 24)

    def made(length: int, stream: None, **settings: Any) -> Terminal:
        assert stream is None
        terminal = Terminal(length, screen, **settings)  # type: ignore[arg-type]
        say = terminal.say
        monkeypatch.setattr(terminal, "say", lambda text: (said.append(text), say(text)))
        return terminal

    data = Augmented()
    names = ("expected_calibration_error", "another_quite_long_name")
    metrics = dict.fromkeys(names, sf.metrics.accuracy)
    monkeypatch.setattr(live_terminal, "screen", made)
    settings: dict[str, Any] = {"length": "1 epochs", "tensorboard": False, "check_state": False}
    settings["splits"] = {"val": sf.Split((data.inputs, data.labels), metrics=metrics)}
    note = "label smoothing 0.1, " * 5
    build("run", console=True, early_stopping=None, loss_note=note, **settings).train()

    header = next(text for text in said if text.startswith("model "))
    paragraphs: list[list[str]] = []
    for line in header.split("\n"):
        if line.startswith("  "):
            paragraphs[-1].append(line)
        else:
            paragraphs.append([line])
    for paragraph in paragraphs:
        assert_wrapped_once(paragraph, width)
    on_screen = {word for line in screen.lines for word in line.split()}
    for text in said:
        assert {*text.split()} <= on_screen
    for name in names:
        assert {f"val/{name}", f"val/{name},", name} & on_screen


def test_names_for_which_there_is_no_room_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen(40)
    terminal = Terminal(100, screen, now=lambda: 0.0)  # type: ignore[arg-type]
    names = [f"val/a_long_name_of_a_metric_{number}" for number in range(5)]
    record = {"kind": "eval", "step": 10} | dict.fromkeys(names, 1.0)
    hand(terminal, [record])
    words = {word.rstrip(",") for line in screen.lines for word in line.split()}
    assert {*names} <= words


def test_a_file_has_lines_of_eighty_columns_and_a_terminal_that_redraws_nothing_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "57")
    assert Console(100, StringIO()).width == WIDTH
    assert Console(100, Screen()).width == 57  # type: ignore[arg-type]
