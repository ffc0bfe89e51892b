"""The live view, read off the screen of a terminal emulator; a real pseudo-terminal where processes and signals matter; 15 seconds."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest

from surefoot.sinks.terminal import Terminal


class Screen:
    """A terminal of some size that a `Terminal` writes to, and that can be read like one."""

    encoding = "utf-8"

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.raw = columns, ""
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self.screen.set_mode(pyte.modes.LNM)  # a line end starts a new line, as terminals are set
        self.feed = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self.raw += text
        self.feed.feed(text)
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """All that was ever on it, scrolled away or not, without empty lines."""
        gone = ["".join(row[column].data for column in range(self.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in [*gone, *self.screen.display] if line.strip()]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "LINES"):
        monkeypatch.delenv(name, raising=False)


def train(step: int, **values: Any) -> dict[str, Any]:
    plain = {"loss": 2.5 - step / 100, "learning_rate": 1e-3, "norm": 0.51, "targets_per_s": 15400.0, "left_s": 90}
    return {"kind": "train", "step": step, **plain, **values}


def scores(step: int, **values: float) -> dict[str, Any]:
    return {
        "kind": "scores",
        "step": step,
        "held-out/loss": 3.3654,
        "held-out/perplexity": 28.946,
        "cloze/accuracy": 0.645,
    } | values


def shown(*records: dict[str, Any], columns: int = 80, rows: int = 24) -> Screen:
    screen = Screen(columns, rows)
    terminal = Terminal(100, screen, now=lambda: 0.0)  # type: ignore[arg-type]
    for record in records:
        terminal.write(record)
    return screen


def test_there_is_one_row_per_evaluation_under_one_head_and_one_live_line_below() -> None:
    steps = range(10, 100, 10)
    screen = shown(*(record for step in steps for record in (train(step), scores(step))), train(95))
    assert screen.lines[0].split() == ["step", "train", "loss", "loss", "perplexity", "accuracy", "time"]
    rows = [line.split() for line in screen.lines[1:-1]]
    assert [row[0] for row in rows] == [str(step) for step in steps]
    assert rows[0][1:5] == ["2.4", "3.3654", "28.946", "0.645"]
    assert screen.lines[-1].startswith("━━━━━━━━━━━━━━━━ 95/100  loss 1.55  left 1m30s  lr 0.001  norm 0.51")


def test_a_thousand_rows_scroll_away_as_ordinary_text() -> None:
    screen = shown(*(record for step in range(1000) for record in (train(step), scores(step))))
    assert sum("28.946" in line for line in screen.lines) == 1000
    assert sum("━" in line for line in screen.lines) == 1


@pytest.mark.parametrize("columns", [20, 40, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    own = {"a_value_with_a_rather_long_name": 1.0, "another_one": 123456.789}
    more = {f"a split with a long name/and a long score {number}": 1e-9 for number in range(5)}
    screen = shown(train(10, **own), scores(10), scores(20, **more), train(30, **own), columns=columns, rows=50)
    live = [line for line in screen.lines if "━" in line]
    assert len(live) == 1
    assert max(len(line) for line in live) < columns
    tables = [line for line in screen.lines if "3.3654" in line]
    assert len(tables) == 2 or columns < 40


def test_scores_for_which_there_is_no_room_are_named() -> None:
    more = {f"split {number}/a rather long score": 1.0 for number in range(5)}
    screen = shown(train(10), scores(10, **more))
    assert "not shown for lack of room: split 0" in " ".join(screen.lines)


def test_other_scores_get_a_head_of_their_own() -> None:
    screen = shown(scores(10), {"kind": "scores", "step": 20, "test/loss": 1.0})
    assert [line.split()[-2] for line in screen.lines if "step" in line] == ["accuracy", "loss"]


def test_prose_and_samples_stand_above_the_live_line() -> None:
    screen = Screen()
    terminal = Terminal(100, screen, now=lambda: 0.0)  # type: ignore[arg-type]
    terminal.write(train(10))
    terminal.say("warning: something")
    terminal.write({"kind": "sample", "step": 10, "text": "[bold]so it goes[/bold] :smile:"})
    assert screen.lines[:4] == [
        "warning: something",
        "--- sample at step 10 ---",
        "[bold]so it goes[/bold] :smile:",
        "---",
    ]
    assert screen.lines[4].startswith("━")
    terminal.close()
    assert len(screen.lines) == 4


def test_what_takes_long_is_named_until_the_next_record() -> None:
    screen = Screen()
    terminal = Terminal(100, screen, now=lambda: 0.0)  # type: ignore[arg-type]
    terminal.write(train(10))
    terminal.doing("evaluating held-out")
    assert screen.lines[-1].endswith("10/100  evaluating held-out")
    terminal.write(scores(10))
    assert "evaluating" not in screen.lines[-1]


def test_skipped_steps_stand_out() -> None:
    screen = shown(train(10, skipped=2, loss=float("nan"), loss_of_applied=1.5))
    assert "2 skipped  loss 1.5" in screen.lines[-1]
    assert "\x1b[31m" in screen.raw


def test_without_colour_there_is_none_and_still_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = shown(train(10, skipped=1), scores(10), train(20))
    assert re.findall(r"\x1b\[[0-9;]*m", screen.raw) in ([], re.findall(r"\x1b\[(?:0|1|2)m", screen.raw))
    assert sum("━" in line for line in screen.lines) == 1


def test_only_the_eight_plain_colours_are_used_and_the_cursor_is_never_hidden() -> None:
    screen = shown(train(10, skipped=1), scores(10), train(20))
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", screen.raw) for code in found.split(";")}
    assert codes <= {"0", "1", "2", *(str(30 + colour) for colour in range(8))}
    assert "\x1b[?25l" not in screen.raw


# --- processes in a pseudo-terminal ------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import small_runs, surefoot as sf

slow = {slow}
def loss(model, batch):
    if slow:
        time.sleep(0.05)
    return small_runs.loss(model, batch)

run = small_runs.build({out!r}, console=True, loss=loss, log_every="1 steps", length="{length} steps")
with run:
    for step in run:
        if step.index == {fail_at}:
            raise ValueError("a mistake of the user's own")
"""


class Process:
    """A Python program in a pseudo-terminal."""

    def __init__(self, program: str, **environment: str) -> None:
        self.screen = Screen()
        main, side = os.openpty()
        self.main = main
        names = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=side,
            stdout=side,
            stderr=side,
            env=names | {"TERM": "xterm", "COLUMNS": "80", **environment},
            start_new_session=True,
        )
        os.close(side)

    def read(self, seconds: float) -> bool:
        """Feed what comes within this time to the screen; false at the end of it all."""
        ready, _, _ = select.select([self.main], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.main, 65536)
        except OSError:
            return False
        self.screen.write(data.decode(errors="replace").replace("\r\n", "\n"))
        return bool(data)

    def until(self, text: str, seconds: float = 30.0) -> float:
        """Seconds until `text` was on the screen."""
        begun = time.monotonic()
        while text not in self.screen.raw:
            assert time.monotonic() - begun < seconds, self.screen.lines
            assert self.read(0.02), self.screen.lines
        return time.monotonic() - begun

    def end(self) -> int:
        while self.read(20.0):
            pass
        return self.process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    processes: list[Process] = []

    def start(*, slow: bool = False, length: int = 12, fail_at: int = -1, **environment: str) -> Process:
        tests = str(Path(__file__).parents[1])
        program = PROGRAM.format(tests=tests, slow=slow, length=length, fail_at=fail_at, out=str(tmp_path / "run"))
        processes.append(Process(program, **environment))
        return processes[-1]

    yield start
    for process in processes:
        process.process.kill()
        process.process.wait()
        os.close(process.main)


def test_a_run_in_a_terminal_leaves_its_head_its_table_and_its_end(started: Any) -> None:
    process = started()
    assert process.end() == 0
    lines = process.screen.lines
    assert [line.split()[0] for line in lines[:5]] == ["model", "data", "plan", "device", "out"]
    table = next(place for place, line in enumerate(lines) if line.split()[0] == "step")  # a long path may have wrapped
    assert [line.split()[0] for line in lines[table : table + 4]] == ["step", "5", "10", "12"]
    assert lines[table + 4].startswith("finished: 12 steps")
    assert "━" not in "".join(lines)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}])
def test_a_dumb_terminal_gets_plain_lines(started: Any, environment: dict[str, str]) -> None:
    process = started(**environment)
    assert process.end() == 0
    assert "\x1b" not in process.screen.raw
    assert any(line.startswith("step=12/12 loss=") for line in process.screen.lines)


def test_ctrl_c_is_answered_within_a_second_on_a_line_of_its_own(started: Any) -> None:
    process = started(slow=True, length=2000)
    process.until("norm")
    os.killpg(process.process.pid, signal.SIGINT)
    assert process.until("finishing this step, then saving") < 1.0
    assert process.end() == 130
    (said,) = [line for line in process.screen.lines if "finishing this step" in line]
    assert said == "Ctrl-C: finishing this step, then saving; once more ends at once"
    assert "saved; go on with:" in process.screen.raw
    assert "━" not in "".join(process.screen.lines)


def test_an_error_stands_on_a_line_of_its_own(started: Any) -> None:
    process = started(fail_at=7)
    assert process.end() == 1
    assert "Traceback (most recent call last):" in process.screen.lines
    assert process.screen.lines[-1] == "ValueError: a mistake of the user's own"
