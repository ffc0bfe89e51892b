"""Law 19 for a schedule that begins anew, also one with the settings that it has already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    LAST,
    assert_same_end,
    given_the_journal_of,
    run_in,
)
from journals import in_force
from surefoot.config.durations import Length
from surefoot.tracking.change_journal import read_changes
from surefoot.train.recorded_settings import read_recorded_settings

LR = 1e-2  # of `run_in`, with a cosine and a warm-up of 10%
ANEW = {"schedule.name": "cosine"}
AS_IT_IS = {"schedule.name": "cosine", "schedule.warmup": "10%"}


def rates(run_dir: Path) -> list[float]:
    records = sf.load(run_dir).records("train")
    return [record["lr"] for record in records]


def cosine_over(steps: int) -> list[float]:
    """Return the rates of a cosine without a warm-up, as surefoot gives them to a new run."""
    schedule = sf.schedules.cosine(warmup=0)
    length = Length(steps=steps, samples_per_epoch=60, batch_size=8)
    factor = schedule.factors(length)
    return [LR * factor(step) for step in range(steps)]


def assert_given_the_same(changed: Path, *, step: int, **settings: Any) -> None:
    given = given_the_journal_of(changed, changed.with_name("given"))
    run_in(given, **settings).train()
    assert_same_end(given, changed, step=step)


@pytest.mark.parametrize("stopped_at", [LAST + 1, LAST + 10])
def test_a_run_that_is_made_longer_twice_begins_its_schedule_twice(
    tmp_path: Path, stopped_at: int
) -> None:
    run_dir = tmp_path / "run"
    run_in(run_dir).train()
    sf.load(run_dir).change("still improving", length="35 steps", **ANEW)
    run_in(run_dir, stop_after=f"{stopped_at} steps").train()
    run_in(run_dir).train()
    sf.load(run_dir).change("still improving", length="50 steps", **ANEW)
    run_in(run_dir, stop_after="40 steps").train()
    run_in(run_dir).train()
    assert rates(run_dir)[LAST:35] == pytest.approx(cosine_over(12))
    assert rates(run_dir)[35:] == pytest.approx(cosine_over(15))
    assert_given_the_same(run_dir, step=50)


def test_a_schedule_with_the_settings_that_it_has_begins_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_in(run_dir, stop_after=f"{CHANGED_AT} steps").train()
    sf.load(run_dir).change("once more", **AS_IT_IS)
    (line,) = read_changes(run_dir)
    assert line.begins_schedule
    run_in(run_dir).train()
    new = rates(run_dir)[CHANGED_AT:]
    assert new[0] < max(new) == pytest.approx(LR)  # a warm-up of its own
    assert_given_the_same(run_dir, step=LAST)


def test_a_wish_that_is_repeated_at_a_later_step_begins_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_in(run_dir, length="20 steps", stop_after="5 steps").train()
    for stop in ("8 steps", "12 steps"):
        wishes = {"schedule.name": "linear", "length": "25 steps"}
        sf.load(run_dir).change("a test", **wishes)
        run_in(run_dir, length="20 steps", stop_after=stop).train()
    assert [line.from_step for line in read_changes(run_dir)] == [5, 5]
    sf.load(run_dir).change("another reason", **{"schedule.name": "linear"})
    assert [line.from_step for line in read_changes(run_dir)] == [5, 5, 12]


def test_a_wish_that_comes_with_another_change_is_not_repeated(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    sf.load(tmp_path).change("a test", **ANEW)
    run_in(tmp_path, stop_after="8 steps").train()
    sf.load(tmp_path).change("a test", **ANEW, **{"optimizer.lr": 5e-3})
    assert [(line.setting, line.from_step) for line in read_changes(tmp_path)] == [
        ("schedule", 5),
        ("optimizer.lr", 8),
        ("schedule", 8),
    ]


def test_a_schedule_begins_once_at_a_step_whatever_the_reason_is(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    sf.load(tmp_path).change("one", **ANEW)
    sf.load(tmp_path).change("other", **ANEW)
    assert len(read_changes(tmp_path)) == 1


def test_a_schedule_that_is_changed_back_at_the_same_step_begins_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_in(run_dir, stop_after=f"{CHANGED_AT} steps").train()
    sf.load(run_dir).change("a test", **{"schedule.name": "wsd"})
    sf.load(run_dir).change("a test", **AS_IT_IS)
    (line,) = in_force(read_changes(run_dir))
    assert line.begins_schedule
    run_in(run_dir).train()
    new = rates(run_dir)[CHANGED_AT:]
    assert new[0] < max(new) == pytest.approx(LR)
    assert_given_the_same(run_dir, step=LAST)


def test_a_stretched_schedule_can_begin_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_in(run_dir, stop_after="5 steps").train()
    sf.load(run_dir).change("a test", **AS_IT_IS)
    run_in(run_dir, stop_after="8 steps").train()
    sf.load(run_dir).change("a test", length="40 steps", schedule="stretch")
    run_in(run_dir, stop_after="12 steps").train()
    sf.load(run_dir).change("a test", **AS_IT_IS)
    assert [line.from_step for line in read_changes(run_dir)] == [5, 8, 8, 12]
    run_in(run_dir).train()
    assert_given_the_same(run_dir, step=40)


def test_a_run_goes_back_once_to_begin_its_schedule_anew(tmp_path: Path) -> None:
    run_in(tmp_path, save_every="5 steps").train()
    for _ in range(2):
        sf.load(tmp_path).go_back(10, "a test", **AS_IT_IS)
        run_in(tmp_path, save_every="5 steps", stop_after="15 steps").train()
    lines = [(line.setting, line.from_step) for line in read_changes(tmp_path)]
    assert lines == [("step", 10), ("schedule", 10)]


def test_a_body_begins_a_schedule_once_for_each_reason(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = run_in(run_dir)
    with run:
        for step in run:
            if step.index in (4, 9):
                run.change("schedule.name", "cosine", because=f"step {step.index}")
            if step.index == 12:
                run.change("schedule.name", "cosine", because="step 9")
    assert [line.from_step for line in read_changes(run_dir)] == [5, 10]
    assert rates(run_dir)[10:] == pytest.approx(cosine_over(LAST - 10))
    assert_given_the_same(run_dir, step=LAST)


def test_the_drawing_has_the_rates_of_the_run(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps").train()
    sf.load(tmp_path).change("a test", **AS_IT_IS)
    course = read_recorded_settings(tmp_path).course()
    assert course is not None
    drawn = [course.rate(step) for step in range(LAST)]
    run_in(tmp_path).train()
    assert rates(tmp_path) == pytest.approx(drawn)
