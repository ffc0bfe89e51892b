"""What is searched, and that a killed search neither repeats nor loses a trial; the runs are made
up. (4 s)
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from refused import refused

pytest.importorskip("optuna")

from surefoot.tools.compare.search import Search, corners, parameter
from surefoot.tools.compare.trials import RESULTS, TrialOutcome

SPACE = {
    "optimizer.lr": parameter("optimizer.lr", "1e-4..1e-1"),
    "optimizer.name": parameter("optimizer.name", "a,b"),
}


class MadeUpTrials:
    """A search whose trials are functions: the score falls to the distance of log10(lr) from -2."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.begun: dict[str, dict[str, str]] = {}
        settings: dict[str, Any] = {
            "trials": 8,
            "seed": 3,
            "sampler": "tpe",
            "pruner": "none",
            "direction": "min",
        }
        self.search = Search(directory, SPACE, begin=self.begun.__setitem__, **(settings | changes))

    def begin(self) -> str:
        name = self.search.next()
        assert name is not None
        return name

    def evaluate(self, name: str, step: int) -> bool:
        """Show the score of a trial to the search. Returns whether to give the trial up."""
        score = distance_from_best(self.begun[name]) + 1.0 / step
        return self.search.saw(name, step, score)

    def run(self, trials: int) -> list[dict[str, str]]:
        """Train so many trials, with two evaluations each; the settings they had."""
        for _ in range(trials):
            name = self.search.next()
            if name is None:
                break
            given_up = self.evaluate(name, 10) or self.evaluate(name, 20)
            self.search.ended(name, TrialOutcome("pruned" if given_up else "finished"))
        return list(self.begun.values())

    def states(self) -> list[str]:
        return [trial.state.name for trial in self.search.study.get_trials()]


def distance_from_best(settings: dict[str, str]) -> float:
    return abs(math.log10(float(settings["optimizer.lr"])) + 2.0)


@pytest.mark.fast("random")
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_is_cut_anywhere_tries_what_it_would_have_tried(
    tmp_path: Path, sampler: str
) -> None:
    whole_directory = tmp_path / "whole"
    cut_directory = tmp_path / "cut"
    whole_directory.mkdir()
    cut_directory.mkdir()
    options: dict[str, Any] = {"sampler": sampler, "trials": 5}
    whole = MadeUpTrials(whole_directory, **options).run(6)
    assert len({settings["optimizer.lr"] for settings in whole}) == 5

    first_three = MadeUpTrials(cut_directory, **options).run(3)
    killed = MadeUpTrials(cut_directory, **options)
    name = killed.begin()
    killed.evaluate(name, 10)  # and here it is killed
    resumed = MadeUpTrials(cut_directory, **options)

    assert resumed.search.over == 3
    assert resumed.begin() == name
    assert resumed.begun == killed.begun
    resumed.evaluate(name, 10)
    resumed.evaluate(name, 20)
    resumed.search.ended(name, TrialOutcome("finished"))
    assert first_three + resumed.run(6) == whole
    assert resumed.states() == ["COMPLETE"] * 5


def test_what_finished_while_nobody_was_told_is_not_trained_again(tmp_path: Path) -> None:
    killed = MadeUpTrials(tmp_path)
    name = killed.begin()
    killed.search.saw(name, 10, 0.5)
    (tmp_path / RESULTS).mkdir()
    (tmp_path / RESULTS / f"{name}.json").write_text(json.dumps({"status": "finished"}))

    resumed = MadeUpTrials(tmp_path)

    assert resumed.begin() != name
    assert resumed.search.study.get_trials()[0].value == 0.5


def test_a_stopped_trial_goes_on_another_time(tmp_path: Path) -> None:
    stopped = MadeUpTrials(tmp_path)
    name = stopped.begin()
    stopped.search.ended(name, TrialOutcome("stopped"))
    assert stopped.states() == ["RUNNING"]

    resumed = MadeUpTrials(tmp_path)

    assert resumed.begin() == name


def test_a_trial_that_is_worse_than_the_median_at_its_step_is_given_up(tmp_path: Path) -> None:
    trials = MadeUpTrials(tmp_path, pruner="median", sampler="random", trials=9)
    trials.run(6)
    name = trials.begin()

    assert trials.search.saw(name, 10, 99.0)
    trials.search.ended(name, TrialOutcome("pruned"))
    assert trials.states()[-1] == "PRUNED"


def test_a_search_comes_closer_than_its_first_trials(tmp_path: Path) -> None:
    """Deterministic: from the seed, as the first test shows."""
    tried = MadeUpTrials(tmp_path, trials=12).run(12)
    distances = [distance_from_best(settings) for settings in tried]
    assert min(distances[5:]) < min(distances[:5])


def test_diverged_and_failed_trials_are_told_apart(tmp_path: Path) -> None:
    trials = MadeUpTrials(tmp_path)
    trials.search.ended(trials.begin(), TrialOutcome("diverged"))
    trials.search.ended(trials.begin(), TrialOutcome("failed"))
    assert trials.states() == ["PRUNED", "FAIL"]


@pytest.mark.parametrize(
    ("text", "log"),
    [
        ("1e-3..1e-1", True),
        ("0.01..0.05", False),
        ("0.01..0.05,log", True),
        ("1..100,linear", False),
    ],
)
def test_wide_ranges_are_searched_by_their_logarithm(text: str, log: bool) -> None:
    assert parameter("optimizer.lr", text)["log"] is log


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("2..1", "vary-range-empty", {"low": 2, "high": 1}),
        ("a..b", "vary-end-not-a-number", {"end": "a"}),
        ("1..inf", "vary-end-not-a-number", {"end": "inf"}),
        ("1..2,cube", "vary-scale-unknown", {"scale": "cube"}),
        ("0..1,log", "vary-log-range-not-positive", {"low": 0}),
        ("a,,b", "vary-choices-not-distinct", {}),
        ("a,a", "vary-choices-not-distinct", {}),
    ],
)
def test_what_is_no_range_is_refused(text: str, code: str, fields: dict[str, Any]) -> None:
    with refused(code, setting="optimizer.lr", value=text, **fields):
        parameter("optimizer.lr", text)


def test_corners_reach_every_choice_and_both_ends() -> None:
    settings_of_corners = corners(SPACE)
    assert {settings["optimizer.name"] for settings in settings_of_corners} == {"a", "b"}
    assert {settings["optimizer.lr"] for settings in settings_of_corners} == {"0.0001", "0.1"}


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with refused("package-not-usable", modules=["optuna"]):
        MadeUpTrials(tmp_path)
