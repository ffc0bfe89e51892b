"""Law 19 for runs that go back over what was known of later steps: steps that are skipped, ramps,
and other data. They end as the run that was given the lines in force from the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities import test_law_19_changes_of_data as other_data
from identities.changed_runs import assert_same_end, run_in
from identities.test_law_19_going_back import (
    OTHERWISE,
    SAVED,
    course,
    given_what_is_in_force,
    on_two_ranks,
)
from journals import in_force
from rank_processes import forks
from refused import refused
from surefoot.config.setting_change import in_effect
from surefoot.tracking.change_journal import append_changes, read_changes

LAST = 23
SKIPPED = range(8, 13)  # indexes from 0; 9..13 in records


def assert_as_given(run: Path, given: Path) -> None:
    assert_same_end(given, run, step=sf.load(run).step)
    assert course(run) == course(given)


# --- steps that are skipped -----------------------------------------------------------------------


def skipping(run: Path) -> Path:
    """Return a run that has skipped five steps, and was stopped behind them."""
    run_in(run, stop_after="5 steps", **SAVED).train()
    sf.load(run).change("bad data", skip_steps="9..13")
    run_in(run, stop_after="17 steps", **SAVED).train()
    return run


def skipped_in(run: Path) -> list[int]:
    saved = sf.load(run)
    return [step for step in range(LAST) if saved.settings_at(step).get("skip_steps") is not None]


def made_in(run: Path) -> list[int]:
    return [record["step"] - 1 for record in sf.load(run).records("train")]


@pytest.mark.parametrize(
    ("step", "settings"),
    [(7, {}), (8, {}), (9, {}), (10, OTHERWISE), (12, {}), (13, {}), (13, OTHERWISE), (14, {})],
)
def test_a_range_that_has_begun_ends_where_it_did(
    step: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = skipping(tmp_path / "run")
    sf.load(run).go_back(step, "no good", **settings)
    expected = [*SKIPPED] if step > SKIPPED.start else []
    assert skipped_in(run) == expected
    run_in(run, **SAVED).train()
    assert made_in(run) == [index for index in range(LAST) if index not in expected]
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))
    assert sf.load(run_in(run, **SAVED)).verify(steps="all").problems == []


def test_a_range_that_was_longer_when_it_was_left_ends_where_it_ended_before(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run_in(run, stop_after="5 steps", **SAVED).train()
    sf.load(run).change(skip_steps="9..12")
    run_in(run, stop_after="10 steps", **SAVED).train()
    sf.load(run).change(skip_steps="11..16")
    run_in(run, stop_after="18 steps", **SAVED).train()
    assert skipped_in(run) == [*range(8, 16)]
    sf.load(run).go_back(9)
    assert skipped_in(run) == [*range(8, 12)]
    run_in(run, **SAVED).train()
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))


def test_a_run_goes_back_twice_into_a_range(tmp_path: Path) -> None:
    run = skipping(tmp_path / "run")
    sf.load(run).go_back(11, "first")
    run_in(run, stop_after="15 steps", **SAVED).train()
    sf.load(run).go_back(10, "second", **OTHERWISE)
    lines = read_changes(run)
    sf.load(run).go_back(10, "second", **OTHERWISE)
    assert read_changes(run) == lines
    assert skipped_in(run) == [*SKIPPED]
    run_in(run, **SAVED).train()
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))


def test_a_range_is_left_in_its_midst(tmp_path: Path) -> None:
    run = skipping(tmp_path / "run")
    sf.load(run).go_back(10, skip_steps=None)
    assert skipped_in(run) == [8, 9]
    run_in(run, **SAVED).train()
    assert made_in(run) == [*range(8), *range(10, LAST)]
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))


def test_a_run_goes_back_in_order_to_skip_the_steps_that_it_has_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_in(run, stop_after="17 steps", **SAVED).train()
    with refused("skipped-steps-completed", step=17):
        sf.load(run).change(skip_steps="9..13")
    with refused("skipped-steps-completed", step=9):
        sf.load(run).go_back(9, skip_steps="9..13")
    with refused("skipped-steps-beyond-length", steps=LAST):
        sf.load(run).go_back(8, skip_steps="9..23")
    assert read_changes(run) == ()
    sf.load(run).go_back(8, skip_steps="9..13")
    assert skipped_in(run) == [*SKIPPED]
    run_in(run, **SAVED).train()
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))
    assert_as_given(run, never_left(tmp_path / "plain"))


def never_left(run: Path) -> Path:
    """Return a run that has skipped the steps, and never went back."""
    skipping(run)
    run_in(run, **SAVED).train()
    return run


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_go_back_into_a_range(parallel: str, tmp_path: Path) -> None:
    of_ranks: dict[str, Any] = {"parallel": parallel, "micro_batch_size": 4}
    run = tmp_path / "run"
    on_two_ranks(run, stop_after="5 steps", **of_ranks)
    sf.load(run).change(skip_steps="9..13")
    on_two_ranks(run, stop_after="17 steps", **of_ranks)
    sf.load(run).go_back(10, **OTHERWISE)
    on_two_ranks(run, **of_ranks)
    given = tmp_path / "given"
    given.mkdir()
    append_changes(given, in_force(read_changes(run)))
    on_two_ranks(given, **of_ranks)
    assert_as_given(run, given)
    assert made_in(run) == [index for index in range(LAST) if index not in SKIPPED]


# --- ramps ----------------------------------------------------------------------------------------

# 3 epochs of 60 samples: 40% are 72 samples, 2 epochs are 120, and half is 90
RAMPS: dict[str, Any] = {
    "batch_size": "8, 16 from 40%, 20 from 2 epochs",
    "clip": "norm 1.0, off from 50%",
}
STEPS = [0, 8, 9, 10, 12]


@pytest.mark.parametrize(
    ("step", "settings", "sizes"),
    [
        (0, {}, [8, 8, 16, 16, 20]),
        (5, {"length": "6 epochs"}, [8, 8, 16, 16, 20]),
        (9, {}, [8, 8, 16, 16, 20]),
        (9, {"batch_size": 12}, [8, 8, 12, 12, 12]),
        (10, {"length": "6 epochs"}, [8, 8, 16, 16, 20]),
        (11, {}, [8, 8, 16, 16, 20]),
        (13, {}, [8, 8, 16, 16, 10]),  # of the change that was no good
    ],
)
def test_what_is_to_come_of_ramps_keeps_its_steps(
    step: int, settings: dict[str, Any], sizes: list[int], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_in(run, stop_after="11 steps", **SAVED, **RAMPS).train()
    sf.load(run).change("a try", **{"optimizer.lr": 0.5, "batch_size": 10})
    run_in(run, stop_after="14 steps", **SAVED, **RAMPS).train()
    sf.load(run).go_back(step, "no good", **settings)
    run_in(run, **SAVED, **RAMPS).train()

    values = [sf.load(run).settings_at(each) for each in STEPS]
    assert [value["batch_size"] for value in values] == sizes
    assert [value["clip"] for value in values] == ["norm 1.0"] * 3 + ["off"] * 2
    assert_as_given(run, given_what_is_in_force(run, tmp_path / "given"))


# --- other data -----------------------------------------------------------------------------------


def with_other_data(run: Path, when: str) -> Path:
    other_data.changed_run(run, when, **SAVED)
    other_data.run_in(run, other_data.MANY, stop_after="25 steps", **SAVED).train()
    return run


def train_over_data(run: Path) -> None:
    """Train to the end: with the few samples until the journal says so, and with the many then."""
    begins = [line.from_step for line in in_effect(read_changes(run)) if line.setting == "data"]
    if begins:
        if sf.load(run).checkpoints[-1:] < begins:
            with refused("data-of-earlier-steps", sf.CheckpointError):
                other_data.run_in(run, **SAVED).train()
        other_data.run_in(run, other_data.MANY, **SAVED).train()
    else:
        other_data.run_in(run, **SAVED).train()


def given_over_data(run: Path, to: Path) -> Path:
    to.mkdir()
    append_changes(to, in_force(read_changes(run)))
    train_over_data(to)
    return to


@pytest.mark.parametrize("when", other_data.BEGINS)
@pytest.mark.parametrize(
    ("distance", "settings"),
    [(-4, {}), (0, {"optimizer.lr": 5e-3}), (1, {}), (6, {"optimizer.lr": 5e-3})],
)
def test_a_run_goes_back_to_either_side_of_a_change_of_its_data(
    distance: int, when: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = with_other_data(tmp_path / "run", when)
    step = other_data.BEGINS[when] + distance
    sf.load(run).go_back(step, "no good", **settings)
    has_many = any(line.setting == "data" for line in in_effect(read_changes(run)))
    assert has_many == (distance > 0)
    wrong, code = other_data.MANY, "data-changed"
    if has_many:
        wrong, code = other_data.FEW, "data-of-earlier-steps"
    with pytest.raises(sf.CheckpointError) as refusal:
        other_data.run_in(run, wrong, **SAVED).train()
    assert refusal.value.code == code
    train_over_data(run)
    given = given_over_data(run, tmp_path / "given")
    assert_as_given(run, given)


@pytest.mark.parametrize("when", other_data.BEGINS)
@pytest.mark.parametrize(
    ("step", "then", "begin"), [(7, "next epoch", 8), (9, "at once", 9), (9, "next epoch", 15)]
)
def test_other_data_begin_elsewhere_after_going_back(
    step: int, then: str, begin: int, when: str, tmp_path: Path
) -> None:
    run = with_other_data(tmp_path / "run", when)
    sf.load(run).go_back(step, "elsewhere", data=then, **{"optimizer.lr": 5e-3})
    (line,) = [line for line in in_effect(read_changes(run)) if line.setting == "data"]
    # 8 steps of 8 samples are the first epoch, up to the fourth sample of the second
    assert line.from_step == begin
    train_over_data(run)
    assert_as_given(run, given_over_data(run, tmp_path / "given"))
