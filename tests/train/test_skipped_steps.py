"""Lines of the journal about skipped steps: as few as say it."""

from __future__ import annotations

import itertools

import pytest

from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.train.skipped_steps import changes_of_skips, steps_in

LENGTH = 40
RANGES = ("5..6", "9..12", "11..15", "20..20", "30..33")


def skipped_in(journal: list[SettingChange]) -> set[int]:
    """Return the steps that a journal skips, read line by line."""
    steps: set[int] = set()
    lines = in_effect(journal)
    for line, next_line in itertools.zip_longest(lines, lines[1:]):
        end = LENGTH if next_line is None else next_line.from_step
        if line.now is not None:
            steps |= set(range(line.from_step, end))
    return steps


@pytest.mark.parametrize("texts", list(itertools.permutations(RANGES, 3)))
def test_ranges_in_any_order_are_skipped(texts: tuple[str, ...]) -> None:
    journal: list[SettingChange] = []
    expected: set[int] = set()
    for text in texts:
        journal += changes_of_skips(text, journal, step=2, steps=LENGTH)
        expected |= set(steps_in(text))
        assert skipped_in(journal) == expected
        lines = in_effect(journal)
        values = [None, *(line.now for line in lines)]
        assert [line.was for line in lines] == values[:-1]
    assert changes_of_skips(", ".join(texts), journal, step=2, steps=LENGTH) == []


def test_a_range_behind_the_others_is_two_lines() -> None:
    journal: list[SettingChange] = []
    for text in RANGES[:2] + RANGES[3:]:
        lines = changes_of_skips(text, journal, step=2, steps=LENGTH)
        assert [line.from_step for line in lines] == [steps_in(text).start, steps_in(text).stop]
        journal += lines


def test_a_range_before_others_leaves_those_before_it() -> None:
    journal = changes_of_skips("5..6, 30..33", [], step=2, steps=LENGTH)
    lines = changes_of_skips("20..20", journal, step=2, steps=LENGTH)
    assert [line.from_step for line in lines] == [19, 20, 29, 33]


@pytest.mark.parametrize("step", [2, 4, 5, 29, 31])
def test_no_step_is_skipped_any_more_by_one_line(step: int) -> None:
    journal = changes_of_skips("5..6, 30..33", [], step=2, steps=LENGTH)
    (line,) = changes_of_skips(None, journal, step=step, steps=LENGTH)
    assert (line.from_step, line.now) == (step, None)
    assert all(each < step for each in skipped_in([*journal, line]))


def test_a_range_that_is_being_skipped_becomes_longer() -> None:
    journal = changes_of_skips("9..12", [], step=2, steps=LENGTH)
    lines = changes_of_skips("13..15", journal, step=10, steps=LENGTH)
    assert skipped_in([*journal, *lines]) == set(range(8, 15))
    assert lines[-1].from_step == 15
