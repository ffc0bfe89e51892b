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
