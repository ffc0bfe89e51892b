"""Law 19 for changes that no start can follow: they leave no line, or the start says what to type."""

from __future__ import annotations

import os
import shlex
import traceback
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import surefoot as sf
from identities.changed_runs import CHANGED_AT, LAST, assert_same_end, data, run_in
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.cli.main import _verb
from surefoot.errors import Command
from surefoot.tools.change.while_training import ask_for_changes
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.change_request import REQUEST, request_changes
from surefoot.train.changed_settings import Wish
from waiting import HANG_S, HangLimit


def model(dropout: float = 0.0, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 1))


SETTINGS: dict[str, Any] = {"model": model, "model_settings": {"dropout": 0.2, "width": 8}}
IMPOSSIBLE = [
    ("model.width", 16, "model-of-other-tensors"),
    ("model.width", -3, "changed-model-not-built"),
    ("precision", "fp8", "precision-without-hardware"),
]
each_impossible = pytest.mark.parametrize(("setting", "value", "code"), IMPOSSIBLE)


def train_with_request(run_dir: Path, setting: str, value: Any, **settings: Any) -> int:
    """Train a run that is asked for a change on the way; return its last step."""
    run = run_in(run_dir, **SETTINGS, **settings)
    with run:
        for step in run:
            if step.index == CHANGED_AT and run.rank == 0:
                wish = {"setting": setting, "value": value, "because": "a request"}
                request_changes(run_dir, [wish])
    return run.state.step


def unchanged(run_dir: Path, **settings: Any) -> Path:
    run_in(run_dir, **SETTINGS, **settings).train()
    return run_dir


# --- while it trains ------------------------------------------------------------------------------


@each_impossible
def test_a_run_goes_on_without_a_change_that_it_cannot_follow(
    tmp_path: Path,
    setting: str,
    value: Any,
    code: str,
) -> None:
    asked = tmp_path / "asked"
    assert train_with_request(asked, setting, value) == LAST
    assert read_changes(asked) == ()
    assert not (asked / REQUEST).exists()
    assert_same_end(unchanged(tmp_path / "unchanged"), asked)


@forks
@pytest.mark.parametrize(("setting", "value"), [(name, value) for name, value, _ in IMPOSSIBLE])
def test_two_ranks_go_on_without_a_change_that_they_cannot_follow(
    tmp_path: Path, setting: str, value: Any
) -> None:
    def train(_: int) -> None:
        assert train_with_request(tmp_path / "asked", setting, value, parallel="ddp") == LAST

    assert on_ranks(2, train) == [0, 0]
    assert read_changes(tmp_path / "asked") == ()
    assert on_ranks(2, lambda _: unchanged(tmp_path / "unchanged", parallel="ddp")) == [0, 0]
    assert_same_end(tmp_path / "unchanged", tmp_path / "asked")


def test_lines_of_before_stay_where_a_change_is_taken_back(tmp_path: Path) -> None:
    run = run_in(tmp_path, **SETTINGS)
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
            if step.index == CHANGED_AT:
                request_changes(tmp_path, [{"setting": "model.width", "value": 16}])
    (change,) = read_changes(tmp_path)
    assert (change.setting, change.from_step) == ("optimizer.lr", 5)
    assert run.state.step == LAST


@each_impossible
def test_a_body_that_makes_a_change_which_cannot_be_followed_ends_with_its_error(
    tmp_path: Path, setting: str, value: Any, code: str
) -> None:
    run = run_in(tmp_path / "asked", **SETTINGS)
    kind = sf.CheckpointError if code == "model-of-other-tensors" else sf.ConfigError
    with refused(code, kind), run:
        for step in run:
            if step.index == CHANGED_AT:
                run.change(setting, value)
    assert read_changes(tmp_path / "asked") == ()
    again = run_in(tmp_path / "asked", **SETTINGS)
    again.train()
    assert again.state.step == LAST
    assert_same_end(unchanged(tmp_path / "unchanged"), tmp_path / "asked")


@forks
def test_another_process_is_told_that_its_change_was_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path, **SETTINGS)
    with run:
        for step in run:
            if step.index == CHANGED_AT:
                process = ask_in_another_process(tmp_path)
                limit = HangLimit(HANG_S)
                while not (tmp_path / REQUEST).exists():
                    assert not limit.is_over
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert run.state.step == LAST


def ask_in_another_process(run_dir: Path) -> int:
    """Ask for a change in another process, which leaves with 7 if that is refused by the run."""
    process = os.fork()
    if process == 0:
        try:
            ask_for_changes(run_dir, [Wish("model.width", 16)])
        except sf.ConfigError as problem:
            os._exit(7 if problem.code == "change-refused-by-run" else 98)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    return process


# --- of a stopped run -----------------------------------------------------------------------------


@each_impossible
def test_a_start_names_the_line_that_takes_a_change_back(
    tmp_path: Path, setting: str, value: Any, code: str
) -> None:
    stopped = tmp_path / "stopped"
    run_in(stopped, stop_after=f"{CHANGED_AT} steps", **SETTINGS).train()
    sf.load(stopped).change(**{setting: value})
    with pytest.raises((sf.CheckpointError, sf.ConfigError)) as caught:
        run_in(stopped, **SETTINGS).train()
    assert caught.value.code == code
    ((_, command),) = caught.value.remedies
    assert isinstance(command, Command)
    _verb(shlex.split(str(command))[1:])
    run_in(stopped, **SETTINGS).train()
    assert_same_end(unchanged(tmp_path / "unchanged"), stopped)
    assert [change.from_step for change in read_changes(stopped)] == [CHANGED_AT, CHANGED_AT]


def test_a_first_evaluation_without_the_monitored_score_names_the_line(tmp_path: Path) -> None:
    settings = {**SETTINGS, "splits": {"val": sf.Split(data(20, seed=1))}}
    settings["evaluate_every"] = "6 steps"
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    rule = {"early_stopping.monitor": "min val/other", "early_stopping.patience": 2}
    sf.load(tmp_path).change(**rule)
    with refused("score-unknown") as caught:
        run_in(tmp_path, **settings).train()
    ((_, command),) = caught.value.remedies
    assert isinstance(command, Command)
    _verb(shlex.split(command.line)[1:])
    run = run_in(tmp_path, **settings)
    run.train()
    assert run.state.step == LAST


def test_a_start_names_no_line_of_another_setting(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **SETTINGS).train()
    sf.load(tmp_path).change(**{"model.dropout": 0.5})
    with refused("precision-without-hardware") as caught:
        run_in(tmp_path, **SETTINGS, precision="fp8")
    assert not any(isinstance(each, tuple) for each in caught.value.remedies)
