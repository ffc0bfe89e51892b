"""The learning rates of a run by its files, where an epoch is cut into steps as a whole, and where
it has no known size.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import surefoot as sf
from identities.test_law_19_changes_of_whole_epochs import run_in
from refused import refused
from surefoot.tools.plan.rest_of_run import read_rest


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("lanes", "12 steps"),
        ("buckets", "12 steps"),
        ("lists", "12 steps"),
        ("lanes", "2 epochs"),
        ("buckets", "2 epochs"),
    ],
)
def test_rates_are_those_of_the_steps(name: str, length: str, tmp_path: Path) -> None:
    run_in(tmp_path, name, length=length, stop_after="2 steps", log_every="1 steps").train()
    sf.load(tmp_path).change(**{"optimizer.lr": 1e-3, "schedule.name": "linear"})
    course = read_rest(tmp_path).course
    assert course is not None
    run_in(tmp_path, name, length=length, log_every="1 steps").train()
    rates = [record["lr"] for record in sf.load(tmp_path).records("train")]
    assert course.length.steps == len(rates)
    assert course.rates(range(len(rates))) == pytest.approx(rates)


def test_a_length_that_ends_before_the_batch_size_could_hold_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path, "lanes", schedule=None, length="40 steps", stop_after="2 steps").train()
    with refused("change-after-last-step"):
        sf.load(tmp_path).change(length="4 steps", batch_size=12)
    assert not (tmp_path / "changes.jsonl").exists()
