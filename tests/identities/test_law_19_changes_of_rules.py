"""Law 19 for what scores decide: early stopping, the rate on a plateau, and the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    LAST,
    assert_same_end,
    data,
    given_the_journal_of,
    run_in,
)
from refused import refused
from surefoot.run.run import Run
from surefoot.tracking.change_journal import read_changes
from surefoot.train.patience import ScoreWatch, load_stopping

STOPPING = sf.EarlyStopping("min val/loss", patience=50)
PLATEAU = sf.ReduceLROnPlateau("max val/loss", patience=1, factor=0.5)  # lowers it at once


def scored(run_dir: Path, **settings: Any) -> Run:
    chosen: dict[str, Any] = {
        "splits": {"val": sf.Split(data()), "more": sf.Split(data())},
        "evaluate_every": "2 steps",
        "schedule": None,
    }
    return run_in(run_dir, **(chosen | settings))


def changed(run_dir: Path, wishes: dict[str, Any], **settings: Any) -> Run:
    scored(run_dir, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(run_dir).change(**wishes)
    scored(run_dir, stop_after="13 steps", **settings).train()
    return scored(run_dir, **settings)


HISTORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stopping begins": (
        {},
        {"early_stopping.monitor": "min val/loss", "early_stopping.patience": 40},
    ),
    "stopping ends": ({"early_stopping": STOPPING}, {"early_stopping": None}),
    "another monitor": ({"early_stopping": STOPPING}, {"early_stopping.monitor": "min more/loss"}),
    "two rules": (
        {"early_stopping": [STOPPING, sf.EarlyStopping("min more/loss", patience=60)]},
        {"early_stopping": [{"monitor": "min more/loss", "patience": 70}]},
    ),
    "plateau begins": ({}, {"plateau.monitor": "max val/loss", "plateau.patience": 1}),
    "plateau ends": ({"plateau": PLATEAU}, {"plateau": None}),
    "another plateau": ({"plateau": PLATEAU}, {"plateau.monitor": "max more/loss"}),
    "a slower plateau": ({"plateau": PLATEAU}, {"plateau.patience": 3, "plateau.factor": 0.25}),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_rules_change_as_in_a_run_given_its_journal(name: str, tmp_path: Path) -> None:
    settings, wishes = HISTORIES[name]
    run = changed(tmp_path / "changed", wishes, **settings)
    run.train()
    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    scored(given, **settings).train()
    assert_same_end(given, tmp_path / "changed")
    assert sf.load(run).verify(steps=3).problems == []
    rates = [record["lr"] for record in sf.load(given).records("train")]
    assert rates == [record["lr"] for record in sf.load(tmp_path / "changed").records("train")]


def test_what_a_plateau_has_lowered_stays_lowered(tmp_path: Path) -> None:
    for name in ("plateau ends", "another plateau"):
        settings, wishes = HISTORIES[name]
        run_dir = tmp_path / name
        run = changed(run_dir, wishes, **settings)
        run.train()
        rates = [record["lr"] for record in sf.load(run_dir).records("train")]
        assert rates[CHANGED_AT] < rates[0]
        assert rates[CHANGED_AT] <= rates[CHANGED_AT - 1]
        if name == "plateau ends":
            assert set(rates[CHANGED_AT:]) == {rates[CHANGED_AT]}


def test_what_a_plateau_lowers_in_the_last_step_holds_in_a_longer_run(tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"plateau": PLATEAU, "length": "10 steps"}
    scored(tmp_path / "changed", **lengths).train()
    sf.load(tmp_path / "changed").change(length="14 steps")
    run = scored(tmp_path / "changed", **lengths)
    run.train()
    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    scored(given, **lengths).train()
    assert_same_end(given, tmp_path / "changed", step=14)
    rates = [record["lr"] for record in sf.load(given).records("train")]
    assert rates == [record["lr"] for record in sf.load(run).records("train")]
    factors = [record.get("lr_factor") for record in sf.load(given).records("eval")]
    assert factors == [record.get("lr_factor") for record in sf.load(run).records("eval")]
    assert sf.load(run).verify(steps="all").problems == []


def test_a_rule_lives_on_unless_its_own_monitor_changes(tmp_path: Path) -> None:
    rules = [STOPPING, sf.EarlyStopping("min more/loss", patience=60)]
    scored(tmp_path, early_stopping=rules, best="max val/loss", stop_after="10 steps").train()
    before = scored(tmp_path, early_stopping=rules, best="max val/loss")
    with before:
        stopping = {rule.score: rule.state() for rule in before.parts.run_state.stopping}
    sf.load(tmp_path).change(
        early_stopping=[
            {"monitor": "max val/loss", "patience": 70},
            {"monitor": "min more/loss", "patience": 71},
        ]
    )
    run = scored(tmp_path, early_stopping=rules, best="max val/loss")
    with run:
        of_loss, of_more = run.parts.run_state.stopping
        assert (of_loss.value, of_loss.waited) == (None, 0)
        assert of_more.state() == stopping["more/loss"]
        best = run.parts.run_state.best
        assert best is not None
        assert best.value is not None


def test_two_rules_of_one_monitor_keep_their_own_values() -> None:
    rules = [
        ScoreWatch(rule.monitor, rule)
        for rule in (STOPPING, sf.EarlyStopping("min val/loss", patience=9, min_delta=0.5))
    ]
    for step, loss in enumerate((3.0, 2.9, 2.8), start=1):
        for rule in rules:
            rule.improved(step, loss)
    states = [rule.state() for rule in rules]
    again = [ScoreWatch("min val/loss"), ScoreWatch("min val/loss")]
    load_stopping(again, states, monitor=None)
    assert [rule.waited for rule in again] == [0, 2]


@pytest.mark.parametrize("wishes", [{"early_stopping": None}, {"early_stopping.patience": 30}])
def test_a_run_that_stopped_early_goes_on(wishes: dict[str, Any], tmp_path: Path) -> None:
    rule = sf.EarlyStopping("max val/loss", patience=2)
    scored(tmp_path, early_stopping=rule).train()
    stopped_at = sf.load(tmp_path).step
    assert stopped_at < LAST
    with refused("change-after-early-stopping", step=stopped_at):
        sf.load(tmp_path).change(**{"early_stopping.min_delta": 0.5})
    sf.load(tmp_path).change(**wishes)
    scored(tmp_path, early_stopping=rule).train()
    assert sf.load(tmp_path).step == LAST


@pytest.mark.parametrize(
    ("wishes", "code"),
    [
        ({"early_stopping.patience": 3}, "rule-incomplete"),
        ({"early_stopping.monitor": "min val/loss"}, "rule-incomplete"),
        ({"early_stopping": "min val/loss"}, "setting-out-of-range"),
        ({"plateau.monitor": "loss", "plateau.patience": 3}, "setting-out-of-range"),
        (
            {"early_stopping.monitor": "min other/loss", "early_stopping.patience": 3},
            "score-unknown",
        ),
        ({"plateau.monitor": "min val/loss", "plateau.patience": 0}, "setting-out-of-range"),
        (
            {"plateau.monitor": "min val/loss", "plateau.patience": 1, "plateau.rate": 2},
            "setting-cannot-change",
        ),
    ],
)
def test_a_rule_that_cannot_be_is_refused(
    wishes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    scored(tmp_path, stop_after="2 steps").train()
    with refused(code):
        sf.load(tmp_path).change(**wishes)
    assert read_changes(tmp_path) == ()
