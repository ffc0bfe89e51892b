"""Law 19, a schedule that is stretched: from there on the run has the rates of a run that had the
new length from the start, and ends with the bits of the run that was given its journal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities import changed_runs
from identities.changed_runs import given_the_journal_of, same, weights
from refused import refused
from surefoot.run.run import Run

AT = 10
SCHEDULES: dict[str, Any] = {
    "cosine": sf.schedules.cosine("10%"),
    "wsd": sf.schedules.wsd("10%", cooldown="80%"),
    "one_cycle": sf.schedules.one_cycle(momentum_range=(0.85, 0.95)),
    "joined": sf.schedules.join(sf.schedules.constant("10%"), sf.schedules.cosine()),
    "from_function": sf.schedules.from_function(lambda step: 1.0 / (step + 1)),
}


def run_in(run_dir: Path, **settings: Any) -> Run:
    return changed_runs.run_in(run_dir, **({"length": "20 steps"} | settings))


def stretched_run(run_dir: Path, *, length: str = "40 steps", **settings: Any) -> Run:
    run_in(run_dir, stop_after=f"{AT} steps", **settings).train()
    sf.load(run_dir).change("a test", length=length, schedule="stretch")
    return run_in(run_dir, **settings)


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_rates_are_those_of_a_run_that_had_the_length_from_the_start(
    name: str, tmp_path: Path
) -> None:
    schedule = SCHEDULES[name]
    run = stretched_run(tmp_path / "run", schedule=schedule)
    run.train()
    run_in(tmp_path / "whole", schedule=schedule, length="40 steps").train()
    stretched = sf.load(tmp_path / "run").records("train")
    whole = sf.load(tmp_path / "whole").records("train")
    assert len(stretched) == 40
    for name_of_rate in ("lr", "momentum"):
        rates = [record.get(name_of_rate) for record in stretched[AT:]]
        assert rates == [record.get(name_of_rate) for record in whole[AT:]]


@pytest.mark.parametrize("stopped_at", [11, 25])
def test_it_ends_with_the_bits_of_the_run_that_was_given_its_journal_and_resumes_to_them(
    stopped_at: int, tmp_path: Path
) -> None:
    changed = stretched_run(tmp_path / "changed")
    run_in(tmp_path / "changed", stop_after=f"{stopped_at} steps").train()
    changed = run_in(tmp_path / "changed")
    changed.train()
    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"))
    given.train()
    assert same(weights(given), weights(changed))
    assert sf.load(run_in(tmp_path / "changed")).verify(steps="all").problems == []


def test_a_longer_run_after_it_goes_on_from_its_rate(tmp_path: Path) -> None:
    stretched_run(tmp_path)
    run_in(tmp_path, stop_after="30 steps").train()
    before = run_in(tmp_path).parts.task.factors
    sf.load(tmp_path).change(length="60 steps")
    after = run_in(tmp_path).parts.task.factors
    assert after(30) == pytest.approx(before(30))
    assert after(60) == 0.0


def test_it_is_a_line_of_the_journal_that_keeps_the_schedule(tmp_path: Path) -> None:
    run = stretched_run(tmp_path)
    lines = sf.load(tmp_path).settings_at(AT)
    assert lines["schedule"] == sf.schedules.cosine("10%").to_dict()
    length, stretch = run.parts.changes
    assert [length.setting, stretch.setting] == ["length", "schedule"]
    assert stretch.was == stretch.now
    assert [length.stretches, stretch.stretches] == [False, True]


def test_a_second_one_to_the_same_end_changes_nothing(tmp_path: Path) -> None:
    stretched_run(tmp_path)
    run_in(tmp_path, stop_after="20 steps").train()
    before = (tmp_path / "changes.jsonl").read_text()
    sf.load(tmp_path).change(length="40 steps", schedule="stretch")
    assert (tmp_path / "changes.jsonl").read_text() == before


def test_a_run_that_went_on_in_its_shape_may_be_stretched_later(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change(length="40 steps")
    run_in(tmp_path, stop_after="20 steps").train()
    sf.load(tmp_path).change(schedule="stretch")
    run = run_in(tmp_path)
    factors = run.parts.task.factors
    run.train()
    assert sf.load(tmp_path).step == 40
    whole = run_in(tmp_path / "whole", length="40 steps").parts.task.factors
    assert [factors(step) for step in range(20, 41)] == [whole(step) for step in range(20, 41)]


def test_other_settings_of_the_schedule_beside_it_are_refused(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    with refused("stretch-with-other-settings", names=["warmup"]):
        sf.load(tmp_path).change(**{"schedule": "stretch", "schedule.warmup": "5%"})
    assert not (tmp_path / "changes.jsonl").exists()
