"""Lines of the journal about skipped steps: as few as say it."""

from __future__ import annotations

import itertools

import pytest

from refused import refused
from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.train.skipped_steps import (
    changes_of_skips,
    end_of_range,
    in_words,
    skipped_count,
    steps_in,
)

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
    assert [(line.from_step, line.was) for line in lines] == [(10, "11..12"), (15, "11..15")]


def test_a_range_that_is_one_step_longer_is_added() -> None:
    journal = changes_of_skips("9..12", [], step=2, steps=LENGTH)
    for text in ("9..13", "8..13"):
        journal += changes_of_skips(text, journal, step=2, steps=LENGTH)
        assert skipped_in(journal) == set(steps_in(text))


@pytest.mark.parametrize("step", [6, 7])
def test_a_range_behind_which_the_run_is_has_no_new_line(step: int) -> None:
    journal = changes_of_skips("5..6", [], step=2, steps=LENGTH)
    lines = changes_of_skips("20..20", journal, step=step, steps=LENGTH)
    assert [(line.from_step, line.was) for line in lines] == [(19, None), (20, "20..20")]


@pytest.mark.parametrize("step", [6, 7])
def test_where_no_range_is_to_come_none_changes_nothing(step: int) -> None:
    journal = changes_of_skips("5..6", [], step=2, steps=LENGTH)
    assert changes_of_skips(None, journal, step=step, steps=LENGTH) == []


def test_a_range_within_another_adds_nothing() -> None:
    lines = changes_of_skips("9..15, 10..12", [], step=2, steps=LENGTH)
    assert [(line.from_step, line.now) for line in lines] == [(8, "9..15"), (15, None)]


def test_what_a_line_does_is_said_of_three_kinds() -> None:
    texts = {in_words(None, "5..6"), in_words("5..6", None), in_words(None, None)}
    assert len(texts) == 3
    assert [text for text in texts if "5..6" not in text] == [in_words(None, None)]


def test_a_range_of_completed_steps_that_the_journal_has_is_not_refused() -> None:
    journal = changes_of_skips("5..6", [], step=2, steps=LENGTH)
    assert changes_of_skips("5..6", journal, step=20, steps=LENGTH) == []


def test_going_back_into_a_range_keeps_its_end() -> None:
    clip = SettingChange(0, 10, "clip", "off", "norm 1.0")
    ranges = changes_of_skips("9..12", [], step=2, steps=LENGTH, because="damaged")
    journal = [*ranges[:1], clip, *ranges[1:]]
    for step in (9, 10, 11, 12):
        (end,) = end_of_range(journal, step=step)
        assert (end.from_step, end.was, end.now) == (12, "9..12", None)
        assert end.because == "damaged"
    for step in (7, 8, 13, 20):
        assert end_of_range(journal, step=step) == []


def test_skipped_steps_are_counted_between_two_steps() -> None:
    journal = changes_of_skips("5..6, 9..12", [], step=2, steps=LENGTH)
    skipped = skipped_in(journal)
    for after, until in itertools.combinations(range(LENGTH), 2):
        expected = len(skipped & set(range(after, until)))
        assert skipped_count(journal, after=after, until=until) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("5..7", "skipped-steps-completed"),
        (f"{LENGTH + 1}..{LENGTH + 2}", "skipped-steps-after-end"),
        (f"{LENGTH}..{LENGTH}", "skipped-steps-beyond-length"),
        (f"6..{LENGTH}", "skipped-steps-beyond-length"),
    ],
)
def test_a_range_that_is_not_to_come_is_refused(text: str, code: str) -> None:
    with refused(code, setting="skip_steps"):
        changes_of_skips(text, [], step=5, steps=LENGTH)
    assert changes_of_skips(f"6..{LENGTH - 1}", [], step=5, steps=LENGTH)
