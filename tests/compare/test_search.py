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


class Made:
    """Trials that are functions: the score falls to the distance of log10(lr) from -2."""

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

    def score(self, name: str, step: int) -> float:
        return abs(math.log10(float(self.begun[name]["optimizer.lr"])) + 2.0) + 1.0 / step

    def run(self, trials: int) -> list[dict[str, str]]:
        """Train so many trials, with two evaluations each; the settings they had."""
        for _ in range(trials):
            name = self.search.next()
            if name is None:
                break
            given_up = any(self.search.saw(name, step, self.score(name, step)) for step in (10, 20))
            self.search.ended(name, TrialOutcome("pruned" if given_up else "finished"))
        return list(self.begun.values())

    def states(self) -> list[str]:
        return [trial.state.name for trial in self.search.study.get_trials()]


@pytest.mark.fast("random")
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_is_cut_anywhere_tries_what_it_would_have_tried(
    tmp_path: Path, sampler: str
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    asked: dict[str, Any] = {"sampler": sampler, "trials": 5}
    whole = Made(tmp_path / "whole", **asked).run(6)
    assert len({one["optimizer.lr"] for one in whole}) == 5
    found = Made(tmp_path / "cut", **asked).run(3)
    killed = Made(tmp_path / "cut", **asked)
    name = killed.search.next()
    assert name is not None
    killed.search.saw(name, 10, killed.score(name, 10))  # and here it is killed
    on = Made(tmp_path / "cut", **asked)
    assert on.search.over == 3
    assert on.search.next() == name
    assert on.begun == killed.begun
    on.search.saw(name, 10, on.score(name, 10))
    on.search.saw(name, 20, on.score(name, 20))
    on.search.ended(name, TrialOutcome("finished"))
    assert found + on.run(6) == whole
    assert on.states() == ["COMPLETE"] * 5


def test_what_finished_while_nobody_was_told_is_not_trained_again(tmp_path: Path) -> None:
    killed = Made(tmp_path)
    name = killed.search.next()
    assert name is not None
    killed.search.saw(name, 10, 0.5)
    (tmp_path / RESULTS).mkdir()
    (tmp_path / RESULTS / f"{name}.json").write_text(json.dumps({"status": "finished"}))
    on = Made(tmp_path)
    assert on.search.next() != name
    assert on.search.study.get_trials()[0].value == 0.5


def test_a_stopped_trial_goes_on_another_time(tmp_path: Path) -> None:
    first = Made(tmp_path)
    name = first.search.next()
    assert name is not None
    first.search.ended(name, TrialOutcome("stopped"))
    assert first.states() == ["RUNNING"]
    assert Made(tmp_path).search.next() == name


def test_a_trial_that_is_worse_than_the_median_at_its_step_is_given_up(tmp_path: Path) -> None:
    made = Made(tmp_path, pruner="median", sampler="random", trials=9)
    made.run(6)
    name = made.search.next()
    assert name is not None
    assert made.search.saw(name, 10, 99.0)
    made.search.ended(name, TrialOutcome("pruned"))
    assert made.states()[-1] == "PRUNED"


def test_a_search_comes_closer_than_its_first_trials(tmp_path: Path) -> None:
    """Deterministic: from the seed, as the first test shows."""
    tried = [
        abs(math.log10(float(one["optimizer.lr"])) + 2.0)
        for one in Made(tmp_path, trials=12).run(12)
    ]
    assert min(tried[5:]) < min(tried[:5])


def test_diverged_and_failed_trials_are_told_apart(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for status in ("diverged", "failed"):
        name = made.search.next()
        assert name is not None
        made.search.ended(name, TrialOutcome(status))  # type: ignore[arg-type]
    assert made.states() == ["PRUNED", "FAIL"]


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
    found = corners(SPACE)
    assert {one["optimizer.name"] for one in found} == {"a", "b"}
    assert {one["optimizer.lr"] for one in found} == {"0.0001", "0.1"}


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with refused("package-not-usable", modules=["optuna"]):
        Made(tmp_path)
