"""Law 19 where a stop has cut off the evaluation after the last step before a change: it belongs to
the settings of this step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import surefoot as sf
from identities.changed_runs import assert_same_end, data, given_the_journal_of, loss, run_in
from surefoot.checkpoint.reader import read
from surefoot.config.setting_change import SettingChange
from surefoot.tracking.change_journal import append_changes

HISTORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "average ends": ({"ema": 0.9}, {"ema": None}),
    "average begins": ({"ema": None}, {"ema": 0.9}),
    "precision": ({}, {"precision": "bf16"}),
    "plateau ends": (
        {"plateau": sf.ReduceLROnPlateau("max val/loss", patience=1)},
        {"plateau": None},
    ),
    "stopping begins": (
        {},
        {"early_stopping.monitor": "min val/loss", "early_stopping.patience": 9},
    ),
    "the run becomes longer": ({"length": "10 steps"}, {"length": "20 steps"}),
}


def scored(run_dir: Path, *, stops_at: int | None = None, **settings: Any) -> sf.Run:
    """Return a run that a signal stops in its evaluation after a step."""

    def score(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if run.state.step == stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, batch)

    chosen: dict[str, Any] = {
        "splits": {"val": sf.Split(data(), loss=score)},
        "best": "min val/loss",
        "evaluate_every": "5 steps",
        "schedule": None,
    }
    run = run_in(run_dir, **(chosen | settings))
    return run


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["val/loss"]) for record in sf.load(run_dir).records("eval")]


@pytest.mark.parametrize("name", HISTORIES)
def test_an_evaluation_that_was_cut_off_has_the_settings_of_its_step(
    name: str, tmp_path: Path
) -> None:
    settings, wishes = HISTORIES[name]
    changed = tmp_path / "changed"
    with pytest.raises(SystemExit):
        scored(changed, stops_at=10, **settings).train()
    assert read(changed / "checkpoints" / "step-00000010").saved.evaluation_due
    sf.load(changed).change(**wishes)
    scored(changed, **settings).train()

    given = given_the_journal_of(changed, tmp_path / "given")
    scored(given, **settings).train()
    assert evaluations(given) == evaluations(changed)
    assert_same_end(given, changed, step=sf.load(given).step)


def test_a_loop_of_ones_own_makes_it_too(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    with pytest.raises(SystemExit):
        scored(changed, stops_at=10).train()
    sf.load(changed).change(ema=None)
    with scored(changed) as run:
        assert [step.index for step in run] == list(range(10, 23))
    given = given_the_journal_of(changed, tmp_path / "given")
    scored(given).train()
    assert evaluations(given) == evaluations(changed)
    assert_same_end(given, changed)


def ending_with_a_test(run_dir: Path, **settings: Any) -> sf.Run:
    """Return a run of 10 steps with a split that is for the end of the run."""
    splits = {"val": sf.Split(data()), "test": sf.Split(data(), at_end=True)}
    chosen: dict[str, Any] = {
        "splits": splits,
        "best": "min val/loss",
        "evaluate_every": "5 steps",
        "length": "10 steps",
        "sample_every": "20 steps",
        "sample_fn": lambda _: "a sample",
    }
    return run_in(run_dir, **(chosen | settings))


def ends(run_dir: Path) -> list[tuple[str, int]]:
    """Return the records that belong to the end of a run."""
    records = sf.load(run_dir).records()
    return [
        (each["kind"], each["step"]) for each in records if each["kind"] in ("final_eval", "sample")
    ]


def test_a_run_given_its_journal_evaluates_the_splits_of_its_end_once(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    ending_with_a_test(changed).train()  # it was the end
    sf.load(changed).change(length="20 steps")
    ending_with_a_test(changed).train()
    given = given_the_journal_of(changed, tmp_path / "given")
    ending_with_a_test(given).train()
    assert ends(given) == [("final_eval", 20), ("sample", 20)]
    assert_same_end(given, changed, step=20)


def test_an_early_end_at_a_change_that_lets_it_stand_is_the_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    append_changes(run_dir, [SettingChange(0, 10, "optimizer.lr", 1e-2, 1e-3)])
    rule = sf.EarlyStopping("max val/loss", patience=1)
    ending_with_a_test(run_dir, length="20 steps", early_stopping=rule, sample_fn=None).train()
    assert ends(run_dir) == [("final_eval", 10)]
