"""What a session of a comparison reads of its runs, and what it prints meanwhile. (1 s)"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refused import refused
from stated import numbers_in
from surefoot.tools.compare import runner
from surefoot.tools.compare.runner import Board, ComparisonSession, Lines, VariantsInOrder
from surefoot.tools.compare.trials import Trial, TrialProgress, Trials
from surefoot.tracking.run_directory import RunDirectory


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


# --- what is printed ------------------------------------------------------------------------------


def test_plain_lines_come_at_most_every_ten_seconds_for_each_variant(stream: io.StringIO) -> None:
    now_s = 0.0
    lines = Lines(stream, now=lambda: now_s)

    for step in range(1, 30):
        now_s += 1.0
        lines.show({"a": TrialProgress(step=step, steps=30, loss=2.0), "b": TrialProgress()})

    assert stream.getvalue().splitlines() == [
        "variant=a step=1/30 loss=2",
        "variant=a step=11/30 loss=2",
        "variant=a step=21/30 loss=2",
    ]


def test_a_board_draws_its_lines_again_over_themselves(stream: io.StringIO) -> None:
    board = Board(stream, width=20)
    board.show({"a": TrialProgress(step=1), "bb": TrialProgress()})
    board.show({"a": TrialProgress(step=1), "bb": TrialProgress()})  # nothing new
    board.say("one has ended")
    board.close()

    drawn = "a   step=1\nbb  starting\n"
    two_lines_up = "\x1b[2A\r\x1b[J"
    assert stream.getvalue() == f"{drawn}{two_lines_up}one has ended\n{drawn}{two_lines_up}"


def test_a_long_name_leaves_room_for_the_numbers(stream: io.StringIO) -> None:
    progress = TrialProgress(step=7, loss=2.0)

    Board(stream, width=40).show({"a-very-long-name-of-a-variant,lr=0.001": progress})

    line, _, _ = stream.getvalue().partition("\n")
    assert line.endswith("lr=0.001  step=7  loss=2")
    assert len(line) <= 39


def test_what_was_printed_below_a_board_is_not_drawn_over(stream: io.StringIO) -> None:
    board = Board(stream, width=40)
    board.show({"a": TrialProgress(step=1)})
    board.leave()
    board.show({"a": TrialProgress(step=2)})
    assert stream.getvalue() == "a  step=1\na  step=2\n"


# --- a session ------------------------------------------------------------------------------------


def open_session(directory: Path, names: Sequence[str], stream: io.StringIO) -> ComparisonSession:
    """A session that trains one variant at a time, and ranks by the loss."""
    return ComparisonSession(
        VariantsInOrder(names, directory),
        Trials(RunDirectory(directory), lambda name: [name], threads=1, cwd="."),
        jobs=1,
        score=("min", "val/loss"),
        screen=Lines(stream),
        stopping=lambda: False,
        labels={},
    )


def trial_of(directory: Path, name: str) -> Trial:
    """A trial whose process is of no interest."""
    (directory / name).mkdir()
    process: Any = SimpleNamespace()
    return Trial(name, process, directory / name / "metrics.jsonl", 0, fresh=True)


@pytest.mark.parametrize(
    ("eta_s", "finished", "text", "runs_that_remain"),
    [(60.0, ["a", "b", "c", "d"], "about 2m20s ", 2), (90.0, ["a"], "about 5m00s ", 3)],
)
def test_the_time_that_is_left_is_of_what_no_session_has_finished(
    eta_s: float,
    finished: list[str],
    text: str,
    runs_that_remain: int,
    tmp_path: Path,
    stream: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "results").mkdir()
    for name in finished:
        (tmp_path / name).mkdir()
        result = '{"status": "finished", "said": ""}'
        (tmp_path / "results" / f"{name}.json").write_text(result)
    every_name = [*finished, "running", *"xyz"[: runs_that_remain - 1]]
    session = open_session(tmp_path, every_name, stream)
    trial = trial_of(tmp_path, "running")
    trial.started = 90.0
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 100.0))

    session._estimate(trial, eta_s)

    assert stream.getvalue().startswith(text)
    assert numbers_in(stream.getvalue()) == [runs_that_remain]


def test_a_run_that_has_not_the_score_to_rank_by_is_refused(
    tmp_path: Path, stream: io.StringIO
) -> None:
    session = open_session(tmp_path, ["b"], stream)
    trial = trial_of(tmp_path, "b")
    record = '{"kind": "eval", "step": 1, "val/accuracy": 0.5}\n'
    (tmp_path / "b" / "metrics.jsonl").write_text(record)

    with refused("score-missing", run="b", available={"val/accuracy": 0.5}):
        session._look(trial)


def test_records_are_read_as_they_come_and_never_in_part(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, "a")
    records = tmp_path / "a" / "metrics.jsonl"
    assert trial.new_records() == []

    first = '{"kind": "train", "step": 1}\n'
    records.write_text(first + '{"kind": "tr')
    assert [record["step"] for record in trial.new_records()] == [1]

    second = '{"kind": "train", "step": 2, "nonfinite": {"loss": "nan"}}\n'
    records.write_text(first + second)
    assert [record["step"] for record in trial.new_records()] == [2]
